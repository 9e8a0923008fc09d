//! Which places may be read, and how to reach them.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use lorafleet_artifact::{Refusal, Scheme, SourceUri};
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::download::Download;
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing};
use crate::local;
use crate::s3;

/// One allowed place: everything within `prefix`, reached in this way.
#[derive(Clone, Debug)]
pub struct Access {
    pub prefix: SourceUri,
    /// Of an S3 store that is not AWS: `http://s3.example:9000`. Its buckets are addressed by path.
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub credentials: Credentials,
}

impl Access {
    /// A place that needs no account, or the surroundings' own.
    pub fn ambient(prefix: SourceUri) -> Self {
        Self { prefix, endpoint: None, region: None, credentials: Credentials::Ambient }
    }
}

/// An access as a configuration file or a custom resource writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessConfig {
    pub prefix: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Folder of a mounted Secret; the ambient chain without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_dir: Option<PathBuf>,
}

impl TryFrom<AccessConfig> for Access {
    type Error = Refusal;

    fn try_from(config: AccessConfig) -> Result<Self, Refusal> {
        let AccessConfig { prefix, endpoint, region, credentials_dir } = config;
        let credentials = credentials_dir.map_or(Credentials::Ambient, Credentials::Dir);
        Ok(Self { prefix: prefix.parse()?, endpoint, region, credentials })
    }
}

#[derive(Clone)]
pub enum Credentials {
    /// The usual AWS chain: environment, profile, web identity, metadata service.
    Ambient,
    Static {
        access_key_id: String,
        secret_access_key: String,
        session_token: Option<String>,
    },
    /// A folder with the files `access-key-id`, `secret-access-key` and perhaps `session-token`, as a mounted Secret
    /// is one. They are read again every few minutes, so that a rotated Secret needs no restart.
    Dir(PathBuf),
}

/// Secrets stay out of logs.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ambient => f.write_str("Ambient"),
            Self::Static { .. } => f.write_str("Static(..)"),
            Self::Dir(path) => write!(f, "Dir({})", path.display()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Files in one folder.
    pub files: usize,
    /// What a folder may hold in all: files, whatever their names, and folders.
    pub entries: usize,
    /// Bytes of one read into memory.
    pub read_bytes: u64,
    pub connect: Duration,
    /// From a request to the first byte of its answer.
    pub answer: Duration,
    /// Between two pieces of a stream.
    pub stall: Duration,
    /// A stream that comes slower than this in the mean, after its first `grace`, is given up: who drips holds its place
    /// and its memory from others.
    pub bytes_per_second_min: u64,
    pub grace: Duration,
    /// Attempts in a row that bring no byte, before a stream gives up.
    pub attempts: u32,
    /// Failed attempts in all, before a stream gives up although each one brings a few bytes.
    pub interruptions: u32,
    /// Before the second attempt; doubled for each further one.
    pub backoff: Duration,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self {
            files: 10_000,
            entries: 100_000,
            read_bytes: 256 << 20,
            connect: Duration::from_secs(5),
            answer: Duration::from_secs(15),
            stall: Duration::from_secs(15),
            bytes_per_second_min: 256 << 10,
            grace: Duration::from_secs(30),
            attempts: 4,
            interruptions: 32,
            backoff: Duration::from_millis(100),
        }
    }
}

/// The allow-list with its connections. Cheap to share behind an `Arc`; a place's client is made at its first use.
#[derive(Debug)]
pub struct Sources {
    places: Vec<Place>,
    limits: ReadLimits,
}

#[derive(Debug)]
struct Place {
    access: Access,
    client: OnceCell<aws_sdk_s3::Client>,
}

impl Sources {
    pub fn new(accesses: impl IntoIterator<Item = Access>, limits: ReadLimits) -> Self {
        let places = accesses.into_iter().map(|access| Place { access, client: OnceCell::new() }).collect();
        Self { places, limits }
    }

    pub fn limits(&self) -> &ReadLimits {
        &self.limits
    }

    /// The access whose prefix is the longest that holds the source.
    ///
    /// # Errors
    /// NotAllowed. Nothing was asked of any store.
    pub fn access(&self, uri: &SourceUri) -> Result<&Access, SourceError> {
        self.place(uri).map(|place| &place.access)
    }

    fn place(&self, uri: &SourceUri) -> Result<&Place, SourceError> {
        let found = uri.longest_prefix(self.places.iter().map(|place| &place.access.prefix));
        found.and_then(|index| self.places.get(index)).ok_or_else(|| {
            SourceError::new(ErrorKind::NotAllowed, format!("the source '{uri}' is within no allowed prefix"))
        })
    }

    /// The files of a folder (not of folders below it), or the file itself.
    ///
    /// # Errors
    /// NotFound if there is neither; otherwise any kind.
    pub async fn list(&self, uri: &SourceUri) -> Result<Listing, SourceError> {
        let place = self.place(uri)?;
        let mut listing = match uri.scheme() {
            Scheme::File => local::list(&place.access.prefix, uri, &self.limits).await?,
            Scheme::S3 => s3::list(self.client(place).await?, uri, &self.limits).await?,
            other => return Err(unsupported(uri, other)),
        };
        listing.files.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(listing)
    }

    /// Bytes of one file, into memory.
    ///
    /// # Errors
    /// TooLarge beyond the limit; Changed if the file is no longer the listed one; otherwise any kind.
    pub async fn read(&self, listing: &Listing, file: &FileInfo, range: Range<u64>) -> Result<Bytes, SourceError> {
        let count = range.end.saturating_sub(range.start);
        if count > self.limits.read_bytes {
            let limit = self.limits.read_bytes;
            let what = format!("reading {count} bytes of '{}' in '{}': the limit is {limit}", file.name, listing.uri);
            return Err(SourceError::new(ErrorKind::TooLarge, what));
        }
        let mut download = self.open(listing, file, range)?;
        let mut out = bytes::BytesMut::with_capacity(usize::try_from(count).unwrap_or(0));
        while let Some(piece) = download.next().await? {
            out.extend_from_slice(&piece);
        }
        Ok(out.freeze())
    }

    /// A stream over a part of one file. Nothing is asked before the first `next`.
    ///
    /// # Errors
    /// NotAllowed, or Unsupported for a scheme without reader.
    pub fn open<'a>(
        &'a self,
        listing: &'a Listing,
        file: &'a FileInfo,
        range: Range<u64>,
    ) -> Result<Download<'a>, SourceError> {
        let place = self.place(&listing.uri)?;
        match listing.uri.scheme() {
            Scheme::File | Scheme::S3 => Ok(Download::new(self, &place.access, listing, file, range)),
            other => Err(unsupported(&listing.uri, other)),
        }
    }

    /// Makes the clients of all places before somebody waits for one: reading certificates and profiles takes longer than
    /// reading a small adapter. Asks no store. What is wrong with a place is said when it is used.
    pub async fn prepare(&self) {
        for place in self.places.iter().filter(|place| place.access.prefix.scheme() == Scheme::S3) {
            let _ = self.client(place).await;
        }
    }

    pub(crate) async fn client_for(&self, uri: &SourceUri) -> Result<&aws_sdk_s3::Client, SourceError> {
        self.client(self.place(uri)?).await
    }

    async fn client<'a>(&self, place: &'a Place) -> Result<&'a aws_sdk_s3::Client, SourceError> {
        place.client.get_or_try_init(|| s3::client(&place.access, &self.limits)).await
    }
}

fn unsupported(uri: &SourceUri, scheme: Scheme) -> SourceError {
    let scheme = scheme.as_str();
    SourceError::new(ErrorKind::Unsupported, format!("reading '{uri}': nothing here reads {scheme}:// directly"))
}
