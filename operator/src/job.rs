//! Slow reading in the background: one job per object, restarted when what it rests on changes.
//!
//! A reconcile never waits for a job. It starts one, looks at what became of it, and is called again when it ends.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// What became of the job of one object.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum JobState<T> {
    /// None was started for this fingerprint.
    Idle,
    Running,
    Done(T),
    /// It may go better the next time. `attempts` counts those for this fingerprint.
    Failed {
        fault: Fault,
        attempts: u32,
        age_ms: u64,
    },
}

/// Why a source could not be read, where asking again may help.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Fault {
    pub kind: FaultKind,
    pub message: String,
}

/// What kind of fault, and so how soon to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FaultKind {
    /// The network or the store; soon.
    Unavailable,
    /// No such object; somebody must put it there.
    NotFound,
    /// Somebody must change the credentials.
    AccessDenied,
    CredentialsMissing,
}

struct Entry<T> {
    fingerprint: String,
    attempts: u32,
    progress: Progress<T>,
}

enum Progress<T> {
    Running(AbortHandle),
    Done(T),
    Failed(Fault, Instant),
}

/// All jobs of one controller.
pub struct Jobs<T> {
    entries: Arc<Mutex<HashMap<String, Entry<T>>>>,
    permits: Arc<Permits>,
}

/// How much is read at the same time: so many in all, and one of each namespace, so that a slow source holds up its own
/// namespace alone.
pub struct Permits {
    all: Arc<Semaphore>,
    of_namespace: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Permits {
    pub fn new(most: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(most)), of_namespace: Mutex::default() }
    }

    /// Waits for a turn; it ends when the permits are dropped. `None` never comes: the semaphores are never closed.
    async fn turn(&self, namespace: &str) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let own = {
            let mut all = self.of_namespace.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody waits for or holds those that are only here.
            all.retain(|_, own| Arc::strong_count(own) > 1);
            all.entry(namespace.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
        };
        let own = own.acquire_owned().await.ok()?;
        let one = self.all.clone().acquire_owned().await.ok()?;
        Some((own, one))
    }
}

impl<T: Clone + Send + 'static> Jobs<T> {
    /// `permits` bounds what runs at the same time; several tables may share it.
    pub fn new(permits: Arc<Permits>) -> Self {
        Self { entries: Arc::default(), permits }
    }

    fn lock(entries: &Mutex<HashMap<String, Entry<T>>>) -> MutexGuard<'_, HashMap<String, Entry<T>>> {
        entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What became of the job of the object `uid`, if it was started for this fingerprint.
    pub fn state(&self, uid: &str, fingerprint: &str) -> JobState<T> {
        let entries = Self::lock(&self.entries);
        let Some(entry) = entries.get(uid).filter(|entry| entry.fingerprint == fingerprint) else {
            return JobState::Idle;
        };
        match &entry.progress {
            Progress::Running(_) => JobState::Running,
            Progress::Done(outcome) => JobState::Done(outcome.clone()),
            Progress::Failed(fault, at) => JobState::Failed {
                fault: fault.clone(),
                attempts: entry.attempts,
                age_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
            },
        }
    }

    /// Starts `work` for the object `uid`, and stops what ran for it under another fingerprint. `ended` is called after
    /// the outcome can be seen.
    pub fn start<F>(
        &self,
        namespace: &str,
        uid: &str,
        fingerprint: &str,
        work: F,
        ended: impl FnOnce() + Send + 'static,
    ) where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let mut entries = Self::lock(&self.entries);
        let before = entries.remove(uid);
        let attempts = match before {
            Some(Entry { fingerprint: same, attempts, progress }) => {
                if let Progress::Running(task) = progress {
                    task.abort();
                }
                if same == fingerprint { attempts + 1 } else { 1 }
            }
            None => 1,
        };
        let (shared, permits) = (self.entries.clone(), self.permits.clone());
        let (key, wanted, namespace) = (uid.to_owned(), fingerprint.to_owned(), namespace.to_owned());
        let task = tokio::spawn(async move {
            let Some(_turn) = permits.turn(&namespace).await else { return };
            let outcome = work.await;
            if let Some(entry) = Self::lock(&shared).get_mut(&key).filter(|entry| entry.fingerprint == wanted) {
                entry.progress = match outcome {
                    Ok(outcome) => Progress::Done(outcome),
                    Err(fault) => Progress::Failed(fault, Instant::now()),
                };
            }
            ended();
        });
        let progress = Progress::Running(task.abort_handle());
        entries.insert(uid.to_owned(), Entry { fingerprint: fingerprint.to_owned(), attempts, progress });
    }

    /// Forgets the jobs of objects that are gone.
    pub fn retain(&self, alive: impl Fn(&str) -> bool) {
        Self::lock(&self.entries).retain(|uid, entry| {
            let keep = alive(uid);
            if let (false, Progress::Running(task)) = (keep, &entry.progress) {
                task.abort();
            }
            keep
        });
    }
}

/// Milliseconds until a failed job may be started again; 0 is now.
pub fn retry_in_ms(fault: &Fault, attempts: u32, age_ms: u64, limits: &crate::settings::Limits) -> u64 {
    let wait = match fault.kind {
        FaultKind::Unavailable => {
            let doubled = limits.retry_first.saturating_mul(1 << attempts.saturating_sub(1).min(16));
            doubled.min(limits.retry_longest)
        }
        FaultKind::NotFound | FaultKind::AccessDenied | FaultKind::CredentialsMissing => limits.retry_absent,
    };
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).saturating_sub(age_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Limits;

    fn unavailable() -> Fault {
        Fault { kind: FaultKind::Unavailable, message: "reset".to_owned() }
    }

    #[tokio::test]
    async fn a_job_runs_once_per_fingerprint_and_counts_its_failures() {
        let jobs: Jobs<u32> = Jobs::new(Arc::new(Permits::new(2)));
        assert_eq!(jobs.state("a", "1"), JobState::Idle);
        for attempt in 1..=2 {
            let (sender, ended) = tokio::sync::oneshot::channel();
            jobs.start("demo", "a", "1", async { Err(unavailable()) }, || sender.send(()).unwrap());
            ended.await.unwrap();
            assert!(matches!(jobs.state("a", "1"), JobState::Failed { attempts, .. } if attempts == attempt));
        }
        jobs.start("demo", "a", "1", std::future::pending(), || ());
        assert_eq!(jobs.state("a", "1"), JobState::Running);
        let (sender, ended) = tokio::sync::oneshot::channel();
        jobs.start("demo", "a", "2", async { Ok(7) }, || sender.send(()).unwrap());
        ended.await.unwrap();
        assert_eq!((jobs.state("a", "1"), jobs.state("a", "2")), (JobState::Idle, JobState::Done(7)));
        jobs.retain(|_| false);
        assert_eq!(jobs.state("a", "2"), JobState::Idle);
    }

    #[test]
    fn waits_double_up_to_a_bound() {
        let waits: Vec<u64> =
            (1..=8).map(|attempts| retry_in_ms(&unavailable(), attempts, 0, &Limits::DEFAULT)).collect();
        assert_eq!(waits, [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]);
        assert_eq!(retry_in_ms(&unavailable(), 1, 5000, &Limits::DEFAULT), 0);
    }
}
