//! What the operator measures of itself and of the fleet. Labels are names of variants and kinds, never messages.

use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// All metrics, registered once.
pub struct Metrics {
    registry: Registry,
    /// Reconciles by controller and result (`ok`, `error`).
    pub reconciles: IntCounterVec,
    /// Seconds of one reconcile, by controller.
    pub reconcile_seconds: HistogramVec,
    /// Writes to the API server, by kind.
    pub writes: IntCounterVec,
    /// Requests to engine pods, by request (`report`, `placement`) and result (`ok`, `error`).
    pub engine_requests: IntCounterVec,
    /// Sources read to the end, by controller and result (`verified`, `fault`, or the reason of the refusal).
    pub reads: IntCounterVec,
    /// Looks at sources that were judged before, by controller and result (`ok`, `error`).
    pub looks: IntCounterVec,
    /// Objects by kind and the status of their condition Ready.
    pub objects: IntGaugeVec,
    /// Engine pods that shall be, by pool.
    pub desired_replicas: IntGaugeVec,
    /// 1 while this operator is the leader.
    pub leader: IntGauge,
}

impl Metrics {
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntCounterVec> {
            let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let reconciles =
            counter("lorafleet_operator_reconciles_total", "Reconciles by controller.", &["controller", "result"])?;
        let writes = counter("lorafleet_operator_writes_total", "Writes to the API server.", &["kind"])?;
        let engine_requests =
            counter("lorafleet_operator_engine_requests_total", "Requests to engine pods.", &["request", "result"])?;
        let reads = counter("lorafleet_operator_reads_total", "Sources read to the end.", &["controller", "result"])?;
        let looks =
            counter("lorafleet_operator_looks_total", "Looks at sources that were judged.", &["controller", "result"])?;
        let buckets = prometheus::exponential_buckets(0.001, 4.0, 8)?;
        let opts = HistogramOpts::new("lorafleet_operator_reconcile_seconds", "Seconds of one reconcile.");
        let reconcile_seconds = HistogramVec::new(opts.buckets(buckets), &["controller"])?;
        let gauge = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntGaugeVec> {
            let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let objects =
            gauge("lorafleet_objects", "Objects by kind and status of their condition Ready.", &["kind", "ready"])?;
        let desired_replicas =
            gauge("lorafleet_pool_desired_replicas", "Engine pods that shall be.", &["namespace", "pool"])?;
        let leader = IntGauge::new("lorafleet_operator_leader", "1 while this operator is the leader.")?;
        registry.register(Box::new(reconcile_seconds.clone()))?;
        registry.register(Box::new(leader.clone()))?;
        Ok(Self {
            registry,
            reconciles,
            reconcile_seconds,
            writes,
            engine_requests,
            reads,
            looks,
            objects,
            desired_replicas,
            leader,
        })
    }

    /// In the text format.
    pub fn render(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
