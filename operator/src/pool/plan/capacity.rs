//! What fits on the pods, each by itself.
//!
//! A pod with less room takes nothing away from the others. What is served stays on those pods on which it fits; what is new
//! must fit on all of them; and a pod that has been told nothing yet is told nothing, and so never takes traffic, for as long as
//! it has no room for all that the others shall hold: else a rollout would go on, and what does not fit would be gone with it.

use std::collections::{HashMap, HashSet};

use lorafleet_artifact::Digest;
use lorafleet_crds::ServingPool;
use lorafleet_crds::condition::Cause;
use lorafleet_crds::wire::{ADAPTERS_MAX, Budgets};

use super::super::observed::{Observed, PodSeen};
use super::Reasoned;
use super::placement::{Revision, Stage};

/// The room of all pods that serve the base, while it is given away.
pub(super) struct Rooms<'a> {
    /// Of pods that take traffic or were told something since they started; of all, if there is no such pod.
    settled: Vec<(&'a str, Room)>,
    /// Of pods that were told nothing yet.
    new: Vec<(&'a str, Room)>,
    kept: Kept,
}

/// What is kept from which pods, for want of room.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// By pod: versions that others hold.
    pub(super) lacking: HashMap<String, HashSet<(String, Digest)>>,
    /// By pod: why it is told nothing at all.
    pub(super) out: HashMap<String, Reasoned>,
}

/// What became of one version.
pub(super) struct Taken {
    /// Some pod shall hold it.
    pub(super) placed: bool,
    /// Why some pod does not.
    pub(super) refused: Option<Reasoned>,
}

impl<'a> Rooms<'a> {
    /// From the reports of the pods, and before there are any from the spec.
    pub(super) fn of(observed: &'a Observed, base: Option<Digest>) -> Self {
        let other_base = |pod: &PodSeen| pod.report().is_some_and(|report| Some(report.base.digest) != base);
        let told = |pod: &PodSeen| pod.report().is_some_and(|report| report.generation > 0);
        let (mut settled, mut new) = (Vec::new(), Vec::new());
        for pod in observed.pods.iter().filter(|pod| !pod.deleting && !other_base(pod)) {
            let room = || (pod.name.as_str(), Room::of(&observed.pool, pod.report().map(|report| report.budgets)));
            if pod.takes_traffic() || told(pod) {
                settled.push(room());
            } else if pod.report().is_some() {
                new.push(room());
            }
        }
        if settled.is_empty() {
            settled = std::mem::take(&mut new);
        }
        if settled.is_empty() {
            settled.push(("", Room::before_any(&observed.pool)));
        }
        Self { settled, new, kept: Kept::default() }
    }

    /// Takes the room for one version where it is, or says which limit is in the way and both values.
    pub(super) fn take(&mut self, revision: &Revision) -> Taken {
        let fits: Vec<Result<(), Reasoned>> = self.settled.iter().map(|(_, room)| room.fits(revision)).collect();
        let everywhere = fits.iter().all(Result::is_ok);
        let placed = everywhere || (revision.stage != Stage::Candidate && fits.iter().any(Result::is_ok));
        let mut refused = None;
        for ((pod, room), fits) in self.settled.iter_mut().zip(fits) {
            match fits {
                Ok(()) if placed => room.take(revision),
                Ok(()) => {}
                Err(why) => {
                    if placed {
                        let lacks = self.kept.lacking.entry((*pod).to_owned()).or_default();
                        lacks.insert((revision.name.clone(), revision.digest));
                    }
                    let of_pod = |why: Reasoned| match placed {
                        true => Reasoned::new(why.cause, format!("pod {pod}: {}", why.message)),
                        false => why,
                    };
                    refused.get_or_insert_with(|| of_pod(why));
                }
            }
        }
        if placed {
            self.let_in(revision);
        }
        Taken { placed, refused }
    }

    fn let_in(&mut self, revision: &Revision) {
        for (pod, room) in &mut self.new {
            match room.fits(revision) {
                Ok(()) => room.take(revision),
                Err(why) => {
                    let (name, digest) = (&revision.name, revision.digest.short());
                    let message = format!(
                        "it has no room for what the others hold, and is told nothing: {name}@{digest}: {}",
                        why.message
                    );
                    self.kept.out.entry((*pod).to_owned()).or_insert_with(|| Reasoned::new(why.cause, message));
                }
            }
        }
    }

    pub(super) fn kept(self) -> Kept {
        self.kept
    }
}

/// What is left on one pod. `None` is not known yet, and so no limit: the engine itself refuses what is too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
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
    /// As the pod reports it, if it does.
    fn of(pool: &ServingPool, budgets: Option<Budgets>) -> Self {
        let tank = |total: u64| (total > 0).then(|| Tank::of(total));
        Self {
            adapters_left: ADAPTERS_MAX,
            rank_max: pool.spec.capacity.max_rank,
            host: budgets.and_then(|budgets| tank(budgets.host_bytes_total)),
            disk: budgets.and_then(|budgets| tank(budgets.disk_bytes_total)),
        }
    }

    fn before_any(pool: &ServingPool) -> Self {
        let capacity = &pool.spec.capacity;
        let (host, disk) = (capacity.host_cache_bytes.map(Tank::of), capacity.disk_cache_bytes.map(Tank::of));
        Self { host, disk, ..Self::of(pool, None) }
    }

    fn fits(&self, revision: &Revision) -> Result<(), Reasoned> {
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
        Ok(())
    }

    fn take(&mut self, revision: &Revision) {
        self.adapters_left = self.adapters_left.saturating_sub(1);
        let tanks = [(&mut self.host, revision.in_host_memory()), (&mut self.disk, true)];
        for (tank, concerned) in tanks {
            if let Some(tank) = tank.as_mut().filter(|_| concerned) {
                tank.taken = tank.taken.saturating_add(revision.bytes);
            }
        }
    }
}
