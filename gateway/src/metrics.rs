//! What the gateway measures, under `lorafleet_gateway_`. The label `model` has a bounded number of values: the busiest
//! models, and `other`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_crds::top::Top;
use lorafleet_listen::Change;
use prometheus::core::Collector;
use prometheus::{
    Encoder as _, Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::error::Code;
use crate::sse::Usage;
use crate::view::{FleetView, PodView};

/// How a request to a pod ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole answer, good or the engine's own error.
    Answered,
    /// The client went away first.
    ClientGone,
    /// The gateway ended it.
    Refused(Code),
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Outcome::Answered => "Answered",
            Outcome::ClientGone => "ClientGone",
            Outcome::Refused(code) => code.as_str(),
        }
    }
}

/// Why a request was offered to another pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryCause {
    Connect,
    /// It does not take the gateway's key.
    Denied,
    Unavailable,
    Conflict,
    /// It has as much to do as it takes.
    Busy,
    /// It has dropped the adapter since its last report.
    NotHeld,
}

/// All series.
pub struct Metrics {
    registry: Registry,
    started: Instant,
    top: Mutex<Top>,
    requests: IntCounterVec,
    tokens: IntCounterVec,
    first_byte: HistogramVec,
    duration: HistogramVec,
    refused: IntCounterVec,
    retries: IntCounterVec,
    outstanding: IntGaugeVec,
    queued: IntGauge,
    connections: IntGauge,
    connections_refused: IntCounter,
    pods: IntGaugeVec,
    adapters: IntGauge,
    pub poll_failures: IntCounter,
    pub watch_failures: IntCounterVec,
    pub api_stale_seconds: Gauge,
    pub clients: IntGauge,
    pub bad_key_entries: IntGauge,
}

const LATENCY_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

impl Metrics {
    /// `models`: the number of models with series of their own.
    pub fn new(models: usize) -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("lorafleet_gateway".to_owned()), None)?;
        let counters =
            |name, help, labels: &[&str]| register(&registry, IntCounterVec::new(Opts::new(name, help), labels)?);
        let gauges =
            |name, help, labels: &[&str]| register(&registry, IntGaugeVec::new(Opts::new(name, help), labels)?);
        let gauge = |name, help| register(&registry, IntGauge::new(name, help)?);
        let histogram = |name, help| {
            let options = HistogramOpts::new(name, help).buckets(LATENCY_SECONDS.to_vec());
            register(&registry, HistogramVec::new(options, &["model"])?)
        };
        Ok(Self {
            started: Instant::now(),
            top: Mutex::new(Top::new(models)),
            requests: counters(
                "requests_total",
                "Requests sent to pods, by model, status and outcome.",
                &["model", "status", "outcome"],
            )?,
            tokens: counters(
                "tokens_total",
                "Tokens as the engines counted them; kind is prompt, cached or completion.",
                &["model", "kind"],
            )?,
            first_byte: histogram(
                "time_to_first_byte_seconds",
                "From the whole request to the first byte of a stream's events, or to the whole answer.",
            )?,
            duration: histogram("request_seconds", "From the whole request to the last byte of its answer.")?,
            refused: counters("refused_total", "Requests that the gateway itself refused, by code.", &["code"])?,
            retries: counters("retries_total", "Requests offered to another pod, by cause.", &["cause"])?,
            outstanding: gauges("requests_in_progress", "Requests in progress, by model.", &["model"])?,
            queued: gauge("requests_queued", "Requests that wait for a place.")?,
            connections: gauge("client_connections", "Open client connections.")?,
            connections_refused: register(
                &registry,
                IntCounter::new(
                    "client_connections_refused_total",
                    "Connections of addresses that had as many as one may have.",
                )?,
            )?,
            pods: gauges("pods", "Engine pods by state: ready, unready or unreachable.", &["state"])?,
            adapters: gauge("adapters", "Adapters of the pool that have a current revision.")?,
            poll_failures: register(
                &registry,
                IntCounter::new("poll_failures_total", "Reports that could not be read from a pod.")?,
            )?,
            watch_failures: counters(
                "watch_failures_total",
                "Failures of a watch on the API server, by kind.",
                &["kind"],
            )?,
            api_stale_seconds: register(
                &registry,
                Gauge::new(
                    "api_stale_seconds",
                    "Seconds since the API server last answered: the view may be this old.",
                )?,
            )?,
            clients: gauge("api_key_clients", "Clients that have an API key.")?,
            bad_key_entries: gauge("api_key_bad_entries", "Entries of the API keys' folder that do not count.")?,
            registry,
        })
    }

    /// A request for `model` is sent to a pod.
    pub fn begin(&self, model: &str) {
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut top = self.top.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(evicted) = top.count(model, now_ms).evicted {
            self.forget(&evicted);
        }
    }

    /// It ended. `status` is 0 if no head came.
    pub fn end(&self, model: &str, status: u16, outcome: Outcome, first_byte: Option<Duration>, duration: Duration) {
        let top = self.top.lock().unwrap_or_else(PoisonError::into_inner);
        let label = top.label(model);
        self.requests.with_label_values(&[label, &status.to_string(), outcome.as_str()]).inc();
        self.duration.with_label_values(&[label]).observe(duration.as_secs_f64());
        if let Some(first_byte) = first_byte {
            self.first_byte.with_label_values(&[label]).observe(first_byte.as_secs_f64());
        }
    }

    pub fn tokens(&self, model: &str, usage: &Usage) {
        let top = self.top.lock().unwrap_or_else(PoisonError::into_inner);
        let label = top.label(model);
        let kinds = [
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens()),
            ("completion", usage.completion_tokens),
        ];
        for (kind, count) in kinds {
            self.tokens.with_label_values(&[label, kind]).inc_by(count);
        }
    }

    pub fn connection(&self, change: Change) {
        match change {
            Change::Opened => self.connections.inc(),
            Change::Closed => self.connections.dec(),
            Change::Refused => self.connections_refused.inc(),
        }
    }

    pub fn refused(&self, code: Code) {
        self.refused.with_label_values(&[code.as_str()]).inc();
    }

    pub fn retried(&self, cause: RetryCause) {
        self.retries.with_label_values(&[&format!("{cause:?}")]).inc();
    }

    /// What the view holds, in numbers.
    pub fn show_view(&self, view: &FleetView) {
        let count = |wanted: &str| {
            let state = |pod: &PodView| match (pod.ready, &pod.poll_error) {
                (_, Some(_)) => "unreachable",
                (true, None) => "ready",
                (false, None) => "unready",
            };
            view.pods.values().filter(|pod| state(pod) == wanted).count()
        };
        for state in ["ready", "unready", "unreachable"] {
            self.pods.with_label_values(&[state]).set(i64::try_from(count(state)).unwrap_or(i64::MAX));
        }
        let adapters = view.adapters.values().filter(|adapter| adapter.current.is_some()).count();
        self.adapters.set(i64::try_from(adapters).unwrap_or(i64::MAX));
    }

    /// The text of `/metrics`. `outstanding`: requests in progress by model; `queued`: those that wait for a place.
    pub fn text(&self, outstanding: &BTreeMap<String, u32>, queued: u32) -> Result<Vec<u8>, prometheus::Error> {
        self.show_outstanding(outstanding);
        self.queued.set(i64::from(queued));
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }

    fn show_outstanding(&self, outstanding: &BTreeMap<String, u32>) {
        let mut by_label: BTreeMap<&str, i64> = BTreeMap::new();
        let top = self.top.lock().unwrap_or_else(PoisonError::into_inner);
        for (model, count) in outstanding {
            *by_label.entry(top.label(model)).or_default() += i64::from(*count);
        }
        self.outstanding.reset();
        for (label, count) in by_label {
            self.outstanding.with_label_values(&[label]).set(count);
        }
    }

    /// Removes all series of a model that lost its place. Its past is not added to `other`: that would look like traffic.
    fn forget(&self, model: &str) {
        for vector in [&self.requests, &self.tokens] {
            for family in vector.collect() {
                for metric in family.get_metric() {
                    let labels = metric.get_label().iter();
                    let labels: HashMap<&str, &str> = labels.map(|pair| (pair.name(), pair.value())).collect();
                    if labels.get("model") == Some(&model) {
                        let _ = vector.remove(&labels);
                    }
                }
            }
        }
        for vector in [&self.first_byte, &self.duration] {
            let _ = vector.remove_label_values(&[model]);
        }
    }
}

fn register<T: Collector + Clone + 'static>(registry: &Registry, metric: T) -> Result<T, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
