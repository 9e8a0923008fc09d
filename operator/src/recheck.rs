//! Looking at sources again: now and then each one that was judged is listed, so that new content is noticed without
//! anybody's doing. A listing is one request; only when it shows other files is the source read anew.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_crds::SourceFile;
use serde::Deserialize;

use crate::hash::{share_of, short_hash};
use crate::job::{Fault, JobState, Jobs, Lane, Stage, Turns};

/// What a source showed, beside what was judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Look {
    Same,
    /// Other files, for the first time. Files come one after the other: they are looked at once more before they are read.
    Changing,
    /// Other files, or a refusal to show any: whoever reads it will say what.
    Other,
}

/// How far the look at one source is: what a plan needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Recheck {
    pub state: JobState<Look>,
    /// Milliseconds until the next look is due; never, if absent.
    pub due_in_ms: Option<u64>,
}

impl Default for Recheck {
    fn default() -> Self {
        Self { state: JobState::Idle, due_in_ms: None }
    }
}

/// What to do about a source that was judged before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    ReadAgain,
    Look,
    /// Nothing for so many milliseconds, or until something happens.
    Rest(Option<u64>),
}

impl Recheck {
    pub fn next(&self) -> Next {
        match (&self.state, self.due_in_ms) {
            (JobState::Done(Look::Other), _) => Next::ReadAgain,
            (JobState::Running | JobState::Waiting { .. }, _) => Next::Rest(None),
            (_, Some(0)) => Next::Look,
            (_, due_in_ms) => Next::Rest(due_in_ms),
        }
    }
}

/// Whether a read is under way, or has shown other files than the status tells of, which may be that of a moment ago: what is
/// remembered there is older. `shown` names the files that an outcome is about, as `told` does.
pub fn knows_better<T>(job: &JobState<T>, told: Option<&String>, shown: impl FnOnce(&T) -> String) -> bool {
    match job {
        JobState::Running | JobState::Waiting { .. } => true,
        JobState::Done(outcome) => told != Some(&shown(outcome)),
        JobState::Idle | JobState::Failed { .. } => false,
    }
}

/// Names the files of a source: their names, sizes and versions.
pub fn listing(files: &[SourceFile]) -> String {
    short_hash(&files)
}

/// The looks of one controller.
pub struct Rechecks {
    jobs: Jobs<Look>,
    every: Duration,
    /// By uid of the object.
    seen: Arc<Mutex<HashMap<String, Seen>>>,
}

#[derive(Clone, Debug)]
struct Seen {
    due: Instant,
    /// The listing that was other than the judged one at the last look.
    other: Option<String>,
}

/// How long other files must have stayed as they are before they are read.
const SETTLED_AFTER: Duration = Duration::from_secs(60);

impl Rechecks {
    /// `turns` are the looks' own: thousands of them must not stand before the read of a new adapter.
    pub fn new(every: Duration, turns: Arc<Turns>) -> Self {
        Self { jobs: Jobs::new(turns), every, seen: Arc::default() }
    }

    /// How far the look at this object's source is, compared with the listing that was judged. The first looks of a new
    /// leader are spread over the whole period, and the later ones stay so.
    pub fn of(&self, uid: &str, judged: Option<&String>) -> Recheck {
        let now = Instant::now();
        let first = || Seen { due: now + self.every.mul_f64(share_of(uid)), other: None };
        let left = lock(&self.seen).entry(uid.to_owned()).or_insert_with(first).due.saturating_duration_since(now);
        Recheck {
            state: self.jobs.state(uid, judged.map_or("", String::as_str)),
            // Rounded up: a wait that ends a moment early would find nothing due.
            due_in_ms: Some(u64::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)),
        }
    }

    /// Starts a look. `list` gives the files as they are, or none where they are refused; `ended` is called when it is
    /// known what they are.
    pub fn look<F>(
        &self,
        lane: Lane,
        uid: &str,
        judged: Option<String>,
        ended: impl Fn() + Send + Sync + 'static,
        list: impl FnOnce() -> F + Send + 'static,
    ) where
        F: Future<Output = Result<Option<Vec<SourceFile>>, Fault>> + Send + 'static,
    {
        let other = lock(&self.seen).get(uid).and_then(|seen| seen.other.clone());
        self.note(uid, self.every, other.clone());
        let key = judged.clone().unwrap_or_default();
        let (seen, of, soon) = (self.seen.clone(), uid.to_owned(), self.every.min(SETTLED_AFTER));
        // That a look has begun is no news.
        let tell = move |stage| {
            if stage == Stage::Ended {
                ended()
            }
        };
        self.jobs.start(lane, uid, &key, Arc::default(), tell, move || async move {
            let Some(files) = list().await? else { return Ok(Look::Other) };
            let now = Some(listing(&files));
            let (look, other) = match now == judged {
                true => (Look::Same, None),
                false if now == other => (Look::Other, now),
                false => (Look::Changing, now),
            };
            if let Some(seen) = lock(&seen).get_mut(&of) {
                seen.other = other;
                if look == Look::Changing {
                    seen.due = Instant::now() + soon;
                }
            }
            Ok(look)
        });
    }

    /// The source is read as a whole: what was seen of it before counts no more.
    pub fn forget(&self, uid: &str) {
        self.jobs.forget(uid);
        self.note(uid, self.every, None);
    }

    fn note(&self, uid: &str, due_in: Duration, other: Option<String>) {
        lock(&self.seen).insert(uid.to_owned(), Seen { due: Instant::now() + due_in, other });
    }

    /// Forgets objects that are gone.
    pub fn retain(&self, alive: impl Fn(&str) -> bool) {
        self.jobs.retain(&alive);
        lock(&self.seen).retain(|uid, _| alive(uid));
    }
}

fn lock(seen: &Mutex<HashMap<String, Seen>>) -> MutexGuard<'_, HashMap<String, Seen>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::FaultKind;
    use crate::settings::Limits;

    fn files(version: &str) -> Vec<SourceFile> {
        vec![SourceFile { name: "a".to_owned(), size_bytes: 1, version: Some(version.to_owned()) }]
    }

    #[tokio::test]
    async fn other_files_count_when_they_have_stayed() {
        let turns = Arc::new(Turns::new(2, &Limits::DEFAULT));
        let rechecks = Rechecks::new(Duration::from_millis(20), turns);
        let judged = Some(listing(&files("1")));
        let away = || Fault { kind: FaultKind::Unavailable, message: "reset".to_owned() };
        let looks = [
            (Ok(Some(files("1"))), Some(Look::Same)),
            (Ok(Some(files("2"))), Some(Look::Changing)),
            (Ok(Some(files("3"))), Some(Look::Changing)),
            (Err(away()), None),
            (Ok(Some(files("1"))), Some(Look::Same)),
            (Ok(Some(files("3"))), Some(Look::Changing)),
            (Ok(Some(files("3"))), Some(Look::Other)),
            (Ok(None), Some(Look::Other)),
        ];
        for (shown, expected) in looks {
            while rechecks.of("uid", judged.as_ref()).due_in_ms != Some(0) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            let (sender, mut ended) = tokio::sync::mpsc::unbounded_channel();
            let what = format!("{shown:?}");
            rechecks.look(
                Lane { namespace: "demo".to_owned(), door: "store".to_owned() },
                "uid",
                judged.clone(),
                move || sender.send(()).unwrap(),
                || async { shown },
            );
            ended.recv().await.unwrap();
            let found = rechecks.of("uid", judged.as_ref());
            match expected {
                Some(look) => assert_eq!(found.state, JobState::Done(look), "{what}"),
                None => assert!(matches!(found.state, JobState::Failed { .. }), "{what}"),
            }
            assert_eq!(found.next() == Next::ReadAgain, expected == Some(Look::Other), "{what}");
        }
        // What was judged anew is compared anew.
        assert_eq!(rechecks.of("uid", None).state, JobState::Idle);
        rechecks.forget("uid");
        assert_eq!(rechecks.of("uid", judged.as_ref()).state, JobState::Idle);
    }

    #[test]
    fn first_looks_are_spread() {
        let rechecks = Rechecks::new(Duration::from_secs(100), Arc::new(Turns::new(2, &Limits::DEFAULT)));
        let due = |index: u32| rechecks.of(&format!("uid-{index}"), None).due_in_ms.unwrap() / 10_000;
        let mut tenths = [0; 11];
        (0..1000).for_each(|index| tenths[due(index) as usize] += 1);
        assert!(tenths[..10].iter().all(|count| (60..140).contains(count)), "{tenths:?}");
    }
}
