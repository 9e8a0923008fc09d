//! From a URI to a host copy.

use std::sync::Arc;

use lorafleet_artifact::{BaseShape, Claims, Digest, Policy, Reason, Refusal, SourceUri, Verification, Verified};
use lorafleet_backend::HostAdapter;
use lorafleet_source::{AdapterBytes, AdapterError, ErrorKind, Progress, SourceError, Sources, list_adapter};

use super::{BaseTensors, DiskCache, Rooms, check_copies};

/// Loads adapters for one base. Shared by all loads.
pub struct Loader {
    pub sources: Sources,
    pub base: BaseShape,
    /// What the engine itself insists on: its largest rank, its identities.
    pub policy: Policy,
    /// The base's own weights, for adapters that carry copies of them. Without it, such adapters are refused.
    pub tensors: Option<Arc<dyn BaseTensors>>,
    pub disk: Option<DiskCache>,
    /// One that is too large for them is refused by the policy, not here.
    pub rooms: Rooms,
}

#[derive(Debug)]
pub struct LoadedAdapter {
    pub adapter: Arc<HostAdapter>,
    pub origin: Origin,
    /// A copy is in the disk cache now.
    pub on_disk: bool,
}

/// Where the bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Disk,
    Source,
}

/// Why an adapter could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// It carries changed weights of the base, which would have to be applied, or dropped in silence.
    #[error(transparent)]
    Copies(#[from] super::CopyDiffers),
    /// The process is about to end.
    #[error("the load was broken off: the engine has stopped")]
    BrokenOff,
}

impl From<Refusal> for LoadError {
    fn from(refusal: Refusal) -> Self {
        Self::Adapter(refusal.into())
    }
}

impl From<SourceError> for LoadError {
    fn from(error: SourceError) -> Self {
        Self::Adapter(error.into())
    }
}

impl LoadError {
    /// Stable: an error's `code`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Adapter(error) => error.code(),
            Self::Copies(_) => Reason::UnsupportedFeature.as_str(),
            Self::BrokenOff => "EngineStopped",
        }
    }

    /// 403 for the path or source, 404 if it is not there, 422 for the adapter's own fault, 502 and 504 for the store.
    pub fn http_status(&self) -> u16 {
        match self {
            Self::Copies(_) => 422,
            Self::BrokenOff => 503,
            Self::Adapter(AdapterError::Refused(refusal)) => match refusal.reason {
                Reason::SourceForbidden => 403,
                Reason::NotFound => 404,
                _ => 422,
            },
            Self::Adapter(AdapterError::Source(error)) => match error.kind {
                ErrorKind::NotAllowed | ErrorKind::Forbidden => 403,
                ErrorKind::NotFound => 404,
                ErrorKind::TooLarge | ErrorKind::Unsupported => 422,
                ErrorKind::Timeout => 504,
                ErrorKind::Unavailable | ErrorKind::Changed | ErrorKind::Misconfigured => 502,
            },
        }
    }

    /// Whether trying again may help without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Adapter(error) if error.is_transient())
    }
}

impl Loader {
    /// Fetches and verifies one adapter. `source` is a URI or an absolute path; with a digest among the claims, a copy in
    /// the disk cache is taken before the source is asked, and any other content is refused.
    ///
    /// # Errors
    /// Typed; nothing is left behind.
    pub async fn load(&self, source: &str, claims: Claims, progress: &Progress) -> Result<LoadedAdapter, LoadError> {
        let uri: SourceUri = source.parse()?;
        // Also for what is on disk: a source that is no longer allowed is not served from its copy.
        self.sources.access(&uri)?;
        if let Some((disk, digest)) = self.disk.as_ref().zip(claims.digest) {
            let _room = self.rooms.here(disk.bytes_of(digest)).await;
            if let Some((verified, bytes)) = self.copy_on_disk(disk, digest, claims).await {
                let adapter = self.finish(verified, bytes).await?;
                return Ok(LoadedAdapter { adapter, origin: Origin::Disk, on_disk: true });
            }
        }
        let listed = list_adapter(&self.sources, &uri).await?;
        let _room = self.rooms.of(&uri, listed.bytes()).await;
        let read = listed.read(&self.sources, claims, &self.base, &self.policy, true, progress).await?;
        let bytes = read.bytes.ok_or_else(|| Refusal::new(Reason::Malformed, "the adapter's bytes were not kept"))?;
        let bytes = Arc::new(bytes);
        let digest = read.verified.digest;
        let on_disk = match &self.disk {
            None => false,
            Some(disk) => disk.put(digest, &bytes).await,
        };
        let bytes = Arc::try_unwrap(bytes).unwrap_or_else(|shared| (*shared).clone());
        Ok(LoadedAdapter { adapter: self.finish(read.verified, bytes).await?, origin: Origin::Source, on_disk })
    }

    /// The disk's copy, verified like the source's. A copy that fails is removed and asked for anew.
    async fn copy_on_disk(&self, disk: &DiskCache, digest: Digest, claims: Claims) -> Option<(Verified, AdapterBytes)> {
        let bytes = disk.get(digest, self.policy.max_adapter_bytes).await?;
        let (base, policy) = (self.base.clone(), self.policy.clone());
        let judged = aside(move || -> Result<_, Refusal> {
            let size = bytes.weights.len() as u64;
            let mut verification = Verification::begin(&bytes.config, size, claims, &base, &policy)?;
            verification.push(&bytes.weights)?;
            Ok((verification.finish()?, bytes))
        });
        match judged.await? {
            Ok(copy) => Some(copy),
            Err(refusal) => {
                tracing::warn!(%digest, %refusal, "the disk cache's copy does not pass; it is fetched again");
                disk.remove(digest).await;
                None
            }
        }
    }

    async fn finish(&self, verified: Verified, bytes: AdapterBytes) -> Result<Arc<HostAdapter>, LoadError> {
        let tensors = self.tensors.clone();
        let finished = aside(move || -> Result<_, LoadError> {
            let adapter = HostAdapter::of(verified, bytes.weights);
            check_copies(&adapter, tensors.as_deref())?;
            Ok(Arc::new(adapter))
        });
        finished.await.unwrap_or(Err(LoadError::BrokenOff))
    }
}

/// Looks at every byte on a thread of its own: nobody's stream waits for it. `None` if the process is about to end.
async fn aside<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(look).await.ok()
}
