//! Asking every pod for its report, once a second.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http::{HeaderMap, header};
use lorafleet_crds::wire::Report;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::Sources;
use super::assemble::{Endpoint, Polled};
use super::watch::Stores;
use crate::view::PodReport;

const PERIOD: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_millis(800);
const CONCURRENT_MAX: usize = 32;
const REPORT_BYTES_MAX: usize = 16 << 20;

/// What is known of each pod by name.
pub type Reports = BTreeMap<String, Polled>;

/// Starts polling. `None` until the first round is over.
pub fn start(sources: Sources, stores: Stores) -> watch::Receiver<Option<Arc<Reports>>> {
    let (sender, receiver) = watch::channel(None);
    tokio::spawn(async move {
        let mut reports = Arc::new(Reports::new());
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !sender.is_closed() {
            ticks.tick().await;
            reports = Arc::new(round(&sources, stores.endpoints(), &reports).await);
            sender.send_replace(Some(Arc::clone(&reports)));
        }
    });
    receiver
}

/// Asks all pods at once, within bounds. A pod that does not answer keeps its last report, with the error beside it.
async fn round(sources: &Sources, endpoints: BTreeMap<String, Endpoint>, before: &Reports) -> Reports {
    let polls = endpoints.into_iter().map(|(pod, endpoint)| async move {
        let answer = tokio::time::timeout(TIMEOUT, ask(sources, &pod, &endpoint)).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {} ms", TIMEOUT.as_millis())));
        // Another address is another pod.
        let last = before.get(&pod).filter(|last| last.address == endpoint.address);
        let polled = match answer {
            Ok(report) => Polled { address: endpoint.address, report: Some(Arc::new(report)), error: None },
            Err(error) => {
                sources.metrics.poll_failures.inc();
                tracing::debug!(pod, error, "no report");
                Polled {
                    address: endpoint.address,
                    report: last.and_then(|last| last.report.clone()),
                    error: Some(error),
                }
            }
        };
        (pod, polled)
    });
    futures::stream::iter(polls).buffer_unordered(CONCURRENT_MAX).collect().await
}

async fn ask(sources: &Sources, pod: &str, endpoint: &Endpoint) -> Result<PodReport, String> {
    let mut headers = HeaderMap::new();
    if let Some(key) = sources.engine_key.borrow().clone() {
        headers.insert(header::AUTHORIZATION, key);
    }
    // Before the question: what is sent while it is on its way may or may not be in the answer.
    let outstanding = sources.in_flight.on_pod(pod);
    let body = sources.upstream.get(endpoint.address, "/v1/lora_adapters", headers, REPORT_BYTES_MAX).await?;
    let report: Report =
        serde_json::from_slice(&body).map_err(|error| format!("its report cannot be read: {error}"))?;
    Ok(PodReport::new(report, sources.fleet.now_ms(), outstanding))
}
