//! Tasks that the gateway cannot do without.

use tokio_util::sync::CancellationToken;

/// Without one of them it would go on, ready, with what it knew when that one ended: also with keys that were withdrawn. So
/// the process ends when the first of them does, and is started anew.
#[derive(Clone, Debug, Default)]
pub struct Vital(CancellationToken);

impl Vital {
    /// Starts one.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let ended = self.0.clone().drop_guard();
        tokio::spawn(async move {
            // Dropped too where the task panics.
            let _ended = ended;
            task.await;
            tracing::error!(name, "a task has ended");
        });
    }

    /// Returns when one has ended.
    pub async fn ended(&self) {
        self.0.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_has_ended() {
        let vital = Vital::default();
        vital.spawn("one that goes on", std::future::pending());
        vital.spawn("one that does not", async { panic!("as it shall") });
        tokio::time::timeout(Duration::from_secs(60), vital.ended()).await.unwrap();
    }
}
