//! Places for adapters in the batch: who may have one, and who must give his up.

use std::collections::BTreeMap;
use std::time::Instant;

use lorafleet_artifact::Digest;

use super::{Plan, Yield, digest};
use crate::sequence::Sequence;

impl<'a> Plan<'a> {
    /// Looks at the queue for one that has waited longer than `age_max` for a place of its adapter: it is the next to
    /// start, before any prompt goes on, or somebody else's turn ends for it. Without it, whoever is shorter or less
    /// served would take each place that comes free before its eyes.
    pub(super) fn places(&mut self, now: Instant) -> Option<&'a Sequence> {
        let state = self.state;
        if self.closed {
            return None;
        }
        let mut nobody_runs = self.running_now == 0;
        for sequence in &state.waiting {
            let overdue = now.saturating_duration_since(sequence.queued) >= state.limits.age_max;
            let Some(digest) = digest(sequence).filter(|digest| !self.adapters.contains(digest)) else {
                nobody_runs = false;
                continue;
            };
            let on_device = state.residency.resident(&digest).is_some();
            if on_device && self.has_place(&digest) {
                if overdue {
                    return Some(sequence);
                }
                nobody_runs = false;
                continue;
            }
            // A copy in host memory lacks only room; one that is still on its way is nobody's fault here.
            if !on_device && !state.residency.lacks_room(&digest) {
                continue;
            }
            if nobody_runs && !on_device {
                // Nobody runs, and still its adapter found no room.
                self.schedule.hopeless.push(sequence.id);
            } else if overdue {
                self.displace(now);
                if on_device {
                    return Some(sequence);
                }
                // What comes free is for its upload, not for others' tokens.
                self.closed = self.running_now > 0;
                return None;
            }
        }
        None
    }

    pub(super) fn has_place(&self, digest: &Digest) -> bool {
        self.adapters.contains(digest) || self.adapters.len() < self.state.limits.max_adapters_per_batch as usize
    }

    /// Ends the turn of the adapter that has been in use longest, if it has had `age_max` and each of its sequences
    /// got on: then no two can keep taking the place from each other without getting anywhere.
    fn displace(&mut self, now: Instant) {
        let staying: Vec<&Sequence> =
            self.running.iter().copied().filter(|sequence| !self.preempted.contains(&sequence.id)).collect();
        let mut held: BTreeMap<Digest, (Instant, bool)> = BTreeMap::new();
        for sequence in &staying {
            let Some(digest) = digest(sequence) else { continue };
            let since = sequence.admitted.unwrap_or(now);
            let entry = held.entry(digest).or_insert((since, true));
            entry.0 = entry.0.min(since);
            entry.1 &= sequence.drawn_since_admission > 0;
        }
        let age_max = self.state.limits.age_max;
        let may_leave =
            held.iter().filter(|(_, (since, got_on))| *got_on && now.saturating_duration_since(*since) >= age_max);
        let Some(longest) = may_leave.min_by_key(|(_, (since, _))| *since).map(|(digest, _)| *digest) else { return };
        for sequence in staying.iter().filter(|sequence| digest(sequence) == Some(longest)) {
            self.preempt(sequence, Yield::Aged);
        }
    }
}
