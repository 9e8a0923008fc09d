//! What fits on a pod.

use lorafleet_crds::condition::Cause;
use lorafleet_crds::wire::ADAPTERS_MAX;

use super::super::observed::Observed;
use super::Reasoned;
use super::placement::Revision;

/// What is left on the smallest pod. `None` is not known yet, and so no limit: the engine itself refuses what is too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    adapters_left: usize,
    rank_max: Option<u32>,
    host: Option<Tank>,
    disk: Option<Tank>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tank {
    total: u64,
    taken: u64,
}

impl Tank {
    fn of(total: u64) -> Self {
        Self { total, taken: 0 }
    }

    fn fits(&self, bytes: u64) -> bool {
        self.taken.saturating_add(bytes) <= self.total
    }
}

impl Room {
    /// From the reports of the pods, and before there are any from the spec.
    pub(super) fn of(observed: &Observed) -> Self {
        let capacity = &observed.pool.spec.capacity;
        let budgets = || observed.pods.iter().filter_map(|pod| pod.report()).map(|report| report.budgets);
        let host = budgets().map(|budget| budget.host_bytes_total).filter(|total| *total > 0).min();
        let disk = budgets().map(|budget| budget.disk_bytes_total).filter(|total| *total > 0).min();
        Self {
            adapters_left: ADAPTERS_MAX,
            rank_max: capacity.max_rank,
            host: host.or(capacity.host_cache_bytes).map(Tank::of),
            disk: disk.or(capacity.disk_cache_bytes).map(Tank::of),
        }
    }

    /// Takes the room for one revision, or says which limit is in the way and both values.
    pub(super) fn take(&mut self, revision: &Revision) -> Result<(), Reasoned> {
        if let (Some(limit), Some(rank)) = (self.rank_max, revision.rank)
            && rank > limit
        {
            let message = format!("its rank is {rank}, the pool's capacity.maxRank is {limit}");
            return Err(Reasoned::new(Cause::CapacityExceeded, message));
        }
        if self.adapters_left == 0 {
            let message = format!("the pool holds {ADAPTERS_MAX} adapter versions, more than an engine takes");
            return Err(Reasoned::new(Cause::CapacityExceeded, message));
        }
        let bytes = revision.bytes;
        let tanks = [
            ("memory (capacity.hostCacheBytes)", self.host, revision.in_host_memory()),
            ("disk (capacity.diskCacheBytes)", self.disk, true),
        ];
        for (what, tank, concerned) in tanks {
            if let Some(tank) = tank.filter(|tank| concerned && !tank.fits(bytes)) {
                let message = format!("it needs {bytes} bytes of {what}, {} of {} are taken", tank.taken, tank.total);
                return Err(Reasoned::new(Cause::CapacityExceeded, message));
            }
        }
        self.adapters_left = self.adapters_left.saturating_sub(1);
        if revision.in_host_memory()
            && let Some(tank) = &mut self.host
        {
            tank.taken = tank.taken.saturating_add(bytes);
        }
        if let Some(tank) = &mut self.disk {
            tank.taken = tank.taken.saturating_add(bytes);
        }
        Ok(())
    }
}
