//! Where the current `FleetView` lies: written by the sources, read by every request.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use tokio::sync::watch;

use crate::view::FleetView;

/// Current view of the pool. The last one stays while the API server or a pod cannot be reached.
pub struct Fleet {
    started: Instant,
    current: RwLock<State>,
    /// Counts the views, for those who wait for the next one.
    published: watch::Sender<u64>,
}

struct State {
    view: Arc<FleetView>,
    synced: bool,
}

impl Fleet {
    /// Knows nothing yet.
    pub fn new() -> Arc<Self> {
        let state = State { view: Arc::default(), synced: false };
        Arc::new(Self { started: Instant::now(), current: RwLock::new(state), published: watch::Sender::new(0) })
    }

    pub fn publish(&self, view: FleetView) {
        let state = State { view: Arc::new(view), synced: true };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = state;
        self.published.send_modify(|count| *count += 1);
    }

    /// Says when a view newer than the present one has been published.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.published.subscribe()
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
