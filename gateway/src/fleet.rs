//! Where the current `FleetView` lies: written by the sources, read by every request.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::view::FleetView;

/// Current view of the pool. The last one stays while the API server or a pod cannot be reached.
pub struct Fleet {
    started: Instant,
    current: RwLock<State>,
    heard: watch::Sender<Heard>,
    /// The round that somebody waits for.
    wanted: watch::Sender<u64>,
    hearing_max: Duration,
}

struct State {
    view: Arc<FleetView>,
    synced: bool,
}

/// How much has been heard from the pods. In a round each of them is asked once.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    begun: u64,
    /// The view has in it what this round and all before it have shown.
    over: u64,
    /// Counts the views.
    views: u64,
}

/// A round that somebody waits for ends much earlier: no pod has longer to answer than its own time.
pub const HEARING_MAX: Duration = Duration::from_secs(2);

impl Fleet {
    /// Knows nothing yet. `hearing_max`: how long somebody waits for a round.
    pub fn new(hearing_max: Duration) -> Arc<Self> {
        let state = State { view: Arc::default(), synced: false };
        Arc::new(Self {
            started: Instant::now(),
            current: RwLock::new(state),
            heard: watch::Sender::default(),
            wanted: watch::Sender::default(),
            hearing_max,
        })
    }

    /// Makes a view the current one. `over` is the last round of questions that it has in it as a whole.
    pub fn publish(&self, view: FleetView, over: u64) {
        let state = State { view: Arc::new(view), synced: true };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = state;
        self.heard.send_modify(|heard| {
            heard.views += 1;
            heard.over = heard.over.max(over);
        });
    }

    /// Has the pods asked at once, and follows what they say.
    pub fn hear(&self) -> Hearing {
        let heard = self.heard.subscribe();
        // A round that is under way may have asked a pod too early.
        let round = heard.borrow().begun + 1;
        self.wanted.send_modify(|wanted| *wanted = round.max(*wanted));
        Hearing { heard, round, all: false, deadline: tokio::time::Instant::now() + self.hearing_max }
    }

    /// Returns when somebody waits for a round that has not begun. Those who come before it begins wait for the same.
    pub async fn wanted(&self) {
        let mut wanted = self.wanted.subscribe();
        // The sender is here: it cannot have gone.
        let _ = wanted.wait_for(|wanted| *wanted > self.heard.borrow().begun).await;
    }

    /// The number of the round that begins now.
    pub fn begin_round(&self) -> u64 {
        let mut round = 0;
        self.heard.send_if_modified(|heard| {
            heard.begun += 1;
            round = heard.begun;
            // Nothing has been heard yet.
            false
        });
        round
    }

    pub fn view(&self) -> Arc<FleetView> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).view)
    }

    /// Whether the view has been read from the sources once; it stays so.
    pub fn synced(&self) -> bool {
        self.current.read().unwrap_or_else(PoisonError::into_inner).synced
    }

    /// The clock of all views.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Waits for what the pods say when they are asked now.
pub struct Hearing {
    heard: watch::Receiver<Heard>,
    round: u64,
    all: bool,
    deadline: tokio::time::Instant,
}

impl Hearing {
    /// Returns with the next view: true. False if the last one had everything in it.
    pub async fn next(&mut self) -> bool {
        if self.all || !matches!(tokio::time::timeout_at(self.deadline, self.heard.changed()).await, Ok(Ok(()))) {
            return false;
        }
        self.all = self.heard.borrow_and_update().over >= self.round;
        true
    }
}
