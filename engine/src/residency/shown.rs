//! The adapters as the moves, the reports and the metrics look at them.

use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterState, Floor, Tier};

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
    /// It has been there whole, once in this process.
    pub was_on_device: bool,
    /// Of the last fetch, and until when nobody tries again.
    pub failure: Option<(Refusal, Instant)>,
    /// Why its floor is not kept; it is served all the same.
    pub note: Option<Refusal>,
}

impl Facts {
    /// The floor is reached, or never will be without a change from outside.
    pub fn settled(&self) -> bool {
        self.is_where_it_belongs() || self.failure.is_some()
    }

    /// The floor is reached, or cannot be kept and is no longer asked for. Without a pin it is a condition of the start
    /// only: once reached it is met, whatever is let go later.
    fn is_where_it_belongs(&self) -> bool {
        let reached = match self.floor {
            Floor::None => true,
            // What was loaded once in this process has been verified; where there is no disk cache, its bytes are with
            // the source.
            Floor::Disk => self.loads > 0,
            Floor::Host => self.tier >= Tier::Host || (!self.pinned && self.loads > 0),
            Floor::Device => self.tier >= Tier::Device || (!self.pinned && self.was_on_device),
        };
        reached || self.note.is_some()
    }

    /// Whether whoever asks for it can be served, perhaps after a fetch.
    pub fn state(&self, now: Instant) -> AdapterState {
        if self.tier < Tier::Host && self.is_failed(now) {
            AdapterState::Failed
        } else if self.is_where_it_belongs() {
            AdapterState::Ready
        } else {
            AdapterState::Loading
        }
    }

    /// The last fetch failed, and the next request would not try again, or with no better hope. What was verified once
    /// lacks only its copy: it is out of service for as long as the pause lasts, and so is what a store could not give at
    /// the moment and no floor asks for again.
    fn is_failed(&self, now: Instant) -> bool {
        let Some((refusal, retry_at)) = &self.failure else { return false };
        let passes = self.loads > 0 || (self.floor == Floor::None && refusal.retry_after_seconds.is_some());
        !passes || now < *retry_at
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
                was_on_device: entry.was_on_device,
                failure: entry.failure.as_ref().map(|failure| (failure.refusal.clone(), failure.retry_at)),
                note: entry.note.clone(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// What is known of an adapter, and what the report says of it before and after a failed fetch's pause.
    fn check(change: impl FnOnce(&mut Facts), before: AdapterState, after: AdapterState) {
        let now = Instant::now();
        let mut facts = Facts {
            digest: Digest::from_bytes([1; 32]),
            tier: Tier::Source,
            fetching: false,
            retired: false,
            pinned: true,
            floor: Floor::Disk,
            bytes: 1,
            rank: 8,
            modules: 1,
            leases: 0,
            last_used: None,
            loads: 1,
            evictions: 1,
            was_on_device: false,
            failure: None,
            note: None,
        };
        change(&mut facts);
        if let Some((_, retry_at)) = &mut facts.failure {
            *retry_at = now + Duration::from_secs(1);
        }
        let later = now + Duration::from_secs(2);
        assert_eq!((facts.state(now), facts.state(later)), (before, after), "{facts:?}");
    }

    #[test]
    fn states_say_whether_somebody_who_asks_is_served() {
        use AdapterState::{Failed, Loading, Ready};
        let away = |facts: &mut Facts| {
            let refusal = Refusal { retry_after_seconds: Some(1), ..Refusal::new(502, "SourceUnavailable", "away") };
            facts.failure = Some((refusal, Instant::now()));
        };
        let broken = |facts: &mut Facts| facts.failure = Some((Refusal::new(422, "Malformed", "nan"), Instant::now()));
        let unpinned = |floor: Floor, facts: &mut Facts| (facts.floor, facts.pinned) = (floor, false);
        // A fetch for demand below a floor that is met.
        check(|facts| facts.fetching = true, Ready, Ready);
        // On its way to its floor, for the first time or again.
        check(|facts| facts.loads = 0, Loading, Loading);
        check(|facts| facts.floor = Floor::Host, Loading, Loading);
        check(|facts| (facts.floor, facts.tier) = (Floor::Device, Tier::Host), Loading, Loading);
        // Without a pin a floor is met once it was reached.
        check(|facts| unpinned(Floor::Host, facts), Ready, Ready);
        check(|facts| unpinned(Floor::Device, facts), Loading, Loading);
        check(|facts| (unpinned(Floor::Device, facts), facts.was_on_device = true).1, Ready, Ready);
        // What was verified once is tried again by the next request after the pause.
        check(away, Failed, Ready);
        check(broken, Failed, Ready);
        check(|facts| (away(facts), facts.floor = Floor::Host).1, Failed, Loading);
        check(|facts| (away(facts), facts.tier = Tier::Host).1, Ready, Ready);
        // What never was: tried again by its floor, or by the next request if the store may have it by then.
        check(|facts| (away(facts), facts.loads = 0).1, Failed, Failed);
        check(|facts| (away(facts), (facts.loads, facts.floor) = (0, Floor::None)).1, Failed, Ready);
        check(|facts| (broken(facts), (facts.loads, facts.floor) = (0, Floor::None)).1, Failed, Failed);
    }
}
