//! Adapters for the fleet: fetched and verified by `adapter`, measured for the tiers.

use std::sync::Arc;
use std::time::Instant;

use lorafleet_artifact::{BaseShape, Claims, Digest, Policy};
use lorafleet_backend::batch::PageBudget;
use lorafleet_backend::layout::Layout;
use lorafleet_source::{Progress, ReadLimits, Sources};
use tokio::sync::Semaphore;

use crate::adapter::{BaseTensors, DiskCache, LoadError, LoadedAdapter, Loader, Rooms};
use crate::config::Config;
use crate::fleet::{Load, Loading};
use crate::flights::{Flights, unbroken};
use crate::limits::Limits;
use crate::metrics::Meter;
use crate::refusal::Refusal;
use crate::residency::Loaded;

pub struct AdapterLoader {
    inner: Arc<Inner>,
    flights: Flights<Asked, Result<Loaded, Refusal>>,
}

struct Inner {
    loader: Loader,
    /// What the tiers could ever hold.
    limits: Limits,
    budget: PageBudget,
    meter: Arc<Meter>,
}

/// What makes two loads the same.
#[derive(PartialEq, Eq, Hash)]
struct Asked {
    source: String,
    digest: Option<Digest>,
    base_digest: Option<Digest>,
}

impl AdapterLoader {
    /// Within a runtime: the ways to the stores are made ready beside.
    ///
    /// # Errors
    /// If the folder of the disk cache cannot be used.
    pub fn new(
        config: &Config,
        base: BaseShape,
        digest: Digest,
        tensors: Arc<dyn BaseTensors>,
        budget: PageBudget,
        meter: Arc<Meter>,
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
        let rooms = Rooms::new(config.limits.host_cache_bytes);
        // Half of the cores at most, so that the step thread keeps the others.
        let judges = std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        let (tensors, judges) = (Some(tensors), Arc::new(Semaphore::new(judges)));
        let loader = Loader { sources, base, policy, tensors, disk, rooms, judges };
        let inner = Arc::new(Inner { loader, limits: config.limits.clone(), budget, meter });
        let prepared = inner.clone();
        tokio::spawn(async move { prepared.loader.sources.prepare().await });
        Ok(Self { inner, flights: Flights::default() })
    }
}

impl Inner {
    async fn load(&self, source: &str, claims: Claims) -> Result<Loaded, Refusal> {
        let loaded = self.loader.load(source, claims, &Progress::default()).await.map_err(refusal)?;
        measured(loaded, self.budget.page_bytes)?.affordable(&self.limits, self.budget)
    }
}

impl Load for AdapterLoader {
    fn load(&self, source: String, claims: Claims) -> Loading {
        let inner = self.inner.clone();
        // Under one digest there is one content.
        let lasting = claims.digest.is_some();
        let asked = Asked { source: source.clone(), digest: claims.digest, base_digest: claims.base_digest };
        Box::pin(self.flights.join(asked, lasting, async move {
            let begun = Instant::now();
            let loaded = unbroken(inner.load(&source, claims)).await;
            match &loaded {
                Ok(_) => inner.meter.loaded(begun.elapsed().as_secs_f64()),
                Err(refusal) => inner.meter.load_failed(refusal),
            }
            loaded
        }))
    }

    fn disk_bytes(&self) -> (u64, u64) {
        self.inner.loader.disk.as_ref().map_or((0, 0), |disk| (disk.budget_bytes(), disk.used_bytes()))
    }

    fn is_on_disk(&self, digest: Digest) -> bool {
        self.inner.loader.disk.as_ref().is_some_and(|disk| disk.holds(digest))
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
