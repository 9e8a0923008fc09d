//! What is known of one adapter.

use std::sync::Arc;
use std::time::Instant;

use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::{PageId, ResidentId};
use lorafleet_crds::wire::{Floor, Tier};

use super::Enrolment;
use crate::moves::Store;
use crate::refusal::Refusal;

#[derive(Debug)]
pub(super) struct Device {
    pub(super) resident: ResidentId,
    pub(super) pages: Vec<PageId>,
    /// So many of the pages are written, by the next step at the latest. Nobody uses it before all are.
    pub(super) written: u32,
    /// What is written into them, until all are.
    pub(super) from: Option<Arc<HostAdapter>>,
}

impl Device {
    pub(super) fn pages_left(&self) -> u32 {
        self.pages.len() as u32 - self.written
    }
}

/// A fetch that failed; until `retry_at` its answer is given again without another try.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) refusal: Refusal,
    pub(super) attempts: u32,
    pub(super) retry_at: Instant,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) enrolment: Enrolment,
    /// No longer wanted: goes when its last user has gone.
    pub(super) retired: bool,
    /// The copy in host memory.
    pub(super) host: Option<Arc<HostAdapter>>,
    /// A fetch is under way. Its copy may have come from elsewhere meanwhile, and may have been let go again.
    pub(super) fetching: bool,
    pub(super) device: Option<Device>,
    /// It has been there whole, once in this process.
    pub(super) was_on_device: bool,
    pub(super) on_disk: bool,
    /// Where a fetch that finds no copy on disk begins.
    pub(super) store: Store,
    pub(super) users: Arc<()>,
    /// Since when it is pinned.
    pub(super) pinned: Option<Instant>,
    pub(super) last_used: Option<Instant>,
    /// When it came to the device or was last used there; orders eviction.
    pub(super) touched: Instant,
    pub(super) bytes: u64,
    pub(super) pages: u32,
    pub(super) rank: u32,
    pub(super) modules: u32,
    pub(super) loads: u64,
    pub(super) evictions: u64,
    pub(super) failure: Option<Failure>,
    /// Why its floor is not kept.
    pub(super) note: Option<Refusal>,
}

impl Entry {
    pub(super) fn leases(&self) -> u32 {
        Arc::strong_count(&self.users) as u32 - 1
    }

    /// The device copy, if it is whole.
    pub(super) fn on_device(&self) -> Option<&Device> {
        self.device.as_ref().filter(|device| device.pages_left() == 0)
    }

    pub(super) fn is_uploading(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.pages_left() > 0)
    }

    pub(super) fn tier(&self) -> Tier {
        match (self.on_device(), &self.host) {
            (Some(_), _) => Tier::Device,
            (None, Some(_)) => Tier::Host,
            _ if self.on_disk => Tier::Disk,
            _ => Tier::Source,
        }
    }

    /// Where a fetch would read it.
    pub(super) fn store(&self) -> Store {
        if self.on_disk { Store::Here } else { self.store }
    }

    pub(super) fn held_on_device(&self) -> bool {
        self.enrolment.pinned && self.enrolment.floor == Floor::Device && !self.retired
    }

    /// Its device pages, where a floor holds them there.
    pub(super) fn pinned_pages(&self) -> u32 {
        if self.device.is_some() && self.held_on_device() { self.pages } else { 0 }
    }

    /// On the device, whole or on its way, used by nobody, not held there by a floor.
    pub(super) fn is_idle(&self) -> bool {
        self.device.is_some() && self.leases() == 0 && !self.held_on_device()
    }
}
