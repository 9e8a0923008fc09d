//! Whose prompt goes on, and who of the queue starts: a third of the step's tokens each to the eldest, to the shortest,
//! and to the least served.
//!
//! Each third is a promise of its own, whatever else there is. By age: everybody comes to be the eldest, so nobody
//! starves. By length: a short prompt waits for those that are shorter still, never for the long ones, however many. By
//! what was computed for its adapter: one request of one adapter waits for at most one request of each of the others.
//! What one third does not need the others take, so that no step is smaller than it could be.

use super::{Plan, digest};
use crate::sequence::Sequence;

/// The orders, and so the parts of a step.
const ORDERS: u32 = 3;

/// One order of all candidates, and what is left of its part of the step.
struct Order<'a> {
    candidates: std::vec::IntoIter<&'a Sequence>,
    tokens: u32,
}

impl Order<'_> {
    fn goes_on(&self) -> bool {
        self.tokens > 0 && !self.candidates.as_slice().is_empty()
    }
}

impl<'a> Plan<'a> {
    /// Gives the step's tokens to prompts under way and to the queue; `first` goes before all.
    pub(super) fn prompts(&mut self, first: Option<&'a Sequence>) {
        let part = self.prompt_tokens.div_ceil(ORDERS);
        let used = first.map_or(0, |first| self.visit(first, part));
        let eldest = self.candidates();
        let mut shortest = eldest.clone();
        shortest.sort_by_key(|sequence| sequence.behind());
        let mut least_served = eldest.clone();
        least_served.sort_by_key(|sequence| self.state.accounts.spent(&sequence.owner));
        let mut orders = [(eldest.clone(), part - used), (shortest, part), (least_served, part)]
            .map(|(candidates, tokens)| Order { candidates: candidates.into_iter(), tokens });
        // In turns, and not always beginning with the same: places are fewer than tokens, and each order gets its part
        // of them too.
        let mut turn = self.state.admissions;
        while self.prompt_tokens > 0 && orders.iter().any(Order::goes_on) {
            let order = orders.get_mut((turn % u64::from(ORDERS)) as usize);
            turn += 1;
            let Some(order) = order.filter(|order| order.goes_on()) else { continue };
            if let Some(sequence) = order.candidates.next() {
                order.tokens -= self.visit(sequence, order.tokens);
            }
        }
        for sequence in eldest {
            self.visit(sequence, self.prompt_tokens);
        }
    }

    /// Prompts under way and, while there are places, the queue; by age.
    fn candidates(&self) -> Vec<&'a Sequence> {
        let mut candidates: Vec<&Sequence> =
            self.running.iter().copied().filter(|sequence| sequence.behind() > 1).collect();
        if self.may_start() {
            candidates.extend(&self.state.waiting);
        }
        candidates.sort_by_key(|sequence| (sequence.queued, sequence.id));
        candidates
    }

    fn may_start(&self) -> bool {
        !self.closed && self.running_now < self.state.limits.max_sequences
    }

    /// At most `most` tokens for a prompt under way or a waiting sequence. Returns how many it was given.
    fn visit(&mut self, sequence: &'a Sequence, most: u32) -> u32 {
        let most = most.min(self.prompt_tokens).min(self.tokens_left);
        let given = if most == 0 {
            0
        } else if self.is_under_way(sequence) {
            let left = self.behind_at_start(sequence) - self.row(sequence);
            self.go_on(sequence, left.min(most))
        } else if self.may_start() && self.tried.insert(sequence.id) {
            self.start(sequence, most)
        } else {
            0
        };
        self.prompt_tokens -= given;
        given
    }

    /// Admits a waiting sequence if its adapter has a place and its known tokens fit beside those of the prompts under
    /// way, and beside an elder that lacks pages.
    fn start(&mut self, sequence: &'a Sequence, most: u32) -> u32 {
        let state = self.state;
        if let Some(digest) = digest(sequence)
            && !(state.residency.resident(&digest).is_some() && self.has_place(&digest))
        {
            return 0;
        }
        if self.prefilling.contains(&sequence.group) {
            return 0;
        }
        let alone = self.running_now == 0;
        let page_tokens = state.pages.page_tokens();
        // The last token is always computed: its row is what the first draw looks at.
        let findable = (sequence.known().saturating_sub(1) / page_tokens) as usize;
        let found = state.pages.find(sequence.owner, &sequence.tokens, findable);
        let idle = |digest: &_| state.residency.is_idle(digest) && !self.claimed.contains(digest);
        let first_use = digest(sequence).filter(idle);
        let held = state.pages.idle_among(&found) + first_use.map_or(0, |digest| state.residency.pages_of(&digest));
        let left = self.available.saturating_sub(held);
        let wanted = sequence.known().div_ceil(page_tokens) - found.len() as u32;
        // Nobody new takes the pages of an adapter that is on its way to who waits for it.
        let coming = state.residency.uploading_pages();
        if !alone && (wanted + self.reserved() + coming > left || !self.may_pass(sequence)) {
            self.block(sequence);
            return 0;
        }
        let computed = found.len() as u32 * page_tokens;
        let room = (found.len() as u32 + left).saturating_mul(page_tokens).saturating_sub(computed);
        let tokens = (sequence.known() - computed).min(most).min(room);
        if tokens == 0 {
            if alone {
                self.schedule.hopeless.push(sequence.id);
            }
            self.closed = true;
            return 0;
        }
        self.available = left;
        self.claimed.extend(first_use);
        self.running_now += 1;
        self.adapters.extend(digest(sequence));
        self.prefilling.insert(sequence.group);
        self.admitted.push(sequence);
        self.schedule.admit.push((sequence.id, found));
        self.give(sequence, tokens);
        tokens
    }
}
