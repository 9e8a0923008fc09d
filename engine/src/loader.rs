//! Adapters for the fleet: fetched and verified by `adapter`, measured for the tiers.

use std::sync::Arc;

use lorafleet_artifact::{BaseShape, Digest, Policy, WEIGHTS_FILE};
use lorafleet_backend::layout::Layout;
use lorafleet_source::{Progress, ReadLimits, Sources};
use tokio::sync::Semaphore;

use crate::adapter::{BaseTensors, DiskCache, LoadError, LoadedAdapter, Loader};
use crate::config::Config;
use crate::fleet::{Load, Loading};
use crate::refusal::Refusal;
use crate::residency::Loaded;

pub struct AdapterLoader {
    inner: Arc<Inner>,
}

struct Inner {
    loader: Loader,
    page_bytes: u64,
    /// What fetches may hold in memory beside the host tier, in KiB.
    room: Semaphore,
    room_kib: u32,
}

impl AdapterLoader {
    /// # Errors
    /// If the folder of the disk cache cannot be used.
    pub fn new(
        config: &Config,
        base: BaseShape,
        digest: Digest,
        tensors: Arc<dyn BaseTensors>,
        page_bytes: u64,
    ) -> std::io::Result<Self> {
        let disk = config.disk_cache.as_ref();
        let disk = disk.map(|(folder, bytes)| DiskCache::open(folder.join("adapters"), *bytes)).transpose()?;
        // In a pool the operator has checked the claims against all identities of the base; without a list here there
        // is nothing to check them against a second time.
        let mut identities = config.base_identities.clone();
        if !config.managed || !identities.is_empty() {
            identities.push(digest);
        }
        let policy = Policy {
            max_rank: Some(config.limits.max_rank),
            max_adapter_bytes: config.limits.host_cache_bytes,
            require_base_digest: false,
            identities,
            ..Policy::default()
        };
        let sources = Sources::new(config.sources.iter().cloned(), ReadLimits::default());
        let loader = Loader { sources, base, policy, tensors: Some(tensors), disk };
        let room_kib = u32::try_from(config.limits.host_cache_bytes.div_ceil(1024)).unwrap_or(u32::MAX).max(1);
        let room = Semaphore::new(room_kib as usize);
        Ok(Self { inner: Arc::new(Inner { loader, page_bytes, room, room_kib }) })
    }
}

impl Load for AdapterLoader {
    fn load(&self, source: String, expected: Option<Digest>) -> Loading {
        let inner = self.inner.clone();
        Box::pin(async move {
            let kib = inner.kib(&source, expected).await.map_err(refusal)?;
            // The semaphore is never closed.
            let _room = inner.room.acquire_many(kib).await;
            let loaded = inner.loader.load(&source, expected, &Progress::default()).await;
            measured(loaded.map_err(refusal)?, inner.page_bytes)
        })
    }

    fn disk_bytes(&self) -> (u64, u64) {
        self.inner.loader.disk.as_ref().map_or((0, 0), |disk| (disk.budget_bytes(), disk.used_bytes()))
    }
}

impl Inner {
    /// Memory that a fetch will take, at most all there is: one that is too large is refused by the policy, not here.
    async fn kib(&self, source: &str, expected: Option<Digest>) -> Result<u32, LoadError> {
        let on_disk = expected.is_some_and(|digest| self.loader.disk.as_ref().is_some_and(|disk| disk.holds(digest)));
        if on_disk {
            // Its size is known to the disk alone; a quarter lets a few of them come at once.
            return Ok(self.room_kib.div_ceil(4));
        }
        let listing = self.loader.sources.list(&source.parse()?).await?;
        let bytes = listing.file(WEIGHTS_FILE).map_or(0, |file| file.bytes);
        Ok(u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).clamp(1, self.room_kib))
    }
}

fn measured(loaded: LoadedAdapter, page_bytes: u64) -> Result<Loaded, Refusal> {
    let LoadedAdapter { adapter, on_disk, .. } = loaded;
    let modules = &adapter.fitted.modules;
    let layout = Layout::of(modules, page_bytes).map_err(|error| Refusal::new(422, "TooLarge", error.to_string()))?;
    Ok(Loaded {
        bytes: adapter.bytes.len() as u64,
        pages: layout.pages,
        rank: modules.iter().map(|module| module.rank).max().unwrap_or(0),
        modules: u32::try_from(modules.len()).unwrap_or(u32::MAX),
        on_disk,
        adapter,
    })
}

fn refusal(error: LoadError) -> Refusal {
    let retry_after_seconds = error.is_transient().then_some(1);
    Refusal { retry_after_seconds, ..Refusal::new(error.http_status(), error.code(), error.to_string()) }
}
