//! Which sequences run in the next step, and how many tokens of each: `State -> Schedule`, without clock or IO.
//!
//! Running sequences decode first; what is left of the step goes to prompts, in [`prompts`], and who of the queue starts
//! is decided with it. Who lacks pages may be passed, in [`passing`]. Whoever lacks only its adapter is stepped over and,
//! after `age_max`, takes the place of the adapter that has been in use longest; who lacks only a place of its own takes
//! one of whoever has most, in [`places`].

use std::collections::BTreeSet;
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::{PageId, SequenceId};

use crate::pages::KvOwner;
use crate::sequence::Sequence;
use crate::state::State;

mod passing;
mod places;
mod prompts;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yield {
    /// Pages ran out: computed again later, at its old place in the queue.
    OutOfPages,
    /// It, or its adapter, made room for one that waited too long: goes to the end of the queue.
    Aged,
}

/// Tokens of a step that prompts have at least, however slow the machine is.
const PROMPT_TOKENS_MIN: u32 = 16;

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
    let first = plan.places(now);
    plan.prompts(first);
    plan.schedule
}

struct Plan<'a> {
    state: &'a State,
    schedule: Schedule,
    /// Running sequences in the order of their arrival, the first to be served first.
    running: Vec<&'a Sequence>,
    preempted: BTreeSet<SequenceId>,
    /// Who starts in this step.
    admitted: Vec<&'a Sequence>,
    /// Waiting sequences that were looked at in this step: not again.
    tried: BTreeSet<SequenceId>,
    /// How many run, without those preempted and with those admitted; and their adapters.
    running_now: u32,
    adapters: BTreeSet<Digest>,
    /// Groups whose first sequence has not got through its prompt: the others wait for its pages.
    prefilling: BTreeSet<u64>,
    /// Idle adapters that a sequence admitted in this step uses: their pages can no longer be taken.
    claimed: BTreeSet<Digest>,
    /// Pages that the rows so far leave, counting what may be taken from the prefix cache and from idle adapters.
    available: u32,
    tokens_left: u32,
    /// The eldest that lacks pages: who starts in spite of it must fit beside it.
    blocked: Option<&'a Sequence>,
    failures: u32,
    /// Tokens of the step that prompts may have.
    prompt_tokens: u32,
    /// Nobody starts any more in this step.
    closed: bool,
}

impl<'a> Plan<'a> {
    fn new(state: &'a State) -> Self {
        let mut running: Vec<&Sequence> = state.running.iter().collect();
        running.sort_by_key(|sequence| (sequence.queued, sequence.id));
        Self {
            state,
            schedule: Schedule::default(),
            preempted: BTreeSet::new(),
            admitted: Vec::new(),
            tried: BTreeSet::new(),
            running_now: running.len() as u32,
            adapters: running.iter().filter_map(|sequence| digest(sequence)).collect(),
            prefilling: running
                .iter()
                .filter(|sequence| sequence.drawn() == 0)
                .map(|sequence| sequence.group)
                .collect(),
            claimed: BTreeSet::new(),
            available: state.pages.available() + state.residency.idle_pages(),
            tokens_left: state.limits.max_step_tokens,
            blocked: None,
            failures: 0,
            prompt_tokens: 0,
            closed: false,
            running,
        }
    }

    fn decode(&mut self) {
        for index in 0..self.running.len() {
            let Some(sequence) = self.running.get(index).copied() else { continue };
            if sequence.behind() == 1 {
                self.go_on(sequence, 1.min(self.tokens_left));
            }
        }
        let in_time = self.state.pace.rows_within(self.state.limits.step_time_max);
        let rows = self.schedule.rows.len() as u32;
        self.prompt_tokens = self.tokens_left.min(in_time.saturating_sub(rows).max(PROMPT_TOKENS_MIN));
    }

    /// Gives a sequence under way so many more tokens, at the cost of younger ones if pages are short. Returns how many
    /// it got.
    fn go_on(&mut self, sequence: &Sequence, tokens: u32) -> u32 {
        if tokens == 0 || self.preempted.contains(&sequence.id) {
            return 0;
        }
        let index = self.running.iter().position(|other| other.id == sequence.id).unwrap_or(self.running.len());
        while self.more_pages(sequence, tokens) > self.available {
            let younger = self.running.get(index + 1..).unwrap_or_default().iter().rev().copied();
            match younger.into_iter().find(|victim| !self.preempted.contains(&victim.id)) {
                Some(victim) => self.preempt(victim, Yield::OutOfPages),
                None => break,
            }
        }
        // A prompt goes on as far as the pages reach; who holds the others will end or give way.
        let tokens = tokens.min(self.room(sequence));
        if tokens > 0 {
            self.give(sequence, tokens);
        } else if self.running.len() == 1 && index == 0 && self.row(sequence) == 0 {
            // Nobody is left to take pages from, now or later.
            self.schedule.hopeless.push(sequence.id);
        } else if sequence.behind() == 1 && index > 0 {
            self.preempt(sequence, Yield::OutOfPages);
        }
        tokens
    }

    fn give(&mut self, sequence: &Sequence, tokens: u32) {
        self.available -= self.more_pages(sequence, tokens);
        self.tokens_left -= tokens.min(self.tokens_left);
        match self.schedule.rows.iter_mut().find(|(id, _)| *id == sequence.id) {
            Some((_, given)) => *given += tokens,
            None => self.schedule.rows.push((sequence.id, tokens)),
        }
    }

    fn preempt(&mut self, victim: &Sequence, why: Yield) {
        self.preempted.insert(victim.id);
        self.available += self.state.pages.sole_among(&victim.pages);
        if let Some(place) = self.schedule.rows.iter().position(|(id, _)| *id == victim.id) {
            self.available += self.pages_for(victim, self.row(victim));
            let (_, tokens) = self.schedule.rows.remove(place);
            self.tokens_left += tokens;
        }
        self.schedule.preempt.push((victim.id, why));
        // Who gives up pages does not give them to the queue.
        self.closed |= why == Yield::OutOfPages;
        self.running_now -= 1;
        let stays = |sequence: &&&Sequence| !self.preempted.contains(&sequence.id);
        self.adapters = self.running.iter().filter(stays).filter_map(|sequence| digest(sequence)).collect();
        self.adapters.extend(self.admitted.iter().filter_map(|sequence| digest(sequence)));
    }

    fn is_under_way(&self, sequence: &Sequence) -> bool {
        self.running.iter().chain(&self.admitted).any(|other| other.id == sequence.id)
    }

    /// Tokens that a sequence under way is given in this step so far.
    fn row(&self, sequence: &Sequence) -> u32 {
        self.schedule.rows.iter().find(|(id, _)| *id == sequence.id).map_or(0, |(_, tokens)| *tokens)
    }

    /// Pages that a sequence under way has before this step.
    fn pages_at_start(&self, sequence: &Sequence) -> u32 {
        let admitted = self.schedule.admit.iter().find(|(id, _)| *id == sequence.id);
        admitted.map_or(sequence.pages.len(), |(_, found)| found.len()) as u32
    }

    /// Tokens whose keys and values it has before this step.
    fn computed_at_start(&self, sequence: &Sequence) -> u32 {
        let admitted = self.schedule.admit.iter().find(|(id, _)| *id == sequence.id);
        admitted.map_or(sequence.computed, |(_, found)| found.len() as u32 * self.state.pages.page_tokens())
    }

    fn behind_at_start(&self, sequence: &Sequence) -> u32 {
        sequence.known() - self.computed_at_start(sequence)
    }

    /// New pages for so many tokens of a sequence under way.
    fn pages_for(&self, sequence: &Sequence, tokens: u32) -> u32 {
        let pages = (self.computed_at_start(sequence) + tokens).div_ceil(self.state.pages.page_tokens());
        pages.saturating_sub(self.pages_at_start(sequence))
    }

    /// New pages for more tokens than it is given so far.
    fn more_pages(&self, sequence: &Sequence, tokens: u32) -> u32 {
        let given = self.row(sequence);
        self.pages_for(sequence, given + tokens) - self.pages_for(sequence, given)
    }

    /// Tokens that a sequence's own pages and the available ones still take.
    fn room(&self, sequence: &Sequence) -> u32 {
        let given = self.row(sequence);
        let pages = self.pages_at_start(sequence) + self.pages_for(sequence, given) + self.available;
        let held = self.computed_at_start(sequence) + given;
        pages.saturating_mul(self.state.pages.page_tokens()).saturating_sub(held)
    }

    /// What those under way will still need after this step for the tokens they know; nobody starts on that, so that
    /// admission does not undo itself.
    fn reserved(&self) -> u32 {
        let running = self.running.iter().filter(|sequence| !self.preempted.contains(&sequence.id));
        let under_way = running.chain(&self.admitted);
        under_way.map(|sequence| self.more_pages(sequence, self.behind_at_start(sequence) - self.row(sequence))).sum()
    }
}

fn digest(sequence: &Sequence) -> Option<Digest> {
    match sequence.owner {
        KvOwner::Base => None,
        KvOwner::Adapter(digest) => Some(digest),
    }
}
