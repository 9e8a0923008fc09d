//! An adapter from a store, judged while its bytes arrive.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use lorafleet_artifact::{
    BaseShape, CONFIG_BYTES_MAX, CONFIG_FILE, Claims, Policy, Reason, Refusal, SourceUri, Verification, Verified,
    WEIGHTS_FILE, check_folder,
};

use crate::access::Sources;
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing, Version};

/// Why an adapter could not be had: the way to it, or the adapter itself.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The same bytes give the same refusal.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl AdapterError {
    /// Stable: an error's `code`, a condition's reason, a metric's label.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.reason.as_str(),
            Self::Source(error) => error.kind.as_str(),
        }
    }

    /// Whether trying again may help without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Source(error) if error.is_transient())
    }
}

/// How far a read is; may be looked at from elsewhere.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    /// Bytes done and bytes in all; (0, 0) until the size is known.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    pub(crate) fn start(&self, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// So many more are done.
    pub fn add(&self, bytes: usize) {
        self.done.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// An adapter that passed.
#[derive(Debug)]
pub struct ReadAdapter {
    pub verified: Verified,
    /// Of the weights file in the store.
    pub version: Version,
    /// Only if they were to be kept.
    pub bytes: Option<AdapterBytes>,
}

/// Both files, as they are in the store.
#[derive(Clone, Debug)]
pub struct AdapterBytes {
    pub config: Bytes,
    pub weights: Vec<u8>,
}

/// Reads and judges the adapter in a folder: configuration and header first, then every byte once. With `keep` the
/// bytes are handed back, else no more than the header is ever held.
///
/// # Errors
/// Refused with the adapter's own fault, as early as it shows; Source with the way's. Nothing is retried beyond the
/// limits of `sources`.
pub async fn read_adapter(
    sources: &Sources,
    uri: &SourceUri,
    claims: Claims,
    base: &BaseShape,
    policy: &Policy,
    keep: bool,
    progress: &Progress,
) -> Result<ReadAdapter, AdapterError> {
    let listed = list_adapter(sources, uri).await?;
    listed.read(sources, claims, base, policy, keep, progress).await
}

/// An adapter's folder as its store lists it.
#[derive(Clone, Debug)]
pub struct ListedAdapter {
    listing: Listing,
    config: FileInfo,
    weights: FileInfo,
}

/// Looks for the adapter in a folder, without reading it.
///
/// # Errors
/// Refused if the folder holds no adapter that can be read; Source for the way to it.
pub async fn list_adapter(sources: &Sources, uri: &SourceUri) -> Result<ListedAdapter, AdapterError> {
    let listing = sources.list(uri).await?;
    if listing.single {
        let message = format!("the source '{uri}' is a file, expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}");
        return Err(Refusal::new(Reason::Malformed, message).into());
    }
    check_folder(listing.names()).map_err(|refusal| listing.refused(refusal))?;
    let (Some(config), Some(weights)) = (listing.file(CONFIG_FILE).cloned(), listing.file(WEIGHTS_FILE).cloned())
    else {
        return Err(Refusal::new(Reason::Malformed, format!("'{uri}' lacks a file of an adapter")).into());
    };
    if config.bytes > CONFIG_BYTES_MAX {
        let message = format!("{CONFIG_FILE} has {} bytes, the limit is {CONFIG_BYTES_MAX}", config.bytes);
        return Err(Refusal::new(Reason::TooLarge, message).into());
    }
    Ok(ListedAdapter { listing, config, weights })
}

impl ListedAdapter {
    /// Of the weights file.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes
    }

    /// As [`read_adapter`].
    ///
    /// # Errors
    /// As [`read_adapter`].
    pub async fn read(
        &self,
        sources: &Sources,
        claims: Claims,
        base: &BaseShape,
        policy: &Policy,
        keep: bool,
        progress: &Progress,
    ) -> Result<ReadAdapter, AdapterError> {
        let Self { listing, config, weights } = self;
        progress.start(weights.bytes);
        let mut download = sources.open(listing, weights, 0..weights.bytes)?;
        // Both requests at once: a small adapter is mostly round trips.
        let (config, first) = tokio::join!(sources.read(listing, config, 0..config.bytes), download.next());
        let config = config?;
        let (read, size, base, policy) = (config.clone(), weights.bytes, base.clone(), policy.clone());
        let begin = move || Verification::begin(&read, size, claims, &base, &policy);
        let mut verification = aside(begin).await?;
        let mut next = first?;
        let mut kept = Vec::new();
        if keep {
            kept.reserve_exact(usize::try_from(weights.bytes).unwrap_or(0));
        }
        while let Some(piece) = next {
            if verification.is_in_header() {
                let part = piece.clone();
                verification = aside(move || verification.push(&part).map(|()| verification)).await?;
            } else {
                verification.push(&piece)?;
            }
            progress.add(piece.len());
            if keep {
                kept.extend_from_slice(&piece);
            }
            next = download.next().await?;
        }
        let verified = verification.finish()?;
        let bytes = keep.then_some(AdapterBytes { config, weights: kept });
        Ok(ReadAdapter { verified, version: weights.version.clone(), bytes })
    }
}

/// Judges on a thread of its own: what a configuration asks for may take a while, and nobody else shall wait for it.
async fn aside<T: Send + 'static>(
    judge: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, AdapterError> {
    match tokio::task::spawn_blocking(judge).await {
        Ok(judged) => Ok(judged?),
        Err(error) => {
            Err(SourceError::new(ErrorKind::Unavailable, "judging the adapter was broken off").because(error).into())
        }
    }
}
