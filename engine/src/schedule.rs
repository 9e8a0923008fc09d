//! Which sequences run in the next step, and how many tokens of each: `State -> Schedule`, without clock or IO.
//!
//! Running sequences decode first, then prompts go on in chunks, then waiting sequences are admitted in the order of
//! their queue. Nobody starves: the queue is first come, first served; whoever lacks only its adapter is stepped over
//! and, after `age_max`, takes the place of the adapter that has been in use longest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::{PageId, SequenceId};

use crate::pages::KvOwner;
use crate::sequence::Sequence;
use crate::state::State;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yield {
    /// Pages ran out: computed again later, at its old place in the queue.
    OutOfPages,
    /// Its adapter made room for one that waited too long: goes to the end of the queue.
    Aged,
}

/// What to do, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    pub preempt: Vec<(SequenceId, Yield)>,
    /// With the pages of the prefix cache that each starts on.
    pub admit: Vec<(SequenceId, Vec<PageId>)>,
    /// Tokens to compute of each running or admitted sequence.
    pub rows: Vec<(SequenceId, u32)>,
    /// Cannot run even alone: the pool is too small for it as things are.
    pub hopeless: Vec<SequenceId>,
}

pub fn decide(state: &State, now: Instant) -> Schedule {
    let mut plan = Plan::new(state);
    plan.decode();
    plan.prefill();
    plan.admit(now);
    plan.schedule
}

struct Plan<'a> {
    state: &'a State,
    schedule: Schedule,
    /// Running sequences in the order of their arrival, the first to be served first.
    running: Vec<&'a Sequence>,
    preempted: BTreeSet<SequenceId>,
    /// Idle adapters that a sequence admitted in this step uses: their pages can no longer be taken.
    claimed: BTreeSet<Digest>,
    /// Pages that the rows so far leave, counting what may be taken from the prefix cache and from idle adapters.
    available: u32,
    tokens_left: u32,
}

impl<'a> Plan<'a> {
    fn new(state: &'a State) -> Self {
        let mut running: Vec<&Sequence> = state.running.iter().collect();
        running.sort_by_key(|sequence| (sequence.queued, sequence.id));
        Self {
            state,
            schedule: Schedule::default(),
            running,
            preempted: BTreeSet::new(),
            claimed: BTreeSet::new(),
            available: state.pages.available() + state.residency.idle_pages(),
            tokens_left: state.limits.max_step_tokens,
        }
    }

    fn decode(&mut self) {
        for index in 0..self.running.len() {
            let Some(sequence) = self.running.get(index).copied() else { continue };
            if sequence.behind() == 1 {
                self.go_on(index, sequence, 1);
            }
        }
    }

    fn prefill(&mut self) {
        for index in 0..self.running.len() {
            let Some(sequence) = self.running.get(index).copied() else { continue };
            if sequence.behind() > 1 && self.tokens_left > 0 {
                self.go_on(index, sequence, sequence.behind().min(self.tokens_left));
            }
        }
    }

    /// Gives a running sequence its tokens, at the cost of those behind it if pages are short.
    fn go_on(&mut self, index: usize, sequence: &Sequence, tokens: u32) {
        if self.preempted.contains(&sequence.id) || self.tokens_left == 0 {
            return;
        }
        let mut pages = self.pages_wanted(sequence, tokens);
        while pages > self.available {
            let victim = self.running.get(index + 1..).unwrap_or_default().iter().rev().copied();
            match victim.into_iter().find(|victim| !self.preempted.contains(&victim.id)) {
                Some(victim) => self.preempt(victim, Yield::OutOfPages),
                None => break,
            }
        }
        let mut tokens = tokens;
        if pages > self.available {
            // A prompt goes on as far as the pages reach; who holds the others will end or give way.
            tokens = tokens.min(self.room(sequence));
            pages = self.pages_wanted(sequence, tokens);
        }
        if tokens > 0 {
            self.available -= pages;
            self.tokens_left -= tokens.min(self.tokens_left);
            self.schedule.rows.push((sequence.id, tokens));
        } else if self.state.running.len() == 1 {
            // Nobody is left to take pages from, now or later.
            self.schedule.hopeless.push(sequence.id);
        } else if sequence.behind() == 1 && index > 0 {
            self.preempt(sequence, Yield::OutOfPages);
        }
    }

    fn preempt(&mut self, victim: &Sequence, why: Yield) {
        self.preempted.insert(victim.id);
        let given: u32 = self.state.pages.sole_among(&victim.pages);
        self.available += given;
        if let Some(place) = self.schedule.rows.iter().position(|(id, _)| *id == victim.id) {
            let (_, tokens) = self.schedule.rows.remove(place);
            self.available += self.pages_wanted(victim, tokens);
            self.tokens_left += tokens;
        }
        self.schedule.preempt.push((victim.id, why));
    }

    /// New pages for `tokens` more tokens of a running sequence.
    fn pages_wanted(&self, sequence: &Sequence, tokens: u32) -> u32 {
        let pages = (sequence.computed + tokens).div_ceil(self.state.pages.page_tokens());
        pages.saturating_sub(sequence.pages.len() as u32)
    }

    /// New pages that a running sequence's known tokens will take after this step.
    fn pages_wanted_later(&self, sequence: &Sequence) -> u32 {
        let row = self.schedule.rows.iter().find(|(id, _)| *id == sequence.id);
        let now = row.map_or(0, |(_, tokens)| self.pages_wanted(sequence, *tokens));
        self.pages_wanted(sequence, sequence.behind()) - now
    }

    /// Tokens that the sequence's own pages and the available ones still take.
    fn room(&self, sequence: &Sequence) -> u32 {
        let pages = sequence.pages.len() as u32 + self.available;
        pages.saturating_mul(self.state.pages.page_tokens()).saturating_sub(sequence.computed)
    }

    fn admit(&mut self, now: Instant) {
        let state = self.state;
        let stays = |sequence: &&&Sequence| !self.preempted.contains(&sequence.id);
        let staying: Vec<&Sequence> = self.running.iter().filter(stays).copied().collect();
        let mut running = staying.len() as u32;
        let mut adapters: BTreeSet<Digest> = staying.iter().filter_map(|sequence| digest(sequence)).collect();
        let mut prefilling: BTreeSet<u64> =
            staying.iter().filter(|sequence| sequence.drawn() == 0).map(|sequence| sequence.group).collect();
        // What prompts under way will still need; admission leaves it alone so that it does not undo itself.
        let mut reserved: u32 = staying.iter().map(|sequence| self.pages_wanted_later(sequence)).sum();
        let mut displaced = false;
        let queue_is_closed = !self.schedule.preempt.is_empty();
        for sequence in &state.waiting {
            if queue_is_closed || running >= state.limits.max_sequences || self.tokens_left == 0 {
                return;
            }
            let overdue = now.saturating_duration_since(sequence.queued) >= state.limits.age_max;
            if let Some(digest) = digest(sequence) {
                let on_device = state.residency.resident(&digest).is_some();
                let has_place =
                    adapters.contains(&digest) || adapters.len() < state.limits.max_adapters_per_batch as usize;
                if !on_device || !has_place {
                    // A copy in host memory lacks only room; one that is still on its way is nobody's fault here.
                    let lacks_room_only = on_device || state.residency.is_on_host(&digest);
                    if running == 0 && lacks_room_only && !on_device {
                        // Nobody runs, and still its adapter found no room.
                        self.schedule.hopeless.push(sequence.id);
                        continue;
                    }
                    if overdue && lacks_room_only && !displaced {
                        displaced = true;
                        self.displace(&staying, now);
                        if !on_device && running > 0 {
                            return;
                        }
                    }
                    continue;
                }
            }
            if prefilling.contains(&sequence.group) {
                continue;
            }
            match self.start(sequence, running == 0, reserved) {
                Some(pages_reserved) => reserved += pages_reserved,
                None => return,
            }
            running += 1;
            adapters.extend(digest(sequence));
            prefilling.insert(sequence.group);
        }
    }

    /// Admits a waiting sequence if its known tokens fit beside what is `reserved`. Returns what it reserves itself;
    /// `None` closes the queue.
    fn start(&mut self, sequence: &Sequence, alone: bool, reserved: u32) -> Option<u32> {
        let state = self.state;
        let page_tokens = state.pages.page_tokens();
        // The last token is always computed: its row is what the first draw looks at.
        let findable = (sequence.known().saturating_sub(1) / page_tokens) as usize;
        let found = state.pages.find(sequence.owner, &sequence.tokens, findable);
        let idle = |digest: &Digest| state.residency.is_idle(digest) && !self.claimed.contains(digest);
        let first_use = digest(sequence).filter(idle);
        let held = state.pages.idle_among(&found) + first_use.map_or(0, |digest| state.residency.pages_of(&digest));
        let left = self.available.saturating_sub(held);
        let wanted = sequence.known().div_ceil(page_tokens) - found.len() as u32;
        if !alone && wanted + reserved > left {
            return None;
        }
        let computed = found.len() as u32 * page_tokens;
        let room = (found.len() as u32 + left).saturating_mul(page_tokens).saturating_sub(computed);
        let tokens = (sequence.known() - computed).min(self.tokens_left).min(room);
        if tokens == 0 {
            if alone {
                self.schedule.hopeless.push(sequence.id);
            }
            return None;
        }
        let pages = (computed + tokens).div_ceil(page_tokens) - found.len() as u32;
        self.available = left - pages;
        self.tokens_left -= tokens;
        self.claimed.extend(first_use);
        self.schedule.rows.push((sequence.id, tokens));
        self.schedule.admit.push((sequence.id, found));
        Some(wanted - pages.min(wanted))
    }

    /// Ends the turn of the adapter that has been in use longest, if it has had `age_max` and each of its sequences
    /// got on: then no two can keep taking the place from each other without getting anywhere.
    fn displace(&mut self, staying: &[&Sequence], now: Instant) {
        let mut held: BTreeMap<Digest, (Instant, bool)> = BTreeMap::new();
        for sequence in staying {
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

fn digest(sequence: &Sequence) -> Option<Digest> {
    match sequence.owner {
        KvOwner::Base => None,
        KvOwner::Adapter(digest) => Some(digest),
    }
}
