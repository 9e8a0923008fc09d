//! Everything that the step thread owns. It changes in three verbs: accept, begin, commit.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_backend::BackendError;
use lorafleet_backend::batch::{
    Batch, PageBudget, PageId, ResidentId, Sampled, SampledRow, Segment, SequenceId, Upload,
};

use crate::accounts::Accounts;
use crate::answers::Answers;
use crate::limits::Limits;
use crate::moves::{Move, Tiers};
use crate::pace::Pace;
use crate::pages::{KvOwner, Pages};
use crate::refusal::Refusal;
use crate::residency::Residency;
use crate::schedule::{Schedule, Yield};
use crate::sequence::{Event, Finish, NewSequence, Sequence, TokenEvent};
use crate::upload::UploadPace;

#[derive(Debug)]
pub struct State {
    pub limits: Limits,
    pub budget: PageBudget,
    /// In the order of the queue.
    pub waiting: Vec<Sequence>,
    pub running: Vec<Sequence>,
    pub pages: Pages,
    pub residency: Residency,
    pub accounts: Accounts,
    pub pace: Pace,
    /// What readers hear once it shows.
    pub answers: Answers,
    /// Sequences that have started since this process did.
    pub admissions: u64,
    upload_pace: UploadPace,
    /// For the next batch.
    drops: Vec<ResidentId>,
    uploads: Vec<Upload>,
    steps: u64,
    next_sequence: u64,
}

/// One token that a step drew, as the metrics want to know it.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub owner: KvOwner,
    pub tier_at_arrival: Option<lorafleet_crds::wire::Tier>,
    pub arrived: Instant,
    /// `None` for the first token.
    pub before: Option<Instant>,
    pub admitted: Option<Instant>,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub finish: Option<Finish>,
}

impl State {
    pub fn new(limits: Limits, budget: PageBudget) -> Self {
        Self {
            pages: Pages::new(budget.pages, budget.page_tokens),
            limits,
            budget,
            waiting: Vec::new(),
            running: Vec::new(),
            residency: Residency::default(),
            accounts: Accounts::default(),
            pace: Pace::default(),
            answers: Answers::default(),
            admissions: 0,
            upload_pace: UploadPace::default(),
            drops: Vec::new(),
            uploads: Vec::new(),
            steps: 0,
            next_sequence: 0,
        }
    }

    /// Puts a sequence into the queue, or tells its reader why not.
    pub fn accept(&mut self, new: NewSequence, now: Instant) {
        let mut tier = None;
        if let KvOwner::Adapter(digest) = new.owner {
            if let Some(refusal) = self.residency.refusal(&digest, now) {
                self.answers.add(&new.draft.events, Event::Failed(refusal));
                return;
            }
            tier = self.residency.tier(&digest);
        }
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let mut sequence = Sequence::new(id, new, tier);
        match self.unfit(&mut sequence) {
            Some(refusal) => sequence.answer(Event::Failed(refusal), &mut self.answers),
            None => self.enqueue(sequence),
        }
    }

    /// Why a sequence can never run here, if so. An answer of unasked length is shortened to what the pages hold beside
    /// its adapter and what is pinned.
    fn unfit(&self, sequence: &mut Sequence) -> Option<Refusal> {
        let (most, page_tokens) = (self.budget.pages, self.budget.page_tokens);
        let (adapter, pinned) = match sequence.owner {
            KvOwner::Base => (0, self.residency.pinned_pages()),
            KvOwner::Adapter(digest) => (self.residency.pages_of(&digest), self.residency.pinned_pages_beside(&digest)),
        };
        if sequence.params.as_many_as_fit {
            let held = most.saturating_sub(adapter).saturating_sub(pinned).saturating_mul(page_tokens);
            sequence.shorten(held.saturating_sub(sequence.prompt_tokens).max(1));
        }
        let kv = sequence.tokens_max().div_ceil(page_tokens);
        (kv + adapter > most).then(|| {
            let tokens = sequence.tokens_max();
            let message = format!(
                "{tokens} tokens take {kv} pages and the adapter {adapter}: more than the {most} pages of this server"
            );
            Refusal::new(400, "OutOfPages", message)
        })
    }

    fn enqueue(&mut self, sequence: Sequence) {
        self.accounts.open(sequence.owner);
        let key = (sequence.queued, sequence.id);
        let place = self.waiting.partition_point(|other| (other.queued, other.id) < key);
        self.waiting.insert(place, sequence);
    }

    /// Removes sequences whose readers are gone, and retired adapters that nobody uses any more. Says whether there
    /// were any.
    pub fn sweep(&mut self) -> bool {
        let before = (self.waiting.len(), self.running.len(), self.residency.len());
        self.waiting.retain(|sequence| !sequence.abandoned());
        let (gone, kept) = std::mem::take(&mut self.running).into_iter().partition(Sequence::abandoned);
        self.running = kept;
        self.let_go(gone);
        let waiting = &self.waiting;
        let waited_for = |digest: &Digest| waiting.iter().any(|other| other.owner == KvOwner::Adapter(*digest));
        for resident in self.residency.sweep(waited_for, &mut self.pages) {
            self.forget(Some(resident));
        }
        let changed = before != (self.waiting.len(), self.running.len(), self.residency.len());
        if changed {
            self.close_accounts();
        }
        changed
    }

    fn close_accounts(&mut self) {
        let open: BTreeSet<KvOwner> = self.waiting.iter().chain(&self.running).map(|sequence| sequence.owner).collect();
        self.accounts.keep(&open);
    }

    /// Ends every waiting sequence of an adapter with the same answer.
    pub fn fail_waiting(&mut self, digest: Digest, refusal: &Refusal) {
        self.waiting.retain(|sequence| {
            let concerned = sequence.owner == KvOwner::Adapter(digest);
            if concerned {
                sequence.answer(Event::Failed(refusal.clone()), &mut self.answers);
            }
            !concerned
        });
    }

    /// Shortens or ends waiting sequences that turn out not to fit now that their adapter's size is known.
    pub fn fail_unfit(&mut self, digest: Digest) {
        for mut sequence in std::mem::take(&mut self.waiting) {
            let concerned = sequence.owner == KvOwner::Adapter(digest);
            match concerned.then(|| self.unfit(&mut sequence)).flatten() {
                None => self.waiting.push(sequence),
                Some(refusal) => sequence.answer(Event::Failed(refusal), &mut self.answers),
            }
        }
    }

    /// Adapters that sequences wait for, the first to be served first.
    pub fn demand(&self) -> Vec<Digest> {
        let mut seen = std::collections::HashSet::new();
        let wanted = self.waiting.iter().filter_map(|sequence| match sequence.owner {
            KvOwner::Base => None,
            KvOwner::Adapter(digest) => Some(digest),
        });
        wanted.filter(|digest| seen.insert(*digest)).collect()
    }

    /// Somebody in the queue needs an adapter.
    pub fn waits_for_adapters(&self) -> bool {
        self.waiting.iter().any(|sequence| sequence.owner != KvOwner::Base)
    }

    /// Somebody waits for the end of the next step, and not for an adapter.
    fn somebody_computes(&self) -> bool {
        let could_start = |sequence: &Sequence| match sequence.owner {
            KvOwner::Base => true,
            KvOwner::Adapter(digest) => self.residency.resident(&digest).is_some(),
        };
        !self.running.is_empty() || self.waiting.iter().any(could_start)
    }

    pub fn tiers(&self, now: Instant) -> Tiers {
        Tiers {
            rows: self.residency.rows(now),
            demand: self.demand(),
            pages_available: self.pages.available(),
            pages_total: self.budget.pages,
            page_bytes: self.budget.page_bytes,
            host_bytes_total: self.limits.host_cache_bytes,
            fetches_max: self.limits.max_fetches,
            upload_bytes_whole: self.limits.upload_bytes_whole,
            upload_bytes_max: self.upload_pace.bytes(&self.limits, self.somebody_computes().then(|| self.pace.step())),
        }
    }

    /// Does the moves that are this thread's; returns the adapters to fetch.
    pub fn apply(&mut self, moves: &[Move], now: Instant) -> Vec<Digest> {
        let mut fetches = Vec::new();
        for step in moves {
            match step {
                Move::DropHost(digest, _) => self.residency.drop_host(digest),
                Move::Fetch(digest, _) => {
                    self.residency.fetch_started(digest);
                    fetches.push(*digest);
                }
                Move::DropDevice(digest, _) => {
                    let dropped = self.residency.drop_device(digest, &mut self.pages);
                    self.forget(dropped);
                }
                Move::Upload(digest, _) => self.residency.place(digest, &mut self.pages),
                Move::Write(digest, pages) => self.uploads.extend(self.residency.write(digest, *pages, now)),
                Move::RefuseHostFloor(digest) => {
                    let (half, all) = (self.limits.host_cache_bytes / 2, self.limits.host_cache_bytes);
                    let (own, others) = self.residency.pinned_host_bytes(digest);
                    let message = format!(
                        "pinned adapters may take {half} of {all} bytes of host memory; {digest} has {own} beside {others} of pinned ones"
                    );
                    self.residency.floor_refused(digest, Refusal::new(409, "OutOfHostMemory", message));
                }
                Move::RefuseDemand(digest) => {
                    let (own, others) = self.residency.pinned_host_bytes(digest);
                    let message = format!(
                        "the adapter takes {own} bytes of host memory, where pinned ones take {others} of {}",
                        self.limits.host_cache_bytes
                    );
                    self.fail_waiting(*digest, &Refusal::new(503, "OutOfHostMemory", message));
                }
                Move::RefuseFloor(digest) => {
                    let message = format!(
                        "pinned adapters may take {} of {} pages; {digest} needs {} beside {} pinned ones",
                        self.budget.pages / 2,
                        self.budget.pages,
                        self.residency.pages_of(digest),
                        self.residency.pinned_pages_beside(digest)
                    );
                    self.residency.floor_refused(digest, Refusal::new(409, "OutOfPages", message));
                }
            }
        }
        fetches
    }

    /// The backend forgets a resident; a piece that has not been sent yet is taken back, and if it is the first, the
    /// backend never hears of it.
    fn forget(&mut self, dropped: Option<ResidentId>) {
        let Some(resident) = dropped else { return };
        let unheard = self.uploads.iter().any(|upload| upload.resident == resident && upload.part.start == 0);
        self.uploads.retain(|upload| upload.resident != resident);
        if !unheard {
            self.drops.push(resident);
        }
    }

    /// Makes the schedule true and describes the step. Nothing is computed yet.
    pub fn begin(&mut self, schedule: Schedule, now: Instant) -> Batch {
        for (id, why) in &schedule.preempt {
            self.preempt(*id, *why, now);
        }
        for id in &schedule.hopeless {
            self.fail(*id);
        }
        for (id, found) in &schedule.admit {
            self.admit(*id, found, now);
        }
        let mut segments = Vec::with_capacity(schedule.rows.len());
        for (id, tokens) in &schedule.rows {
            segments.extend(self.segment(*id, *tokens, now));
        }
        segments.sort_by_key(|segment| segment.adapter);
        self.steps += 1;
        let drops = std::mem::take(&mut self.drops);
        Batch { step: self.steps, drops, uploads: std::mem::take(&mut self.uploads), segments }
    }

    fn preempt(&mut self, id: SequenceId, why: Yield, now: Instant) {
        let Some(index) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.running.remove(index);
        self.pages.release(&sequence.pages);
        sequence.pages.clear();
        sequence.computed = 0;
        sequence.published = 0;
        sequence.lease = None;
        sequence.admitted = None;
        sequence.drawn_since_admission = 0;
        if why == Yield::Aged {
            sequence.queued = now;
        }
        self.enqueue(sequence);
    }

    fn fail(&mut self, id: SequenceId) {
        let mut gone = Vec::new();
        for queue in [&mut self.running, &mut self.waiting] {
            if let Some(index) = queue.iter().position(|sequence| sequence.id == id) {
                gone.push(queue.remove(index));
            }
        }
        for sequence in &gone {
            let message = format!(
                "{} tokens and the adapter do not fit: {} of {} pages are held by pinned adapters",
                sequence.known(),
                self.residency.pinned_pages(),
                self.budget.pages
            );
            let refusal = Refusal::new(503, "OutOfPages", message);
            sequence.answer(Event::Failed(refusal), &mut self.answers);
        }
        self.let_go(gone);
    }

    fn admit(&mut self, id: SequenceId, found: &[PageId], now: Instant) {
        let Some(index) = self.waiting.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.waiting.remove(index);
        if let KvOwner::Adapter(digest) = sequence.owner {
            sequence.lease = self.residency.lease(&digest, now);
        }
        self.pages.retain(found);
        sequence.pages = found.to_vec();
        sequence.published = found.len() as u32;
        sequence.computed = sequence.published * self.pages.page_tokens();
        sequence.cached_tokens.get_or_insert(sequence.computed);
        sequence.admitted = Some(now);
        self.admissions += 1;
        self.running.push(sequence);
    }

    /// The next `tokens` tokens of a running sequence, on pages of its own.
    fn segment(&mut self, id: SequenceId, tokens: u32, now: Instant) -> Option<Segment> {
        let page_tokens = self.pages.page_tokens();
        let index = self.running.iter().position(|sequence| sequence.id == id)?;
        let sequence = self.running.get(index)?;
        let wanted = (sequence.computed + tokens).div_ceil(page_tokens) - sequence.pages.len() as u32;
        while self.pages.available() < wanted {
            let evicted = self.residency.evict_idle(&mut self.pages);
            if evicted.is_none() {
                // The schedule promised these pages; if it was wrong, the sequence waits for its next turn.
                tracing::error!(?id, wanted, "the schedule promised pages that are not there");
                self.preempt(id, Yield::OutOfPages, now);
                return None;
            }
            self.forget(evicted);
        }
        let taken = self.pages.take_kv(wanted)?;
        let sequence = self.running.get_mut(index)?;
        sequence.pages.extend(taken);
        let adapter = match sequence.owner {
            KvOwner::Base => None,
            KvOwner::Adapter(digest) => Some(self.residency.resident(&digest)?),
        };
        let (from, to) = (sequence.computed as usize, (sequence.computed + tokens) as usize);
        Some(Segment {
            sequence: id,
            adapter,
            tokens: sequence.tokens.get(from..to)?.to_vec(),
            position: sequence.computed,
            pages: sequence.pages.clone(),
            sample: (to == sequence.tokens.len()).then(|| sequence.sample_spec()),
        })
    }

    /// Bytes of the distinct adapters that a batch uses, each once. Before its `commit`.
    pub fn adapter_bytes(&self, batch: &Batch) -> u64 {
        let used: HashSet<SequenceId> =
            batch.segments.iter().filter(|segment| segment.adapter.is_some()).map(|segment| segment.sequence).collect();
        let running = self.running.iter().filter(|sequence| used.contains(&sequence.id));
        let adapters: HashSet<KvOwner> = running.map(|sequence| sequence.owner).collect();
        let bytes = |owner: &KvOwner| match owner {
            KvOwner::Base => 0,
            KvOwner::Adapter(digest) => self.residency.bytes_of(digest),
        };
        adapters.iter().map(bytes).sum()
    }

    /// Takes a step's results: tokens for their readers, full pages to the prefix cache, ended sequences away.
    pub fn commit(&mut self, batch: &Batch, sampled: Sampled, now: Instant) -> Vec<Drawn> {
        let pages: u64 = batch.uploads.iter().map(|upload| upload.part.len() as u64).sum();
        self.upload_pace.wrote(pages * self.budget.page_bytes, sampled.upload_time);
        let mut rows: HashMap<SequenceId, SampledRow> =
            sampled.rows.into_iter().map(|row| (row.sequence, row)).collect();
        let segments: HashMap<SequenceId, u32> =
            batch.segments.iter().map(|segment| (segment.sequence, segment.tokens.len() as u32)).collect();
        let mut drawn = Vec::with_capacity(rows.len());
        let mut ended = Vec::new();
        for mut sequence in std::mem::take(&mut self.running) {
            sequence.computed += segments.get(&sequence.id).copied().unwrap_or(0);
            self.publish(&mut sequence);
            if sampled.not_finite.contains(&sequence.id) {
                sequence.answer(Event::Failed(not_finite(&sequence)), &mut self.answers);
                ended.push(sequence);
                continue;
            }
            let row = rows.remove(&sequence.id);
            let last = row.and_then(|row| {
                let token = draw(&mut sequence, row, now, &mut self.answers);
                let first = (sequence.drawn() == 1).then_some(sequence.prompt_tokens);
                self.accounts.charge(sequence.owner, first);
                let finish = token.finish;
                drawn.push(token);
                finish
            });
            match last {
                Some(_) => ended.push(sequence),
                None => self.running.push(sequence),
            }
        }
        if !ended.is_empty() {
            self.close_accounts();
        }
        self.let_go(ended);
        drawn
    }

    fn publish(&mut self, sequence: &mut Sequence) {
        let page_tokens = self.pages.page_tokens() as usize;
        while (sequence.published as usize + 1) * page_tokens <= sequence.computed as usize {
            let index = sequence.published as usize;
            let tokens = sequence.tokens.get(index * page_tokens..(index + 1) * page_tokens);
            let before = index.checked_sub(1).and_then(|before| sequence.pages.get(before).copied());
            let (Some(tokens), Some(page)) = (tokens, sequence.pages.get(index).copied()) else { return };
            let page = self.pages.publish(sequence.owner, before, tokens, page);
            if let Some(slot) = sequence.pages.get_mut(index) {
                *slot = page;
            }
            sequence.published += 1;
        }
    }

    /// A step that the backend did not do: its sequences end with an error, and what it uploads is not there.
    pub fn abort(&mut self, batch: &Batch, error: &BackendError) {
        let (gone, kept) = std::mem::take(&mut self.running)
            .into_iter()
            .partition::<Vec<_>, _>(|sequence| batch.segments.iter().any(|segment| segment.sequence == sequence.id));
        self.running = kept;
        for sequence in &gone {
            let refusal = Refusal::new(500, "BackendFailed", error.to_string());
            sequence.answer(Event::Failed(refusal), &mut self.answers);
        }
        self.close_accounts();
        self.let_go(gone);
        // What it did not even begin is still to do: the drops, and those of adapters whose first pieces it has.
        let untouched = matches!(error, BackendError::BadBatch { .. });
        if untouched {
            self.drops.extend(&batch.drops);
        }
        for upload in &batch.uploads {
            self.residency.forget_resident(upload.resident, &mut self.pages);
            if untouched && upload.part.start > 0 {
                self.drops.push(upload.resident);
            }
        }
    }

    fn let_go(&mut self, gone: Vec<Sequence>) {
        for sequence in gone {
            self.pages.release(&sequence.pages);
        }
    }

    /// The relations that hold between steps, or what is broken.
    pub fn check(&self) -> Result<(), String> {
        self.pages.check()?;
        self.residency.check()?;
        let mut leases = BTreeMap::new();
        let mut readers: BTreeMap<PageId, u32> = BTreeMap::new();
        for sequence in &self.running {
            if let KvOwner::Adapter(digest) = sequence.owner {
                *leases.entry(digest).or_insert(0) += 1;
                if self.residency.resident(&digest).is_none() {
                    return Err(format!("{:?} runs on {digest}, which is not on the device", sequence.id));
                }
            }
            for page in &sequence.pages {
                *readers.entry(*page).or_default() += 1;
            }
        }
        if leases != self.residency.leases() {
            return Err(format!("sequences use {leases:?}, leases are {:?}", self.residency.leases()));
        }
        self.pages.check_readers(&readers)?;
        let (held, counted) = (self.residency.device_pages(), self.pages.counts().adapter);
        if held != counted {
            return Err(format!("adapters hold {held} pages, counted as {counted}"));
        }
        let held_while_waiting = self.waiting.iter().find(|sequence| !sequence.pages.is_empty());
        held_while_waiting.map_or(Ok(()), |sequence| Err(format!("{:?} waits and holds pages", sequence.id)))
    }
}

fn not_finite(sequence: &Sequence) -> Refusal {
    let whose = match sequence.owner {
        KvOwner::Base => "the base".to_owned(),
        KvOwner::Adapter(digest) => format!("adapter {digest}"),
    };
    let message = format!(
        "after {} tokens the scores of the next one are not all finite numbers: the values of {whose} overflow",
        sequence.computed
    );
    Refusal::new(500, "NotFinite", message)
}

fn draw(sequence: &mut Sequence, row: SampledRow, now: Instant, answers: &mut Answers) -> Drawn {
    let finish = sequence.push(row.token);
    let cached_tokens = sequence.cached_tokens.unwrap_or(0);
    let SampledRow { token, logprob, alternatives, .. } = row;
    sequence.answer(Event::Token(TokenEvent { token, logprob, alternatives, cached_tokens, finish }), answers);
    Drawn {
        owner: sequence.owner,
        tier_at_arrival: sequence.tier_at_arrival,
        arrived: sequence.arrived,
        before: sequence.last_token.replace(now),
        admitted: sequence.admitted,
        prompt_tokens: sequence.prompt_tokens,
        cached_tokens,
        finish,
    }
}
