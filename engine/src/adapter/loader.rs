//! From a URI to a host copy.

use std::sync::Arc;

use lorafleet_artifact::{BaseShape, Claims, Digest, Policy, Reason, Refusal, SourceUri, Verification, Verified};
use lorafleet_backend::HostAdapter;
use lorafleet_source::{AdapterBytes, AdapterError, ErrorKind, Progress, SourceError, Sources, list_adapter};
use tokio::sync::Semaphore;

use super::rooms::Held;
use super::{BaseTensors, DiskCache, Rooms, check_copies};

/// So much of a copy is verified at a time: the pieces that hold its header are copied.
const PIECE_BYTES: usize = 1 << 20;

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
    /// Adapters that are judged at the same time, each on a thread of its own.
    pub judges: Arc<Semaphore>,
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
    /// A fault of ours, or the process is about to end.
    #[error("judging the adapter was broken off: {0}")]
    BrokenOff(#[from] tokio::task::JoinError),
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
            Self::BrokenOff(_) => "Internal",
        }
    }

    /// 403 for the path or source, 404 if it is not there, 422 for the adapter's own fault, 502 and 504 for the store, 500
    /// for a fault of ours.
    pub fn http_status(&self) -> u16 {
        match self {
            Self::Copies(_) => 422,
            Self::BrokenOff(_) => 500,
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
            let room = self.rooms.here(disk.bytes_of(digest)).await;
            if let Some(adapter) = self.copy_on_disk(disk, digest, claims, room).await? {
                return Ok(LoadedAdapter { adapter, origin: Origin::Disk, on_disk: true });
            }
        }
        let listed = list_adapter(&self.sources, &uri).await?;
        let room = self.rooms.of(&uri, listed.bytes()).await;
        let read = listed.read(&self.sources, claims, &self.base, &self.policy, true, progress).await?;
        let bytes = read.bytes.ok_or_else(|| Refusal::new(Reason::Malformed, "the adapter's bytes were not kept"))?;
        let bytes = Arc::new(bytes);
        let digest = read.verified.digest;
        let on_disk = match &self.disk {
            None => false,
            Some(disk) => disk.put(digest, &bytes).await,
        };
        let bytes = Arc::try_unwrap(bytes).unwrap_or_else(|shared| (*shared).clone());
        let adapter = self.judge(bytes, room, |_| Ok(read.verified)).await?;
        Ok(LoadedAdapter { adapter, origin: Origin::Source, on_disk })
    }

    /// The disk's copy, verified like the source's. A copy that fails is removed and asked for anew.
    async fn copy_on_disk(
        &self,
        disk: &DiskCache,
        digest: Digest,
        claims: Claims,
        room: Held,
    ) -> Result<Option<Arc<HostAdapter>>, LoadError> {
        let Some(bytes) = disk.get(digest, self.policy.max_adapter_bytes).await else { return Ok(None) };
        let (base, policy) = (self.base.clone(), self.policy.clone());
        let verify = move |bytes: &AdapterBytes| -> Result<Verified, Refusal> {
            let size = bytes.weights.len() as u64;
            let mut verification = Verification::begin(&bytes.config, size, claims, &base, &policy)?;
            bytes.weights.chunks(PIECE_BYTES).try_for_each(|piece| verification.push(piece))?;
            verification.finish()
        };
        match self.judge(bytes, room, verify).await {
            Ok(adapter) => Ok(Some(adapter)),
            Err(LoadError::Adapter(AdapterError::Refused(refusal))) => {
                tracing::warn!(%digest, %refusal, "the disk cache's copy does not pass; it is fetched again");
                disk.remove(digest).await;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// From bytes to a host copy, on a thread that nobody's stream waits for: every byte is hashed, moved or compared here.
    /// Whoever has begun keeps its turn and its room to the end, also if nobody waits for it any more.
    async fn judge(
        &self,
        bytes: AdapterBytes,
        room: Held,
        verify: impl FnOnce(&AdapterBytes) -> Result<Verified, Refusal> + Send + 'static,
    ) -> Result<Arc<HostAdapter>, LoadError> {
        let turn = self.judges.clone().acquire_owned().await;
        let tensors = self.tensors.clone();
        let judged = tokio::task::spawn_blocking(move || {
            let _held = (turn, room);
            let verified = verify(&bytes)?;
            let adapter = HostAdapter::of(verified, bytes.weights);
            check_copies(&adapter, tensors.as_deref())?;
            Ok(Arc::new(adapter))
        });
        judged.await?
    }
}
