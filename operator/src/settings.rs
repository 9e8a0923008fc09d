//! What the command line says, once and for all.

use std::net::SocketAddr;
use std::time::Duration;

/// Settings of `lorafleet-operator run`.
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Image of the engine, where a pool names none.
    #[arg(long, env = "LORAFLEET_ENGINE_IMAGE")]
    pub engine_image: String,
    /// Image of the gateway, where a pool names none.
    #[arg(long, env = "LORAFLEET_GATEWAY_IMAGE")]
    pub gateway_image: String,
    /// Pull policy of both.
    #[arg(long, env = "LORAFLEET_IMAGE_PULL_POLICY", default_value = "IfNotPresent",
          value_parser = ["Always", "IfNotPresent", "Never"])]
    pub image_pull_policy: String,
    /// ClusterRole that every gateway is bound to in its own namespace.
    #[arg(long, env = "LORAFLEET_GATEWAY_CLUSTER_ROLE", default_value = "lorafleet-gateway")]
    pub gateway_cluster_role: String,
    /// Namespace of the Lease by which one operator of several is elected.
    #[arg(long, env = "POD_NAMESPACE", default_value = "lorafleet-system")]
    pub namespace: String,
    /// Who this operator is in that election. Default: a random name.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "LORAFLEET_LISTEN", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,
    /// If given, no source of any BaseModel or LoraAdapter reaches beyond one of these prefixes in these stores; without an endpoint
    /// the store is AWS.
    #[arg(long = "source-cap", env = "LORAFLEET_SOURCE_CAPS", value_delimiter = ',', value_name = "PREFIX[@ENDPOINT]")]
    pub source_caps: Vec<String>,
    /// Read sources without a Secret as the operator's own identity, whoever names them. Within a source cap it always may.
    #[arg(long, env = "LORAFLEET_ALLOW_AMBIENT_CREDENTIALS")]
    pub allow_ambient_credentials: bool,
    /// Adapters and base models that are read at the same time; of one namespace two, of each of its stores one.
    #[arg(long, env = "LORAFLEET_READS_MAX", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub reads_max: u16,
    /// Seconds between two looks at a source that was judged: whether its files are still the same.
    #[arg(long, env = "LORAFLEET_SOURCE_CHECK_S", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub source_check_s: u32,
    /// Bytes that the reports of all engine pods may take together, about 500 for each adapter of each pod, of which one pool of
    /// several may have half; a report for which there is no room leaves its pod unreachable.
    #[arg(long, env = "LORAFLEET_REPORTS_BYTES_MAX", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    pub reports_bytes_max: u64,
    /// Seconds between two looks at a pool in which nothing happens.
    #[arg(long, env = "LORAFLEET_HEARTBEAT_S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    pub heartbeat_s: u16,
}

/// Limits that nobody has to tune, in one place.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Objects of one kind that are reconciled at the same time.
    pub reconciles_max: u16,
    /// Engine pods that are asked at the same time, per pool.
    pub pods_asked_max: usize,
    /// For one request to an engine pod.
    pub engine_timeout: Duration,
    /// How long the last report stands in for one that a busy engine did not give in time.
    pub report_stands: Duration,
    /// Between two looks at a pool in which something happens.
    pub pass_busy: Duration,
    /// Between two looks at a pool in which something fails.
    pub pass_failing: Duration,
    /// First and longest wait after a source could not be read.
    pub retry_first: Duration,
    pub retry_longest: Duration,
    /// Between two looks for a source that does not exist or refuses the credentials.
    pub retry_absent: Duration,
    /// How long one source may be read while others wait, and the slowest rate that is borne over that time.
    pub read_turn: Duration,
    pub read_bytes_per_second_min: u64,
    /// Sources that are looked at again at the same time, beside those that are read.
    pub looks_max: usize,
}

impl Limits {
    pub const DEFAULT: Self = Self {
        reconciles_max: 16,
        pods_asked_max: 16,
        engine_timeout: Duration::from_secs(3),
        report_stands: Duration::from_secs(15),
        pass_busy: Duration::from_millis(500),
        pass_failing: Duration::from_secs(4),
        retry_first: Duration::from_secs(1),
        retry_longest: Duration::from_secs(60),
        retry_absent: Duration::from_secs(30),
        read_turn: Duration::from_secs(30),
        read_bytes_per_second_min: 256 << 10,
        looks_max: 4,
    };
}
