//! Who may start before an elder that lacks pages.
//!
//! The elder waits until those before it have ended; that may be long, and small requests need not wait with it. They
//! pass as long as all that are younger than the elder, with the longest answers they may come to, fit beside it: then
//! it starts when those before it have ended, no later than if nobody had passed.

use std::collections::BTreeSet;

use super::{Plan, digest};
use crate::sequence::Sequence;

/// Sequences that are looked at in one step after the first that lacks pages: each look costs a search for its prefix.
const FAILURES_MAX: u32 = 8;

impl<'a> Plan<'a> {
    pub(super) fn may_pass(&self, sequence: &Sequence) -> bool {
        let age = |sequence: &Sequence| (sequence.queued, sequence.id);
        let Some(elder) = self.blocked.filter(|elder| age(elder) < age(sequence)) else { return true };
        let residency = &self.state.residency;
        let page_tokens = self.state.pages.page_tokens();
        let own = digest(elder);
        let pinned = own.map_or(residency.pinned_pages(), |digest| residency.pinned_pages_beside(&digest));
        let elders = elder.known().div_ceil(page_tokens) + own.map_or(0, |digest| residency.pages_of(&digest));
        let stays = |other: &&&Sequence| !self.preempted.contains(&other.id) && age(elder) < age(other);
        let passed: Vec<&Sequence> =
            self.running.iter().chain(&self.admitted).filter(stays).copied().chain([sequence]).collect();
        let tokens: u32 = passed.iter().map(|other| other.tokens_max().div_ceil(page_tokens)).sum();
        let adapters: BTreeSet<_> =
            passed.iter().filter_map(|other| digest(other)).filter(|digest| Some(*digest) != own).collect();
        let adapters: u32 = adapters.iter().map(|digest| residency.loose_pages_of(digest)).sum();
        elders + tokens + adapters <= self.state.budget.pages.saturating_sub(pinned)
    }

    /// Remembers one that lacks pages, or whose pages an elder lacks.
    pub(super) fn block(&mut self, sequence: &'a Sequence) {
        let elder = self.blocked.is_none_or(|other| (sequence.queued, sequence.id) < (other.queued, other.id));
        if elder {
            self.blocked = Some(sequence);
        }
        self.failures += 1;
        self.closed |= self.failures >= FAILURES_MAX;
    }
}
