//! Asking every pod for its report, once a second, and at once when somebody misses something.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http::{HeaderMap, header};
use lorafleet_crds::wire::{REPORT_BYTES_MAX, Report};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::Sources;
use super::assemble::{Endpoint, Polled};
use super::watch::Stores;
use crate::view::{Holdings, PodReport};

const PERIOD: Duration = Duration::from_secs(1);
/// Between the beginnings of two rounds, however many wait for one.
const SPACING: Duration = Duration::from_millis(100);
const PATIENCE: Patience = Patience { early: Duration::from_millis(50), answer: Duration::from_millis(800) };
const CONCURRENT_MAX: usize = 128;

/// How long one round waits.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// What has come by then is shown, without waiting for those who take their time.
    early: Duration,
    /// For the answer of one pod.
    answer: Duration,
}

/// What is known of each pod by name.
pub type Reports = BTreeMap<String, Polled>;

/// What has been heard so far.
#[derive(Clone)]
pub struct Heard {
    pub reports: Reports,
    /// The last round that is over.
    pub over: u64,
}

/// Starts polling. `None` until the first round is over.
pub fn start(sources: Sources, stores: Stores) -> watch::Receiver<Option<Arc<Heard>>> {
    let (sender, receiver) = watch::channel(None);
    sources.vital.clone().spawn("poll", async move {
        let mut reports = Reports::new();
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next = Instant::now();
        while !sender.is_closed() {
            tokio::select! {
                _ = ticks.tick() => {}
                () = sources.fleet.wanted() => ticks.reset(),
            }
            tokio::time::sleep_until(next).await;
            next = Instant::now() + SPACING;
            let number = sources.fleet.begin_round();
            let early = |reports: &Reports| {
                // The first view shall not lack anybody.
                if number > 1 {
                    sender.send_replace(Some(Arc::new(Heard { reports: reports.clone(), over: number - 1 })));
                }
            };
            reports = round(&sources, stores.endpoints(), &reports, PATIENCE, early).await;
            sender.send_replace(Some(Arc::new(Heard { reports: reports.clone(), over: number })));
        }
    });
    receiver
}

/// Asks all pods at once, within bounds. A pod that does not answer keeps its last report, with the error beside it.
async fn round(
    sources: &Sources,
    endpoints: BTreeMap<String, Endpoint>,
    before: &Reports,
    patience: Patience,
    early: impl Fn(&Reports),
) -> Reports {
    let mut reports = before.clone();
    reports.retain(|pod, last| endpoints.get(pod).is_some_and(|endpoint| endpoint.address == last.address));
    let polls = endpoints.into_iter().map(|(pod, endpoint)| {
        // Another address is another pod.
        let last = before.get(&pod).filter(|last| last.address == endpoint.address);
        poll(sources, pod, endpoint, last.and_then(|last| last.report.clone()), patience.answer)
    });
    let mut answers = std::pin::pin!(futures::stream::iter(polls).buffer_unordered(CONCURRENT_MAX));
    let mut is_early = std::pin::pin!(tokio::time::sleep(patience.early));
    let mut shown = false;
    loop {
        tokio::select! {
            answer = answers.next() => match answer {
                Some((pod, polled)) => drop(reports.insert(pod, polled)),
                None => return reports,
            },
            () = is_early.as_mut(), if !shown => {
                shown = true;
                early(&reports);
            }
        }
    }
}

async fn poll(
    sources: &Sources,
    pod: String,
    endpoint: Endpoint,
    last: Option<Arc<PodReport>>,
    answer_time: Duration,
) -> (String, Polled) {
    let known = last.as_ref().map(|report| &report.holdings);
    let answer = tokio::time::timeout(answer_time, ask(sources, &pod, &endpoint, known)).await;
    let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {} ms", answer_time.as_millis())));
    let address = endpoint.address;
    let polled = match answer {
        Ok(report) => Polled { address, report: Some(Arc::new(report)), error: None },
        Err(error) => {
            sources.metrics.poll_failures.inc();
            tracing::debug!(pod, error, "no report");
            Polled { address, report: last, error: Some(error) }
        }
    };
    (pod, polled)
}

async fn ask(
    sources: &Sources,
    pod: &str,
    endpoint: &Endpoint,
    known: Option<&Arc<Holdings>>,
) -> Result<PodReport, String> {
    let mut headers = HeaderMap::new();
    if let Some(key) = sources.engine_key.borrow().clone() {
        headers.insert(header::AUTHORIZATION, key);
    }
    let path = Report::path(known.map(|known| known.tag.as_str()));
    // Before the question: what is sent while it is on its way may or may not be in the answer.
    let outstanding = sources.in_flight.on_pod(pod);
    let body = sources.upstream.get(endpoint.address, &path, headers, REPORT_BYTES_MAX).await?;
    let report: Report =
        serde_json::from_slice(&body).map_err(|error| format!("its report cannot be read: {error}"))?;
    PodReport::new(report, known, sources.fleet.now_ms(), outstanding)
        .ok_or_else(|| "its report leaves out holdings that are not known here".to_owned())
}

#[cfg(test)]
#[path = "poll_tests.rs"]
mod tests;
