//! The adapters as the moves, the reports and the metrics look at them.

use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{Floor, Tier};

use super::Residency;
use super::entry::Device;
use crate::moves::{HostTier, Row};
use crate::refusal::Refusal;

/// One adapter as reports and metrics show it.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub digest: Digest,
    pub tier: Tier,
    pub fetching: bool,
    pub retired: bool,
    pub pinned: bool,
    pub floor: Floor,
    pub bytes: u64,
    pub rank: u32,
    pub modules: u32,
    pub leases: u32,
    pub last_used: Option<Instant>,
    pub loads: u64,
    pub evictions: u64,
    /// Of the last fetch.
    pub failure: Option<Refusal>,
    /// Why its floor is not kept; it is served all the same.
    pub note: Option<Refusal>,
}

impl Facts {
    /// The floor is reached, or never will be without a change from outside.
    pub fn settled(&self) -> bool {
        let reached = match self.floor {
            Floor::None => true,
            // What was loaded once in this process has been verified; where there is no disk cache, its bytes are with
            // the source.
            Floor::Disk => self.loads > 0,
            Floor::Host => self.tier >= Tier::Host,
            Floor::Device => self.tier >= Tier::Device,
        };
        reached || self.failure.is_some() || self.note.is_some()
    }
}

impl Residency {
    /// The tiers as `moves` looks at them.
    pub fn rows(&self, now: Instant) -> Vec<Row> {
        self.entries
            .iter()
            .map(|(digest, entry)| Row {
                digest: *digest,
                host: match (&entry.host, entry.fetching) {
                    (Some(_), _) => HostTier::Present,
                    (None, true) => HostTier::Fetching,
                    (None, false) => HostTier::Absent,
                },
                store: entry.store(),
                device: entry.device.is_some(),
                pages_left: entry.device.as_ref().map_or(0, Device::pages_left),
                bytes: entry.bytes,
                pages: entry.pages,
                leases: entry.leases(),
                floor: if entry.retired { Floor::None } else { entry.enrolment.floor },
                pinned: entry.pinned.filter(|_| entry.enrolment.pinned && !entry.retired),
                verified: entry.loads > 0,
                touched: entry.touched,
                may_fetch: entry.failure.as_ref().is_none_or(|failure| failure.retry_at <= now),
            })
            .collect()
    }

    pub fn facts(&self) -> Vec<Facts> {
        self.entries
            .iter()
            .map(|(digest, entry)| Facts {
                digest: *digest,
                tier: entry.tier(),
                fetching: entry.fetching && entry.host.is_none(),
                retired: entry.retired,
                pinned: entry.enrolment.pinned,
                floor: entry.enrolment.floor,
                bytes: entry.bytes,
                rank: entry.rank,
                modules: entry.modules,
                leases: entry.leases(),
                last_used: entry.last_used,
                loads: entry.loads,
                evictions: entry.evictions,
                failure: entry.failure.as_ref().map(|failure| failure.refusal.clone()),
                note: entry.note.clone(),
            })
            .collect()
    }
}
