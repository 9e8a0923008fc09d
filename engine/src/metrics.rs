//! Counters and histograms that the step thread and the HTTP tasks feed. Labels are variant names and, for adapters,
//! the digests of the busiest; never a message.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::Batch;
use lorafleet_crds::top::Top;
use lorafleet_crds::wire::Tier;
use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

use crate::moves::Move;
use crate::pages::KvOwner;
use crate::refusal::Refusal;
use crate::schedule::{Schedule, Yield};
use crate::state::Drawn;

/// Adapters with series of their own at a time, the busiest; all others share the series `other`.
pub const ADAPTER_SERIES_MAX: usize = 64;

/// Reasons with series of their own; codes are a closed set, but it is written in many places.
const REASON_SERIES_MAX: usize = 64;

pub struct Meter {
    registry: Registry,
    first_token: HistogramVec,
    cold_start: Histogram,
    inter_token: Histogram,
    queue: Histogram,
    steps: StepSeries,
    tokens: IntCounterVec,
    adapter_requests: IntCounterVec,
    adapter_tokens: IntCounterVec,
    load: Histogram,
    load_as_vllm_names_it: Histogram,
    load_failures: IntCounterVec,
    moves: IntCounterVec,
    preemptions: IntCounterVec,
    replies: IntCounterVec,
    /// Adapters and codes that have a label of their own.
    labels: Mutex<Labels>,
    begun: Instant,
    /// Milliseconds from `begun` to the last turn of the step loop.
    last_turn_ms: AtomicU64,
}

/// What the step loop says about itself.
struct StepSeries {
    seconds: Histogram,
    adapters: Histogram,
    adapter_bytes: Histogram,
    uploaded_pages: Histogram,
    failed: IntCounter,
    contradictions: IntCounter,
}

impl StepSeries {
    fn new(made: &Maker<'_>) -> Result<Self, prometheus::Error> {
        let bytes = "Bytes of the distinct adapters in one step.";
        let pages = "Adapter pages written to the device in one step.";
        let contradictions = "Looks at the idle engine's books of pages and leases that found them wrong: a bug.";
        Ok(Self {
            seconds: made.histogram("lorafleet_step_seconds", "One step of the backend.", FAST)?,
            adapters: made.histogram("lorafleet_step_distinct_adapters", "Distinct adapters in one step.", COUNTS)?,
            adapter_bytes: made.histogram("lorafleet_step_adapter_bytes", bytes, BYTES)?,
            uploaded_pages: made.histogram("lorafleet_step_uploaded_pages", pages, COUNTS)?,
            failed: made.counter("lorafleet_failed_steps_total", "Steps that the backend did not do.")?,
            contradictions: made.counter("lorafleet_contradictions_total", contradictions)?,
        })
    }
}

struct Labels {
    adapters: Top,
    reasons: BTreeSet<String>,
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meter")
    }
}

const FAST: &[f64] = &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];
const SLOW: &[f64] = &[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
const COUNTS: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

/// From an adapter of rank 1 on some modules to a step full of large ones.
const BYTES: &[f64] = &[0.0, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10];

impl Meter {
    /// Fails only if two families have one name: a mistake in this file.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let made = Maker(&registry);
        Ok(Self {
            first_token: made.histograms(
                "lorafleet_time_to_first_token_seconds",
                "From arrival to the first token, by the adapter's tier at arrival.",
                &["tier"],
                SLOW,
            )?,
            cold_start: made.histogram(
                "lorafleet_cold_start_seconds",
                "From arrival to the first token where the adapter was not on the device.",
                SLOW,
            )?,
            inter_token: made.histogram("lorafleet_inter_token_seconds", "Between two tokens of an answer.", FAST)?,
            queue: made.histogram("lorafleet_queue_seconds", "From arrival to admission.", SLOW)?,
            steps: StepSeries::new(&made)?,
            tokens: made.counters(
                "lorafleet_tokens_total",
                "Tokens: prompt, cached (of the prompt), output.",
                &["kind"],
            )?,
            adapter_requests: made.counters(
                "lorafleet_adapter_requests_total",
                "Sequences begun, by adapter and by its tier at arrival: device is a hit.",
                &["adapter", "tier"],
            )?,
            adapter_tokens: made.counters(
                "lorafleet_adapter_tokens_total",
                "Tokens drawn, by adapter.",
                &["adapter"],
            )?,
            load: made.histogram("lorafleet_adapter_load_seconds", "Fetch and verification of an adapter.", SLOW)?,
            load_as_vllm_names_it: made.histogram(
                "vllm:lora_adapter_load_seconds",
                "Fetch and verification of an adapter.",
                SLOW,
            )?,
            load_failures: made.counters(
                "lorafleet_adapter_load_failures_total",
                "Adapters that were refused or unreachable, by typed reason.",
                &["reason"],
            )?,
            moves: made.counters("lorafleet_adapter_moves_total", "Moves between tiers.", &["move"])?,
            preemptions: made.counters(
                "lorafleet_preemptions_total",
                "Running sequences put back, by reason.",
                &["reason"],
            )?,
            replies: made.counters(
                "lorafleet_replies_total",
                "HTTP replies by route and status.",
                &["route", "status"],
            )?,
            labels: Mutex::new(Labels { adapters: Top::new(ADAPTER_SERIES_MAX), reasons: BTreeSet::new() }),
            begun: Instant::now(),
            last_turn_ms: AtomicU64::new(0),
            registry,
        })
    }

    /// The step loop goes round.
    pub fn turned(&self) {
        self.last_turn_ms.store(self.begun.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Since the step loop went round last.
    pub fn silent(&self) -> Duration {
        self.begun.elapsed().saturating_sub(Duration::from_millis(self.last_turn_ms.load(Ordering::Relaxed)))
    }

    pub fn scheduled(&self, schedule: &Schedule) {
        for (_, why) in &schedule.preempt {
            let reason = match why {
                Yield::OutOfPages => "OutOfPages",
                Yield::Aged => "Aged",
            };
            self.preemptions.with_label_values(&[reason]).inc();
        }
    }

    pub fn moved(&self, moves: &[Move]) {
        for step in moves {
            let name = match step {
                Move::Write(..) => continue,
                Move::DropHost(..) => "DropHost",
                Move::Fetch(..) => "Fetch",
                Move::DropDevice(..) => "DropDevice",
                Move::Upload(..) => "Upload",
                Move::RefuseFloor(..) | Move::RefuseHostFloor(..) => "RefuseFloor",
                Move::RefuseDemand(..) => "RefuseDemand",
            };
            self.moves.with_label_values(&[name]).inc();
        }
    }

    pub fn stepped(&self, batch: &Batch, adapter_bytes: u64, drawn: &[Drawn], from: Instant, to: Instant) {
        let mut adapters: Vec<_> = batch.segments.iter().filter_map(|segment| segment.adapter).collect();
        adapters.dedup();
        let uploaded: usize = batch.uploads.iter().map(|upload| upload.part.len()).sum();
        self.steps.seconds.observe((to - from).as_secs_f64());
        self.steps.adapters.observe(adapters.len() as f64);
        self.steps.adapter_bytes.observe(adapter_bytes as f64);
        self.steps.uploaded_pages.observe(uploaded as f64);
        for token in drawn {
            self.drawn(token, to);
        }
    }

    fn drawn(&self, token: &Drawn, now: Instant) {
        let tier = token.tier_at_arrival.map_or("base", tier_label);
        self.tokens.with_label_values(&["output"]).inc();
        if let KvOwner::Adapter(digest) = token.owner {
            self.drawn_by(&digest, token.before.is_none().then_some(tier), now);
        }
        if let Some(before) = token.before {
            self.inter_token.observe((now - before).as_secs_f64());
            return;
        }
        let seconds = now.saturating_duration_since(token.arrived).as_secs_f64();
        self.first_token.with_label_values(&[tier]).observe(seconds);
        if token.tier_at_arrival.is_some_and(|tier| tier < Tier::Device) {
            self.cold_start.observe(seconds);
        }
        if let Some(admitted) = token.admitted {
            self.queue.observe(admitted.saturating_duration_since(token.arrived).as_secs_f64());
        }
        self.tokens.with_label_values(&["prompt"]).inc_by(token.prompt_tokens.into());
        self.tokens.with_label_values(&["cached"]).inc_by(token.cached_tokens.into());
    }

    /// A token of an adapter, with its tier at arrival if it is a request's first.
    fn drawn_by(&self, digest: &Digest, first: Option<&str>, now: Instant) {
        let name = digest.short();
        let mut labels = self.labels();
        if let Some(tier) = first {
            let now_ms = now.saturating_duration_since(self.begun).as_millis() as u64;
            let labelled = labels.adapters.count(&name, now_ms);
            self.adapter_requests.with_label_values(&[labelled.label, tier]).inc();
            if let Some(evicted) = labelled.evicted {
                self.forget_adapter(&evicted);
            }
        }
        self.adapter_tokens.with_label_values(&[labels.adapters.label(&name)]).inc();
    }

    /// Removes the series of an adapter that lost its place. Its past is not added to `other`: that would look like traffic.
    fn forget_adapter(&self, label: &str) {
        // What is not there need not be removed.
        let _ = self.adapter_tokens.remove_label_values(&[label]);
        for tier in [Tier::Source, Tier::Disk, Tier::Host, Tier::Device] {
            let _ = self.adapter_requests.remove_label_values(&[label, tier_label(tier)]);
        }
    }

    pub fn loaded(&self, seconds: f64) {
        self.load.observe(seconds);
        self.load_as_vllm_names_it.observe(seconds);
    }

    /// A load that was refused, for the step thread or for a client.
    pub fn load_failed(&self, refusal: &Refusal) {
        let label = {
            let mut labels = self.labels();
            let known = labels.reasons.contains(refusal.code.as_ref());
            if known || labels.reasons.len() < REASON_SERIES_MAX {
                labels.reasons.insert(refusal.code.clone().into_owned());
                refusal.code.as_ref()
            } else {
                "other"
            }
        };
        self.load_failures.with_label_values(&[label]).inc();
    }

    pub fn contradicted(&self) {
        self.steps.contradictions.inc();
    }

    pub fn step_failed(&self) {
        self.steps.failed.inc();
    }

    pub fn replied(&self, route: &'static str, status: u16) {
        self.replies.with_label_values(&[route, &status.to_string()]).inc();
    }

    /// All families in the text format.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn labels(&self) -> MutexGuard<'_, Labels> {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn tier_label(tier: Tier) -> &'static str {
    match tier {
        Tier::Source => "source",
        Tier::Disk => "disk",
        Tier::Host => "host",
        Tier::Device => "device",
    }
}

struct Maker<'a>(&'a Registry);

impl Maker<'_> {
    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, prometheus::Error> {
        let made = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec, prometheus::Error> {
        let made = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let made = IntCounter::new(name, help)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        let made = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(made.clone()))?;
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An hour of one fleet's traffic, then an hour of another's: those who are busy now have the series.
    #[test]
    fn the_busiest_adapters_of_now_have_series_of_their_own() {
        let meter = Meter::new().unwrap();
        let digest = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            Digest::from_bytes(bytes)
        };
        let mut seconds = 0;
        let mut ask = |number: u32| {
            let now = meter.begun + Duration::from_secs(seconds);
            seconds += 1;
            let token = |before| Drawn {
                owner: KvOwner::Adapter(digest(number)),
                tier_at_arrival: Some(Tier::Host),
                arrived: now,
                before,
                admitted: None,
                prompt_tokens: 1,
                cached_tokens: 0,
                finish: None,
            };
            meter.stepped(&Batch::default(), 0, &[token(None), token(Some(now))], now, now);
        };
        let most = ADAPTER_SERIES_MAX as u32;
        (0..7200).for_each(|turn| ask(turn % (2 * most)));
        (0..7200).for_each(|turn| ask(10_000 + turn % 8));
        let text = meter.text().unwrap();
        let value =
            |series: String| text.lines().find_map(|line| line.strip_prefix(&series)?.trim().parse::<u64>().ok());
        for number in 10_000..10_008 {
            let label = digest(number).short();
            let requests =
                value(format!("lorafleet_adapter_requests_total{{adapter=\"{label}\",tier=\"host\"}}")).unwrap();
            let tokens = value(format!("lorafleet_adapter_tokens_total{{adapter=\"{label}\"}}")).unwrap();
            // Both count from the moment at which it got its place.
            assert!(requests > 500 && tokens == 2 * requests, "{requests} requests, {tokens} tokens");
        }
        let shown = text.lines().filter(|line| line.starts_with("lorafleet_adapter_tokens_total{")).count();
        assert_eq!(shown, ADAPTER_SERIES_MAX + 1, "the places and `other`");
        assert!(value("lorafleet_adapter_tokens_total{adapter=\"other\"}".into()).unwrap() > 1000);
    }
}
