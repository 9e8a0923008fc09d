//! The step thread as the other threads see it: a bounded queue in, a snapshot out.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use lorafleet_backend::batch::PageBudget;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::limits::Limits;
use crate::refusal::Refusal;
use crate::snapshot::Snapshot;
use crate::step::Command;

/// Commands that may stand in the channel; the step thread takes all of them in each step.
pub const COMMANDS_MAX: usize = 4096;

#[derive(Clone, Debug)]
pub struct Engine {
    commands: SyncSender<Command>,
    /// One for each sequence that may wait or run.
    places: Arc<Semaphore>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    pub limits: Arc<Limits>,
    pub budget: PageBudget,
}

impl Engine {
    pub fn new(
        commands: SyncSender<Command>,
        snapshot: watch::Receiver<Arc<Snapshot>>,
        limits: Arc<Limits>,
        budget: PageBudget,
    ) -> Self {
        let places = Arc::new(Semaphore::new(limits.max_queued as usize));
        Self { commands, places, snapshot, limits, budget }
    }

    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Waits until a snapshot shows what is looked for; false if none did in time.
    pub async fn shows(&self, time_max: Duration, looked_for: impl Fn(&Snapshot) -> bool) -> bool {
        let mut snapshot = self.snapshot.clone();
        let shown = tokio::time::timeout(time_max, snapshot.wait_for(|snapshot| looked_for(snapshot))).await;
        matches!(shown, Ok(Ok(_)))
    }

    /// A place in the queue for one sequence; it is free again when the sequence has ended.
    ///
    /// # Errors
    /// 429 if the queue is full.
    pub fn place(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        self.places.clone().try_acquire_owned().map_err(|_| {
            let most = self.limits.max_queued;
            Refusal::busy(format!("{most} sequences wait or run, the limit is {most}"))
        })
    }

    /// Sequences that wait or run, from the moment that they were given a place.
    pub fn open_sequences(&self) -> usize {
        (self.limits.max_queued as usize).saturating_sub(self.places.available_permits())
    }

    /// # Errors
    /// 429 if the step thread is behind with its commands, 503 if it has ended.
    pub fn send(&self, command: Command) -> Result<(), Refusal> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => {
                Refusal::busy(format!("{COMMANDS_MAX} commands wait, the limit is {COMMANDS_MAX}"))
            }
            TrySendError::Disconnected(_) => Refusal::new(503, "EngineStopped", "the engine has stopped"),
        })
    }
}
