//! Places in the batch, of sequences and of adapters: who may have one, and who must give his up.

use std::collections::BTreeMap;
use std::time::Instant;

use lorafleet_artifact::Digest;

use super::{Plan, Yield, digest};
use crate::pages::KvOwner;
use crate::sequence::Sequence;

/// A turn is worth its beginning once one token was drawn for so many that may have to be computed again for the next.
const KNOWN_PER_DRAWN: u32 = 4;

impl<'a> Plan<'a> {
    /// Looks at the queue for one that has waited longer than `age_max` for a place of its own or of its adapter: it is
    /// the next to start, before any prompt goes on, or somebody else's turn ends for it. Without it, whoever is shorter
    /// or less served would take each place that comes free before its eyes, and long answers would keep theirs for as
    /// long as they go on.
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
                if overdue && self.is_full() && self.unseat(sequence, now) {
                    return Some(sequence);
                }
                continue;
            };
            let on_device = state.residency.resident(&digest).is_some();
            if on_device && self.has_place(&digest) {
                if overdue && (!self.is_full() || self.unseat(sequence, now)) {
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

    fn is_full(&self) -> bool {
        self.running_now >= self.state.limits.max_sequences
    }

    /// Ends a turn for `sequence`, which lacks nothing else: the youngest of whoever has most places, and more than its
    /// own owner. Says whether there was one that has had `age_max` and got on. As soon as they differ by one place only,
    /// that one changes hands if more was computed for who has it, and if its turn was worth its beginning: so places
    /// come to be shared by the owners, and no two take one from each other without getting anywhere.
    fn unseat(&mut self, sequence: &Sequence, now: Instant) -> bool {
        let state = self.state;
        let mut held: BTreeMap<KvOwner, u32> = BTreeMap::new();
        for other in &self.running {
            *held.entry(other.owner).or_default() += 1;
        }
        let places = |owner: &KvOwner| held.get(owner).copied().unwrap_or(0);
        let spent = |owner: &KvOwner| state.accounts.spent(owner);
        let own = places(&sequence.owner);
        let may_leave = |other: &&&Sequence| {
            let since = other.admitted.unwrap_or(now);
            let got_on = other.drawn_since_admission > 0;
            let worth = other.drawn_since_admission.saturating_mul(KNOWN_PER_DRAWN) >= other.known();
            let more = places(&other.owner).saturating_sub(own);
            let much_more = more > 1 || (more == 1 && worth && spent(&other.owner) > spent(&sequence.owner));
            got_on && much_more && now.saturating_duration_since(since) >= state.limits.age_max
        };
        let order = |other: &&&Sequence| (places(&other.owner), spent(&other.owner), other.admitted, other.id);
        let Some(victim) = self.running.iter().filter(may_leave).max_by_key(order).copied() else { return false };
        // Who would not fit all the same takes nobody's turn.
        let freed = state.pages.sole_among(&victim.pages);
        // Its adapter counts as takeable as long as nobody uses it.
        let idle = |digest: &_| state.residency.is_idle(digest) && !self.claimed.contains(digest);
        let own_adapter = digest(sequence).filter(idle);
        let own_adapter = own_adapter.map_or(0, |digest| state.residency.pages_of(&digest));
        let pages = sequence.known().div_ceil(state.pages.page_tokens());
        let wanted = pages + own_adapter + state.residency.uploading_pages();
        let waits_for_its_like = self.prefilling.contains(&sequence.group);
        if waits_for_its_like || wanted + self.reserved() > self.available + freed {
            return false;
        }
        self.preempt(victim, Yield::Aged);
        // At least what its turn would have taken.
        self.prompt_tokens = self.prompt_tokens.max(1).min(self.tokens_left);
        true
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
