//! The only readers of the outer world: objects from the API server, reports from the pods. Both feed one writer of the
//! `FleetView`.
//!
//! ```text
//! API server --watch--> stores --+
//!                                +--> assemble (pure) --> Fleet
//! pods --GET each second--> reports
//! ```

mod assemble;
mod objects;
mod poll;
mod watch;

pub use assemble::{Objects, Polled, assemble};

use std::sync::Arc;
use std::time::Instant;

use http::HeaderValue;
use kube::Client;

use crate::fleet::Fleet;
use crate::load::InFlight;
use crate::metrics::Metrics;
use crate::upstream::Upstream;
use crate::vital::Vital;

/// Pause after a view, as a multiple of the time that it took: no more than a quarter of a core goes into views.
const PAUSE: u32 = 3;

/// Which pool, and what is needed to read it.
#[derive(Clone)]
pub struct Sources {
    pub client: Client,
    pub namespace: String,
    pub pool: String,
    pub upstream: Upstream,
    pub engine_key: tokio::sync::watch::Receiver<Option<HeaderValue>>,
    pub in_flight: Arc<InFlight>,
    pub metrics: Arc<Metrics>,
    pub fleet: Arc<Fleet>,
    /// For the tasks that it starts.
    pub vital: Vital,
}

/// Keeps the fleet's view up to date, for ever. The first view is published when all objects have been listed and every
/// pod has been asked once.
pub async fn keep_up_to_date(sources: Sources) {
    let (stores, changed) = watch::start(&sources);
    stores.listed().await;
    tracing::info!(namespace = sources.namespace, pool = sources.pool, "the pool's objects have been read");
    let mut reports = poll::start(sources.clone(), stores.clone());
    loop {
        tokio::select! {
            () = changed.notified() => {}
            polled = reports.changed() => if polled.is_err() { return },
        }
        let heard = reports.borrow_and_update().clone();
        let Some(heard) = heard else {
            // Not one round is over: a view without reports would refuse everything.
            continue;
        };
        let started = Instant::now();
        let view = assemble(&stores.objects(&sources), &heard.reports);
        sources.metrics.show_view(&view);
        sources.fleet.publish(view, heard.over);
        // Many adapters change one after the other: their views are taken together where one takes long.
        tokio::time::sleep(started.elapsed() * PAUSE).await;
    }
}
