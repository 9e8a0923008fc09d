//! Which adapters to bring nearer and which to let go: `Tiers -> Moves`, without clock or IO.

use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::Floor;

mod plan;

mod fetches;

mod rows;
mod victims;

#[cfg(test)]
mod agreement;
#[cfg(test)]
mod simple;
#[cfg(test)]
mod tests;

use plan::Plan;

/// The place of an adapter that no sequence waits for: behind all others.
const NOBODY: usize = usize::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostTier {
    Absent,
    Fetching,
    Present,
}

/// Where an adapter's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Store {
    /// On this machine's disks.
    Here,
    /// In a store, which has a number.
    Away(u64),
}

/// One adapter's place.
#[derive(Clone, Debug)]
pub struct Row {
    pub digest: Digest,
    pub host: HostTier,
    /// Where a fetch would read it.
    pub store: Store,
    /// It holds its pages on the device.
    pub device: bool,
    /// So many of them are still to be written; nobody can use it before.
    pub pages_left: u32,
    /// In host memory; 0 while unknown.
    pub bytes: u64,
    /// On the device; 0 while unknown.
    pub pages: u32,
    pub leases: u32,
    pub floor: Floor,
    /// Since when it is never to be dropped from the tier that `floor` names.
    pub pinned: Option<Instant>,
    /// It has been fetched once, so its floor `Disk` is met.
    pub verified: bool,
    /// Orders eviction: the longest untouched goes first.
    pub touched: Instant,
    /// False while a failed fetch's pause lasts.
    pub may_fetch: bool,
}

impl Row {
    fn on_device(&self) -> bool {
        self.device && self.pages_left == 0
    }

    fn is_uploading(&self) -> bool {
        self.device && self.pages_left > 0
    }

    fn is_held_in_host(&self) -> bool {
        self.pinned.is_some() && self.floor == Floor::Host
    }

    fn is_held_on_device(&self) -> bool {
        self.pinned.is_some() && self.floor == Floor::Device
    }

    /// A floor that is not met.
    fn floor_wants_it(&self) -> bool {
        match self.floor {
            Floor::None => false,
            Floor::Disk => !self.verified,
            // Without a pin the floor is a start condition only; keeping it would undo each eviction at once.
            Floor::Host => self.host == HostTier::Absent && !self.device && (self.pinned.is_some() || !self.verified),
            Floor::Device => {
                !self.on_device() && (self.pinned.is_some() || !self.verified || self.host == HostTier::Present)
            }
        }
    }
}

/// What `decide` looks at.
#[derive(Clone, Debug)]
pub struct Tiers {
    pub rows: Vec<Row>,
    /// Adapters that sequences wait for, the first to be served first, each once.
    pub demand: Vec<Digest>,
    /// Free pages and those of the prefix cache.
    pub pages_available: u32,
    pub pages_total: u32,
    pub page_bytes: u64,
    pub host_bytes_total: u64,
    /// At once from all stores, and as many from this machine's disks.
    pub fetches_max: u32,
    /// For the next step.
    pub upload_bytes_max: u64,
    /// The first in the queue comes in one step if it lacks no more than this.
    pub upload_bytes_whole: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A sequence waits for it.
    Demand,
    /// A floor asks for it.
    Floor,
    /// The host tier is over its budget.
    HostFull,
    /// Another adapter needs its device pages.
    DeviceFull,
    /// Nobody waits any more for what is half uploaded.
    Unwanted,
}

/// In the order in which to do them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    DropHost(Digest, Reason),
    Fetch(Digest, Reason),
    DropDevice(Digest, Reason),
    /// Take its device pages.
    Upload(Digest, Reason),
    /// Write so many more of them in the next step.
    Write(Digest, u32),
    /// Its floor cannot be kept: the pinned adapters would take more than half of all pages.
    RefuseFloor(Digest),
    /// The same for those pinned in host memory and half of that.
    RefuseHostFloor(Digest),
    /// Who waits for it waits in vain: beside what is pinned in host memory, it never has room there.
    RefuseDemand(Digest),
}

/// Costs about n log n in the adapters known: it is asked in each step while somebody waits for one of thousands.
pub fn decide(tiers: &Tiers) -> Vec<Move> {
    let mut plan = Plan::new(tiers);
    plan.refuse_pins();
    plan.shrink_host();
    plan.fetch();
    plan.upload();
    plan.moves
}
