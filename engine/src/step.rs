//! The engine's heart and the place to start reading: one thread, one loop, one owner of the state.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::Batch;
use lorafleet_backend::{Backend, BackendError};
use tokio::sync::watch;

use crate::metrics::Meter;
use crate::moves;
use crate::refusal::Refusal;
use crate::residency::{Enrolment, Loaded, Newcomer};
use crate::schedule;
use crate::sequence::NewSequence;
use crate::snapshot::Snapshot;
use crate::state::State;

/// What the outside asks of the step thread.
#[derive(Debug)]
pub enum Command {
    /// The sequences of one request.
    Submit(Vec<NewSequence>),
    /// Adapters to know from now on, perhaps with their bytes at hand; and those that nobody may name any more.
    Change { enrol: Vec<Newcomer>, retire: Vec<Digest> },
    /// The end of a fetch, with what it was started for and how long it took.
    Fetched(Enrolment, Result<Loaded, Refusal>, Duration),
    /// End the thread; what still runs is cut off.
    Stop,
}

/// Starts fetches on threads of its own; each ends in one `Command::Fetched`.
pub trait Fetch: Send {
    fn start(&mut self, wanted: &Enrolment);
}

pub struct Stepper {
    pub state: State,
    backend: Box<dyn Backend>,
    commands: Receiver<Command>,
    fetch: Box<dyn Fetch>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    meter: Arc<Meter>,
    published: Instant,
    /// What the last look at the tiers saw of their changes, and when it was.
    looked: Option<(u64, Instant)>,
    /// Something that a snapshot shows has changed since `published`.
    changed: bool,
    /// The backend will not do any step any more.
    lost: bool,
    /// Something has happened since the books were checked last.
    unchecked: bool,
    checked: Option<Instant>,
}

/// Sleep while sequences wait for a fetch: their readers may hang up meanwhile.
const NAP_WAITING: Duration = Duration::from_millis(10);
/// Sleep while there is nothing to do; a failed floor's pause may end meanwhile.
const NAP_IDLE: Duration = Duration::from_millis(250);
/// Oldest look at the tiers while nothing about them has changed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// A snapshot of a busy engine is at most this old.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_millis(100);

impl Stepper {
    pub fn new(
        state: State,
        backend: Box<dyn Backend>,
        commands: Receiver<Command>,
        fetch: Box<dyn Fetch>,
        snapshot: watch::Sender<Arc<Snapshot>>,
        meter: Arc<Meter>,
    ) -> Self {
        let published = Instant::now();
        Self {
            state,
            backend,
            commands,
            fetch,
            snapshot,
            meter,
            published,
            looked: None,
            changed: true,
            lost: false,
            unchecked: true,
            checked: None,
        }
    }

    /// Until it is told to stop, or the backend is lost: an engine that can only refuse must not look healthy.
    pub fn run(mut self) {
        let mut nap = Duration::ZERO;
        while !self.lost && self.drain(nap) {
            self.meter.turned();
            let worked = self.step(Instant::now());
            nap = match (worked, self.state.waiting.is_empty()) {
                (true, _) => Duration::ZERO,
                (false, false) => NAP_WAITING,
                (false, true) => NAP_IDLE,
            };
        }
    }

    /// Moves, schedule, submit, wait, commit, publish, emit. Says whether there was anything to compute.
    pub fn step(&mut self, now: Instant) -> bool {
        self.changed |= self.state.sweep();
        self.do_moves(now);
        let schedule = schedule::decide(&self.state, now);
        self.changed |= !(schedule.admit.is_empty() && schedule.preempt.is_empty() && schedule.hopeless.is_empty());
        self.meter.scheduled(&schedule);
        let batch = self.state.begin(schedule, now);
        let worked = !batch.is_empty();
        if worked {
            if !self.state.answers.is_empty() {
                // Who is refused does not wait for what others compute.
                self.show_and_tell(worked);
            }
            self.compute(&batch, now);
        }
        self.unchecked |= worked || self.changed;
        if !worked && self.unchecked {
            self.check(now);
        }
        self.show_and_tell(worked);
        worked
    }

    /// In this order: what somebody has been told can be seen.
    fn show_and_tell(&mut self, worked: bool) {
        self.publish(worked);
        self.state.answers.tell();
    }

    /// Whether the books are right. Now and then, so that it delays nobody who comes to an idle engine.
    fn check(&mut self, now: Instant) {
        if self.checked.is_some_and(|checked| now.saturating_duration_since(checked) < NAP_IDLE) {
            return;
        }
        (self.checked, self.unchecked) = (Some(now), false);
        if let Err(broken) = self.state.check() {
            tracing::error!(broken, "the state contradicts itself");
            self.meter.contradicted();
        }
    }

    /// Takes commands; waits for the first one up to `nap`. False once it is time to stop.
    fn drain(&mut self, nap: Duration) -> bool {
        let mut next = match self.commands.recv_timeout(nap) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return false,
        };
        while let Some(command) = next {
            if !self.take(command, Instant::now()) {
                return false;
            }
            next = self.commands.try_recv().ok();
        }
        true
    }

    /// Lets a command change the state; false if it is the end.
    pub fn take(&mut self, command: Command, now: Instant) -> bool {
        self.changed = true;
        match command {
            Command::Submit(sequences) => sequences.into_iter().for_each(|sequence| self.state.accept(sequence, now)),
            Command::Change { enrol, retire } => {
                for Newcomer { enrolment, on_disk, loaded } in enrol {
                    let digest = enrolment.digest;
                    self.state.residency.enrol(enrolment, on_disk, now);
                    if let Some(loaded) = loaded {
                        self.arrive(digest, Ok(loaded), now);
                    }
                }
                retire.into_iter().for_each(|digest| self.state.residency.retire(digest));
            }
            Command::Fetched(wanted, result, took) => match (self.state.residency.fetch_ended(&wanted), result) {
                (false, Err(refusal)) => {
                    let Enrolment { digest, sources, .. } = &wanted;
                    tracing::info!(%digest, source = sources.join(", "), %refusal, "a fetch that is no longer wanted");
                }
                (_, result) => {
                    tell(&wanted, &result, took);
                    self.arrive(wanted.digest, result, now);
                }
            },
            Command::Stop => return false,
        }
        true
    }

    fn arrive(&mut self, digest: Digest, result: Result<Loaded, Refusal>, now: Instant) {
        match result {
            Ok(loaded) => {
                self.state.residency.arrived(digest, loaded, now);
                self.state.fail_unfit(digest);
            }
            Err(refusal) => {
                self.state.fail_waiting(digest, &refusal);
                self.state.residency.failed(digest, refusal, now);
            }
        }
    }

    /// With nobody waiting for an adapter and nothing changed since, another look would find the same: thousands of them
    /// must not cost each step. Now and then it is taken all the same, for pauses that end and pages that come free.
    fn do_moves(&mut self, now: Instant) {
        let changes = self.state.residency.changes();
        let fresh = |(seen, at): (u64, Instant)| seen == changes && now.saturating_duration_since(at) < LOOK_AGAIN;
        if !self.state.waits_for_adapters() && self.looked.is_some_and(fresh) {
            return;
        }
        // As it was before the moves: what they change is looked at in the next step.
        self.looked = Some((changes, now));
        let moves = moves::decide(&self.state.tiers(now));
        self.changed |= !moves.is_empty();
        self.meter.moved(&moves);
        for digest in self.state.apply(&moves, now) {
            if let Some(wanted) = self.state.residency.enrolment(&digest) {
                self.fetch.start(wanted);
            }
        }
    }

    fn compute(&mut self, batch: &Batch, now: Instant) {
        let begun = Instant::now();
        let result = self.backend.submit(batch).and_then(|ticket| self.backend.wait(ticket));
        let done = Instant::now().max(now);
        match result {
            Ok(sampled) => {
                let rows: usize = batch.segments.iter().map(|segment| segment.tokens.len()).sum();
                self.state.pace.stepped(rows as u32, begun.elapsed().saturating_sub(sampled.upload_time));
                let adapter_bytes = self.state.adapter_bytes(batch);
                self.changed |= !sampled.not_finite.is_empty();
                let drawn = self.state.commit(batch, sampled, done);
                self.changed |= drawn.iter().any(|token| token.finish.is_some());
                self.meter.stepped(batch, adapter_bytes, &drawn, now, done);
            }
            Err(error) => {
                tracing::error!(step = batch.step, %error, "the backend did not do the step");
                self.changed = true;
                self.lost = matches!(error, BackendError::Lost(_));
                self.meter.step_failed();
                self.state.abort(batch, &error);
            }
        }
    }

    fn publish(&mut self, worked: bool) {
        let stale = worked && self.published.elapsed() >= SNAPSHOT_AGE_MAX;
        if self.changed || stale {
            self.snapshot.send_replace(Arc::new(Snapshot::of(&self.state)));
            self.published = Instant::now();
            self.changed = false;
        }
    }
}

/// A line of the log for each fetch's end.
fn tell(wanted: &Enrolment, result: &Result<Loaded, Refusal>, took: Duration) {
    let Enrolment { name, digest, sources, .. } = wanted;
    let source = sources.join(", ");
    let milliseconds = took.as_millis() as u64;
    match result {
        Ok(Loaded { bytes, rank, pages, .. }) => {
            tracing::info!(name, %digest, bytes, rank, pages, source, milliseconds, "adapter loaded");
        }
        Err(Refusal { code, message, .. }) => {
            tracing::warn!(name, %digest, code = &**code, message, source, milliseconds, "adapter not loaded");
        }
    }
}
