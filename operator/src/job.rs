//! Slow reading in the background: one job per object, restarted when what it rests on changes.
//!
//! A reconcile never waits for a job. It starts one, looks at what became of it, and is called again when it ends.

use std::any::Any;
use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use lorafleet_source::Progress;
use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};
use tokio::task::AbortHandle;

use crate::settings::Limits;

/// Sources of one namespace that are read at the same time.
const OF_NAMESPACE_MAX: usize = 2;

/// What became of the job of one object.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum JobState<T> {
    /// None was started for this fingerprint.
    Idle,
    /// It waits for its first turn. So many others of its namespace came before it.
    Waiting {
        before: usize,
    },
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
    /// Somebody must change the credentials, or what they allow.
    AccessDenied,
    CredentialsMissing,
    /// Somebody must change where the store is said to be.
    Misconfigured,
}

struct Entry<T> {
    namespace: String,
    fingerprint: String,
    attempts: u32,
    state: State<T>,
}

enum State<T> {
    Running(Task),
    Done(T),
    Failed(Fault, Instant),
}

struct Task {
    handle: AbortHandle,
    /// Its first turn has come.
    began: Arc<AtomicBool>,
    /// Jobs of its namespace that were not at their end when it was started.
    before: usize,
}

/// What is told of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It had to wait, and its first turn has come.
    Begun,
    Ended,
}

/// All jobs of one controller.
pub struct Jobs<T> {
    entries: Arc<Mutex<HashMap<String, Entry<T>>>>,
    turns: Arc<Turns>,
}

/// Where the work of one source waits: behind others of its namespace, and of them only behind those of the same store.
#[derive(Clone, Debug)]
pub struct Lane {
    pub namespace: String,
    /// Names the store and how it is reached.
    pub door: String,
}

/// A place in one queue.
type Acquired<'a> = Result<SemaphorePermit<'a>, AcquireError>;

/// How much is read at the same time: so many sources in all, two of each namespace, and one of each source that a
/// base names or allows. So a store that is away holds up nobody who waits for another one. A turn is short: who has not ended by then goes to
/// the end of these queues and takes his work up again at his next turn, so that nobody waits longer for a turn than the others'
/// turns last, whatever their sources do. Who has not got far enough in a turn is given up.
pub struct Turns {
    all: Semaphore,
    lanes: Mutex<HashMap<String, Arc<Semaphore>>>,
    length: Duration,
    /// How far work must get in a turn that it does not end.
    bytes_min: u64,
}

impl Turns {
    pub fn new(most: usize, limits: &Limits) -> Self {
        Self {
            all: Semaphore::new(most),
            lanes: Mutex::default(),
            length: limits.read_turn,
            bytes_min: limits.read_turn.as_millis() as u64 * limits.read_bytes_per_second_min / 1000,
        }
    }

    /// Does the work of one source in its turns. It is made when its first turn is there: thousands may wait, and what
    /// waits should be small.
    ///
    /// # Errors
    /// The work's own; Unavailable if it does not get on.
    async fn take<T, F>(&self, lane: &Lane, progress: &Progress, work: impl FnOnce() -> F) -> Result<T, Fault>
    where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let Lane { namespace, door } = lane;
        let (door, namespace) = {
            let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody waits for or holds those that are only here.
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
            let mut lane =
                |name: String, most| lanes.entry(name).or_insert_with(|| Arc::new(Semaphore::new(most))).clone();
            (lane(format!("{namespace}/{door}"), 1), lane(namespace.clone(), OF_NAMESPACE_MAX))
        };
        let mut turn = self.turn(&door, &namespace).await;
        let mut work = work().boxed();
        loop {
            let (before, _) = progress.bytes();
            if let Ok(ended) = tokio::time::timeout(self.length, &mut work).await {
                return ended;
            }
            let (now, _) = progress.bytes();
            let (got, least, seconds) = (now.saturating_sub(before), self.bytes_min, self.length.as_secs_f64());
            if got < least {
                let message = format!("the source gave {got} bytes in {seconds} s, the least is {least}");
                return Err(Fault { kind: FaultKind::Unavailable, message });
            }
            drop(turn);
            turn = self.turn(&door, &namespace).await;
        }
    }

    /// The next turn, in all three queues. The semaphores are never closed. Who waits for a store takes no place of the
    /// namespace's, and who waits there none of all.
    async fn turn<'a>(&'a self, door: &'a Semaphore, namespace: &'a Semaphore) -> [Acquired<'a>; 3] {
        [door.acquire().await, namespace.acquire().await, self.all.acquire().await]
    }
}

impl<T: Clone + Send + 'static> Jobs<T> {
    /// `turns` bounds what runs at the same time; several tables may share it.
    pub fn new(turns: Arc<Turns>) -> Self {
        Self { entries: Arc::default(), turns }
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
        match &entry.state {
            State::Running(Task { began, before, .. }) if *before > 0 && !began.load(Ordering::Relaxed) => {
                JobState::Waiting { before: *before }
            }
            State::Running(_) => JobState::Running,
            State::Done(outcome) => JobState::Done(outcome.clone()),
            State::Failed(fault, at) => JobState::Failed {
                fault: fault.clone(),
                attempts: entry.attempts,
                age_ms: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
            },
        }
    }

    /// Starts `work` for the object `uid`, and stops what ran for it under another fingerprint. `progress` says how many
    /// bytes it has read. `tell` is called when it has begun after it had to wait, and when its outcome can be seen.
    pub fn start<F>(
        &self,
        lane: Lane,
        uid: &str,
        fingerprint: &str,
        progress: Arc<Progress>,
        tell: impl Fn(Stage) + Send + Sync + 'static,
        work: impl FnOnce() -> F + Send + 'static,
    ) where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let mut entries = Self::lock(&self.entries);
        let before = entries.remove(uid);
        let attempts = match before {
            Some(Entry { fingerprint: same, attempts, state, .. }) => {
                let failed = matches!(state, State::Failed(..));
                if let State::Running(task) = state {
                    task.handle.abort();
                }
                // What went well, or was cut off, is no attempt that failed.
                if same == fingerprint && failed { attempts + 1 } else { 1 }
            }
            None => 1,
        };
        let namespace = lane.namespace.clone();
        let ahead = |entry: &&Entry<T>| entry.namespace == namespace && matches!(entry.state, State::Running(_));
        let before = entries.values().filter(ahead).count();
        let (shared, turns) = (self.entries.clone(), self.turns.clone());
        let (key, wanted) = (uid.to_owned(), fingerprint.to_owned());
        let (began, tell) = (Arc::new(AtomicBool::new(false)), Arc::new(tell));
        let (begins, told) = (began.clone(), tell.clone());
        let work = move || {
            begins.store(true, Ordering::Relaxed);
            if before > 0 {
                told(Stage::Begun);
            }
            work()
        };
        let task = tokio::spawn(async move {
            let outcome = AssertUnwindSafe(turns.take(&lane, &progress, work)).catch_unwind().await;
            let outcome =
                outcome.unwrap_or_else(|panic| Err(Fault { kind: FaultKind::Unavailable, message: broke(&*panic) }));
            if let Some(entry) = Self::lock(&shared).get_mut(&key).filter(|entry| entry.fingerprint == wanted) {
                entry.state = match outcome {
                    Ok(outcome) => State::Done(outcome),
                    Err(fault) => State::Failed(fault, Instant::now()),
                };
            }
            tell(Stage::Ended);
        });
        let state = State::Running(Task { handle: task.abort_handle(), began, before });
        entries.insert(uid.to_owned(), Entry { namespace, fingerprint: fingerprint.to_owned(), attempts, state });
    }

    /// Forgets the job of one object, and stops it if it runs.
    pub fn forget(&self, uid: &str) {
        self.retain(|other| other != uid);
    }

    /// Forgets the jobs of objects that are gone.
    pub fn retain(&self, alive: impl Fn(&str) -> bool) {
        Self::lock(&self.entries).retain(|uid, entry| {
            let keep = alive(uid);
            if let (false, State::Running(task)) = (keep, &entry.state) {
                task.handle.abort();
            }
            keep
        });
    }
}

/// A read that ends by a fault of this program ends as any other does, and is tried again.
fn broke(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    let words: String = words.unwrap_or("it does not say why").chars().take(200).collect();
    format!("reading it broke the operator's own work: {words}")
}

/// Milliseconds until a failed job may be started again; 0 is now.
pub fn retry_in_ms(fault: &Fault, attempts: u32, age_ms: u64, limits: &Limits) -> u64 {
    let wait = match fault.kind {
        FaultKind::Unavailable => {
            let doubled = limits.retry_first.saturating_mul(1 << attempts.saturating_sub(1).min(16));
            doubled.min(limits.retry_longest)
        }
        FaultKind::NotFound | FaultKind::AccessDenied | FaultKind::CredentialsMissing | FaultKind::Misconfigured => {
            limits.retry_absent
        }
    };
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).saturating_sub(age_ms)
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn unavailable() -> Fault {
        Fault { kind: FaultKind::Unavailable, message: "reset".to_owned() }
    }

    /// Short turns, in each of which a kilobyte must come.
    fn turns(most: usize) -> Arc<Turns> {
        let limits =
            Limits { read_turn: Duration::from_millis(200), read_bytes_per_second_min: 5_000, ..Limits::DEFAULT };
        Arc::new(Turns::new(most, &limits))
    }

    fn lane(place: &str) -> Lane {
        let (namespace, door) = place.split_once('/').unwrap_or((place, "store"));
        Lane { namespace: namespace.to_owned(), door: door.to_owned() }
    }

    /// Tells when a job has ended.
    fn at_the_end() -> (impl Fn(Stage) + Send + Sync + 'static, oneshot::Receiver<()>) {
        let (sender, ended) = oneshot::channel();
        let sender = Mutex::new(Some(sender));
        let tell = move |stage| {
            let sender = sender.lock().unwrap().take_if(|_| stage == Stage::Ended);
            sender.map(|sender| sender.send(()));
        };
        (tell, ended)
    }

    /// Starts a job that tells when it has ended.
    fn start<F>(jobs: &Jobs<u32>, namespace: &str, uid: &str, fingerprint: &str, work: F) -> oneshot::Receiver<()>
    where
        F: Future<Output = Result<u32, Fault>> + Send + 'static,
    {
        let (tell, ended) = at_the_end();
        // `namespace`, or `namespace/door`.
        jobs.start(lane(namespace), uid, fingerprint, Arc::default(), tell, || work);
        ended
    }

    #[tokio::test]
    async fn a_job_runs_once_per_fingerprint_and_counts_its_failures() {
        let jobs = Jobs::new(turns(2));
        assert_eq!(jobs.state("a", "1"), JobState::Idle);
        for attempt in 1..=2 {
            start(&jobs, "demo", "a", "1", async { Err(unavailable()) }).await.unwrap();
            assert!(matches!(jobs.state("a", "1"), JobState::Failed { attempts, .. } if attempts == attempt));
        }
        start(&jobs, "demo", "a", "1", async { Ok(6) }).await.unwrap();
        start(&jobs, "demo", "a", "1", async { Err(unavailable()) }).await.unwrap();
        assert!(matches!(jobs.state("a", "1"), JobState::Failed { attempts: 1, .. }), "one that ended well is none");
        start(&jobs, "demo", "a", "1", std::future::pending());
        assert_eq!(jobs.state("a", "1"), JobState::Running);
        start(&jobs, "demo", "a", "2", async { Ok(7) }).await.unwrap();
        assert_eq!((jobs.state("a", "1"), jobs.state("a", "2")), (JobState::Idle, JobState::Done(7)));
        jobs.forget("a");
        assert_eq!(jobs.state("a", "2"), JobState::Idle);
    }

    #[tokio::test]
    async fn one_that_breaks_has_ended() {
        let jobs = Jobs::new(turns(1));
        start(&jobs, "demo", "a", "1", async { panic!("no {}", "luck") }).await.unwrap();
        let JobState::Failed { fault, attempts: 1, .. } = jobs.state("a", "1") else { panic!("it has not failed") };
        assert!(fault.kind == FaultKind::Unavailable && fault.message.ends_with("no luck"), "{}", fault.message);
        // Its turn is free.
        start(&jobs, "demo", "b", "1", async { Ok(1) }).await.unwrap();
    }

    #[tokio::test]
    async fn sources_that_give_nothing_are_given_up() {
        let jobs = Jobs::new(turns(2));
        let stuck = ["a", "b"].map(|namespace| start(&jobs, namespace, namespace, "1", std::future::pending()));
        // Of the same namespace, and of another one, behind two that hold all turns.
        let behind =
            ["a", "c"].map(|namespace| start(&jobs, namespace, &format!("{namespace}2"), "1", async { Ok(1) }));
        for ended in stuck.into_iter().chain(behind) {
            ended.await.unwrap();
        }
        let JobState::Failed { fault, .. } = jobs.state("a", "1") else { panic!("it was not given up") };
        assert_eq!(fault.message, "the source gave 0 bytes in 0.2 s, the least is 1000");
        assert_eq!((jobs.state("a2", "1"), jobs.state("c2", "1")), (JobState::Done(1), JobState::Done(1)));
    }

    #[tokio::test]
    async fn a_store_that_is_away_holds_up_no_other() {
        // No turn ends by itself.
        let limits = Limits { read_turn: Duration::from_secs(3600), ..Limits::DEFAULT };
        let jobs = Jobs::new(Arc::new(Turns::new(4, &limits)));
        let mut away = ["1", "2", "3"].map(|uid| start(&jobs, "a/away", uid, "1", std::future::pending())).into_iter();
        for uid in ["x", "y"] {
            let ended = start(&jobs, "a/there", uid, "1", async { Ok(1) });
            // Else it would wait for ever.
            tokio::time::timeout(Duration::from_secs(300), ended).await.unwrap().unwrap();
        }
        assert!(matches!(jobs.state("1", "1"), JobState::Running));
        assert_eq!(jobs.state("3", "1"), JobState::Waiting { before: 2 });
        assert!(away.all(|mut ended| ended.try_recv().is_err()));
    }

    #[tokio::test]
    async fn a_store_is_read_by_one_of_a_namespace_at_a_time() {
        let (jobs, reading) = (Jobs::new(turns(4)), Arc::new(tokio::sync::Mutex::new(())));
        let ended = ["1", "2", "3"].map(|uid| {
            let reading = reading.clone();
            start(&jobs, "a/slow", uid, "1", async move {
                let place = reading.try_lock();
                tokio::task::yield_now().await;
                Ok(u32::from(place.is_ok()))
            })
        });
        for ended in ended {
            ended.await.unwrap();
        }
        assert_eq!(["1", "2", "3"].map(|uid| jobs.state(uid, "1")), [1, 1, 1].map(JobState::Done));
    }

    #[tokio::test]
    async fn who_waits_says_behind_how_many_and_when_it_begins() {
        let jobs = Jobs::new(turns(1));
        let (go, gone) = oneshot::channel::<()>();
        let first = start(&jobs, "a", "first", "1", async {
            let _ = gone.await;
            Ok(1)
        });
        start(&jobs, "b", "other", "1", async { Ok(1) });
        let (stages, mut told) = tokio::sync::mpsc::unbounded_channel();
        jobs.start(
            lane("a/other"),
            "second",
            "1",
            Arc::default(),
            move |stage| stages.send(stage).unwrap(),
            || async { Ok(2) },
        );
        assert_eq!(jobs.state("first", "1"), JobState::Running);
        assert_eq!(jobs.state("other", "1"), JobState::Running);
        assert_eq!(jobs.state("second", "1"), JobState::Waiting { before: 1 });
        go.send(()).unwrap();
        first.await.unwrap();
        assert_eq!(told.recv().await, Some(Stage::Begun));
        assert_eq!(told.recv().await, Some(Stage::Ended));
        assert_eq!(jobs.state("second", "1"), JobState::Done(2));
    }

    #[tokio::test]
    async fn long_reads_make_room_and_go_on() {
        for other in ["a", "a/other", "b"] {
            // However slowly it comes.
            let limits =
                Limits { read_turn: Duration::from_millis(20), read_bytes_per_second_min: 0, ..Limits::DEFAULT };
            let jobs = Jobs::new(Arc::new(Turns::new(1, &limits)));
            let (go, gone) = oneshot::channel::<()>();
            let long = start(&jobs, "a", "long", "1", async {
                let _ = gone.await;
                Ok(1)
            });
            let short = start(&jobs, other, "short", "1", async { Ok(2) });
            // Else it would wait for ever.
            tokio::time::timeout(Duration::from_secs(300), short).await.unwrap().unwrap();
            assert_eq!(jobs.state("long", "1"), JobState::Running, "{other}");
            go.send(()).unwrap();
            long.await.unwrap();
            assert_eq!(jobs.state("long", "1"), JobState::Done(1), "{other}");
        }
    }

    #[tokio::test]
    async fn what_waits_for_its_turn_is_small() {
        let turns = turns(1);
        let progress = Progress::default();
        let large = || async {
            let bytes = [0_u8; 100_000];
            tokio::task::yield_now().await;
            Ok(bytes.len())
        };
        let lane = lane("a");
        let waiting = turns.take(&lane, &progress, large);
        let size = size_of_val(&waiting);
        assert!(size < 2_000, "{size} bytes");
        assert_eq!(waiting.await, Ok(100_000));
    }

    #[test]
    fn waits_double_up_to_a_bound() {
        let waits: Vec<u64> =
            (1..=8).map(|attempts| retry_in_ms(&unavailable(), attempts, 0, &Limits::DEFAULT)).collect();
        assert_eq!(waits, [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]);
        assert_eq!(retry_in_ms(&unavailable(), 1, 5000, &Limits::DEFAULT), 0);
    }
}
