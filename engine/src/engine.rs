//! The step thread as the other threads see it: a bounded queue in, a snapshot out.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use lorafleet_backend::batch::PageBudget;
use tokio::sync::watch;

use crate::limits::Limits;
use crate::queue::Queue;
use crate::refusal::Refusal;
use crate::snapshot::Snapshot;
use crate::step::Command;

/// Commands that may stand in the channel; the step thread takes all of them in each step.
pub const COMMANDS_MAX: usize = 4096;

#[derive(Clone, Debug)]
pub struct Engine {
    commands: SyncSender<Command>,
    pub queue: Queue,
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
        let queue = Queue::new(limits.max_queued);
        Self { commands, queue, snapshot, limits, budget }
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
