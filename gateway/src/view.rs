//! What the gateway knows of its pool: plain data, replaced as a whole whenever a source has something new.
//!
//! Times are milliseconds of one monotonic clock of this process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterReport, AdapterState, Load, Report, Role, Tier};

/// One consistent picture of a pool. `resolve` and `route` decide from it alone.
#[derive(Clone, Debug, Default)]
pub struct FleetView {
    /// Namespace of the pool; a name written `<namespace>/<name>` means the same as `<name>`.
    pub namespace: String,
    /// Name under which the base is served; empty until the pool object has been seen.
    pub base: String,
    /// What the base must be, as its `BaseModel` has it pinned; `None` while it is not known.
    pub base_digest: Option<Digest>,
    pub base_created_unix_s: i64,
    /// Adapters that the pool serves or shall serve, by the name that clients ask for.
    pub adapters: Arc<BTreeMap<String, AdapterView>>,
    /// Engine pods by name.
    pub pods: BTreeMap<String, PodView>,
}

/// What the `LoraAdapter` object says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterView {
    /// Version that the bare name means now; `None` until the first revision is served.
    pub current: Option<Digest>,
    /// Further versions that may be asked for by digest.
    pub others: Vec<Digest>,
    pub created_unix_s: i64,
    /// Largest rank of the current version; 0 while unknown.
    pub rank: u32,
    /// Why there is no current revision: the object's own words.
    pub obstacle: Option<Obstacle>,
}

/// Why an adapter is not served, as the operator wrote it in the object's conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Only a change of the object or of its source helps.
    pub refused: bool,
    pub reason: String,
    pub message: String,
}

/// One engine pod: what Kubernetes says of it and what it says itself.
#[derive(Clone, Debug, PartialEq)]
pub struct PodView {
    pub address: SocketAddr,
    /// Kubernetes would send traffic to it: its readiness probe passes and it is not being deleted.
    pub ready: bool,
    pub report: Option<Arc<PodReport>>,
    /// Why the last poll failed; `None` after a good one.
    pub poll_error: Option<String>,
}

/// A pod's own report, indexed for look-up by name.
#[derive(Clone, Debug, PartialEq)]
pub struct PodReport {
    pub received_ms: u64,
    /// Requests of this gateway that were under way in the pod when the report came: those are in `load` already.
    pub outstanding_then: u32,
    pub boot_id: String,
    pub draining: bool,
    pub role: Role,
    pub load: Load,
    pub base_digest: Digest,
    pub holdings: Arc<Holdings>,
}

/// What a pod holds. Reports that say the same share it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Holdings {
    /// The pod's own name for all of it; empty if it gives none.
    pub tag: String,
    pub adapters: BTreeMap<String, Vec<Holding>>,
    pub aliases: BTreeMap<String, Digest>,
}

/// One adapter version in one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub digest: Digest,
    pub state: AdapterState,
    pub tier: Tier,
    pub bytes: u64,
    /// `code: message` of the last failure.
    pub last_error: Option<String>,
}

impl PodReport {
    /// `known` is what the pod was told that this gateway knows. `None` if it leaves out something else.
    pub fn new(report: Report, known: Option<&Arc<Holdings>>, received_ms: u64, outstanding_then: u32) -> Option<Self> {
        let holdings = if report.unchanged {
            Arc::clone(known.filter(|known| known.tag == report.holdings)?)
        } else {
            Arc::new(Holdings::new(report.holdings, report.adapters, report.aliases))
        };
        Some(Self {
            received_ms,
            outstanding_then,
            boot_id: report.boot_id,
            draining: report.draining,
            role: report.role,
            load: report.load,
            base_digest: report.base.digest,
            holdings,
        })
    }

    pub fn holding(&self, name: &str, digest: &Digest) -> Option<&Holding> {
        self.holdings.adapters.get(name)?.iter().find(|holding| holding.digest == *digest)
    }
}

impl Holdings {
    fn new(tag: String, reports: Vec<AdapterReport>, aliases: BTreeMap<String, Digest>) -> Self {
        let mut adapters: BTreeMap<String, Vec<Holding>> = BTreeMap::new();
        for adapter in reports {
            adapters.entry(adapter.name).or_default().push(Holding {
                digest: adapter.digest,
                state: adapter.state,
                tier: adapter.tier,
                bytes: adapter.bytes,
                last_error: adapter.last_error.map(|error| format!("{}: {}", error.code, error.message)),
            });
        }
        Self { tag, adapters, aliases }
    }
}

impl FleetView {
    /// The name that the pool's objects use for what a client wrote: without the pool's own namespace.
    pub fn canonical<'a>(&self, name: &'a str) -> &'a str {
        match name.split_once('/') {
            Some((namespace, rest)) if namespace == self.namespace && !rest.contains('/') => rest,
            _ => name,
        }
    }

    /// Reports of the pods, with the names of the pods.
    pub fn reports(&self) -> impl Iterator<Item = (&str, &PodReport)> {
        self.pods.iter().filter_map(|(name, pod)| Some((name.as_str(), pod.report.as_deref()?)))
    }
}
