//! A stream over one file that goes on where it was cut.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use lorafleet_artifact::Scheme;
use tokio::time::Instant;

use crate::access::{Access, Sources};
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing};
use crate::{local, s3};

/// Gives exactly the bytes of its range, in order, or an error. A cut connection is taken up again at the same byte of
/// the same version of the file.
#[derive(Debug)]
pub struct Download<'a> {
    sources: &'a Sources,
    access: &'a Access,
    listing: &'a Listing,
    file: &'a FileInfo,
    /// What is still to come.
    rest: Range<u64>,
    body: Option<Body>,
    /// Attempts since the last byte, and in all.
    failed: u32,
    failed_in_all: u32,
    /// Where it began.
    first: u64,
    /// Time spent waiting for bytes since then.
    waited: Duration,
}

#[derive(Debug)]
pub(crate) enum Body {
    Local(local::Reader),
    S3(aws_sdk_s3::primitives::ByteStream),
}

impl<'a> Download<'a> {
    pub(crate) fn new(
        sources: &'a Sources,
        access: &'a Access,
        listing: &'a Listing,
        file: &'a FileInfo,
        range: Range<u64>,
    ) -> Self {
        let (first, rest) = (range.start, range);
        let waited = Duration::ZERO;
        Self { sources, access, listing, file, rest, body: None, failed: 0, failed_in_all: 0, first, waited }
    }

    /// The next piece; `None` behind the last byte.
    ///
    /// # Errors
    /// Changed at once; Timeout or Unavailable after the attempts that the limits allow, and Timeout for bytes that come
    /// too slowly.
    pub async fn next(&mut self) -> Result<Option<Bytes>, SourceError> {
        while !self.rest.is_empty() {
            self.check_pace()?;
            let begun = Instant::now();
            let attempt = self.attempt().await;
            self.waited += begun.elapsed();
            match attempt {
                Ok(piece) => {
                    self.failed = 0;
                    self.rest.start += piece.len() as u64;
                    self.check_unchanged().await?;
                    return Ok(Some(piece));
                }
                Err(error) => self.pause_or_give_up(error).await?,
            }
        }
        Ok(None)
    }

    /// With the last byte: a file of this machine may have been written to while it was read.
    async fn check_unchanged(&self) -> Result<(), SourceError> {
        let Some(Body::Local(reader)) = self.body.as_ref().filter(|_| self.rest.is_empty()) else { return Ok(()) };
        match reader.is_as_it_was().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.error(ErrorKind::Changed, "the file was changed while it was read")),
            Err(cause) => Err(self.error(ErrorKind::Unavailable, "the file cannot be looked at").because(cause)),
        }
    }

    /// Whether the bytes come as fast as the limits want it. Only the time spent waiting for them counts: who looks at
    /// each piece for long is not the store's fault.
    fn check_pace(&self) -> Result<(), SourceError> {
        let limits = self.sources.limits();
        let came = self.rest.start - self.first;
        let allowed = limits.grace + Duration::from_secs_f64(came as f64 / limits.bytes_per_second_min.max(1) as f64);
        if self.waited <= allowed {
            return Ok(());
        }
        let (seconds, least) = (self.waited.as_secs_f64(), limits.bytes_per_second_min);
        let what = format!("{came} bytes came in {seconds:.0} s, expected are {least} a second");
        Err(self.error(ErrorKind::Timeout, &what))
    }

    async fn pause_or_give_up(&mut self, error: SourceError) -> Result<(), SourceError> {
        self.body = None;
        self.failed += 1;
        self.failed_in_all += 1;
        let may_help = matches!(error.kind, ErrorKind::Timeout | ErrorKind::Unavailable);
        let limits = self.sources.limits();
        if !may_help || self.failed >= limits.attempts || self.failed_in_all > limits.interruptions {
            return Err(error);
        }
        let (uri, name, at) = (&self.listing.uri, &self.file.name, self.rest.start);
        tracing::debug!(%uri, name, at, attempt = self.failed, %error, "a download was cut and goes on");
        let doublings = (self.failed - 1).min(8);
        tokio::time::sleep(limits.backoff * (1 << doublings)).await;
        Ok(())
    }

    /// One piece of at least one and at most the remaining bytes.
    async fn attempt(&mut self) -> Result<Bytes, SourceError> {
        if self.body.is_none() {
            self.body = Some(self.request().await?);
        }
        let limit = self.sources.limits().stall;
        let next = async {
            match &mut self.body {
                Some(Body::Local(reader)) => reader.next(&self.rest).await.map_err(Box::from),
                Some(Body::S3(stream)) => stream.next().await.transpose().map_err(Box::from),
                None => Ok(None),
            }
        };
        let piece: Result<Option<Bytes>, Box<dyn std::error::Error + Send + Sync>> =
            match tokio::time::timeout(limit, next).await {
                Ok(piece) => piece,
                Err(_) => {
                    let what = format!("no byte came for {} ms", limit.as_millis());
                    return Err(self.error(ErrorKind::Timeout, &what));
                }
            };
        match piece {
            Ok(Some(piece)) if piece.is_empty() => Err(self.error(ErrorKind::Unavailable, "an empty piece came")),
            // A server that ignores the range sends more than was asked for.
            Ok(Some(piece)) if piece.len() as u64 > self.rest.end - self.rest.start => {
                Err(self.error(ErrorKind::Changed, "more bytes came than the file has"))
            }
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => Err(self.error(ErrorKind::Unavailable, "the answer ended early")),
            Err(cause) => Err(self.error(ErrorKind::Unavailable, "the connection broke").because(cause)),
        }
    }

    async fn request(&self) -> Result<Body, SourceError> {
        let (listing, file) = (self.listing, self.file);
        match listing.uri.scheme() {
            Scheme::File => local::open(&self.access.prefix, listing, file, self.rest.start).await.map(Body::Local),
            _ => {
                let client = self.sources.client_for(&listing.uri).await?;
                s3::get(client, listing, file, self.rest.clone()).await.map(Body::S3)
            }
        }
    }

    fn error(&self, kind: ErrorKind, what: &str) -> SourceError {
        let (uri, name) = (&self.listing.uri, &self.file.name);
        let (at, end) = (self.rest.start, self.rest.end);
        SourceError::new(kind, format!("reading '{name}' of '{uri}' at byte {at} of {end}: {what}"))
    }
}
