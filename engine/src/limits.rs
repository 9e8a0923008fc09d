//! One struct of limits. A limit that is reached is a typed answer, never a surprise.

use std::time::Duration;

/// What this process allows itself. Derived from the machine where nothing is given (see `config`), printed at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Distinct adapters among running sequences.
    pub max_adapters_per_batch: u32,
    /// Largest rank of an adapter that is accepted.
    pub max_rank: u32,
    /// Sequences that run at once.
    pub max_sequences: u32,
    /// Rows of one step; at least `max_sequences`, so that each running sequence can decode in each step.
    pub max_step_tokens: u32,
    /// Prompts take so few of a step's rows that it stays about within this time: it is the time between two tokens of
    /// each answer, and what a request waits for that comes just after its beginning.
    pub step_time_max: Duration,
    /// Prompt and answer of one sequence, in tokens.
    pub max_model_tokens: u32,
    /// Sequences that wait or run; more are answered with 429.
    pub max_queued: u32,
    /// Choices of one request over all its prompts.
    pub max_choices: u32,
    /// Adapters known by name or digest.
    pub max_adapters: u32,
    /// Fetches of adapters at once that the engine begins by itself; what clients load is bounded by its bytes.
    pub max_fetches: u32,
    /// Host memory for adapters.
    pub host_cache_bytes: u64,
    /// Adapter bytes written to the device in one step; a larger adapter is written in pieces.
    pub upload_bytes_per_step: u64,
    /// How long a step may take longer for them while somebody waits for its tokens.
    pub upload_time_per_step: Duration,
    /// A step that takes long anyhow may take longer by half of its time, up to this.
    pub upload_time_max: Duration,
    /// So many bytes are written all the same, however slow the machine is.
    pub upload_bytes_min: u64,
    /// An adapter that lacks no more than this comes in one step.
    pub upload_bytes_whole: u64,
    /// After this wait, a sequence that lacks only a place gets one: for its adapter, from the adapter that has been in use
    /// longest; of its own, from the owner that has most.
    pub age_max: Duration,
    /// Connections that are open at once; more wait to be accepted.
    pub max_connections: usize,
    /// How long the head of a connection's next request may take, and so how long an idle one stays: longer than gateways
    /// and load balancers keep theirs.
    pub head_time_max: Duration,
    /// How long a client may leave bytes of an answer unread before it is taken for gone.
    pub write_time_max: Duration,
    /// Body of a request in bytes.
    pub max_body_bytes: usize,
    /// Bodies of all requests that are being read, together.
    pub bodies_bytes: usize,
    /// Body of a placement: `max_adapters` with long URIs.
    pub max_placement_bytes: usize,
    /// How long running requests may go on after SIGTERM.
    pub drain_max: Duration,
    /// With sequences open, no step takes this long: the process is not healthy any more.
    pub silence_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_adapters_per_batch: 8,
            max_rank: 256,
            max_sequences: 32,
            max_step_tokens: 256,
            step_time_max: Duration::from_millis(250),
            max_model_tokens: 2048,
            max_queued: 1024,
            max_choices: 64,
            max_adapters: lorafleet_crds::wire::ADAPTERS_MAX as u32,
            max_fetches: 16,
            host_cache_bytes: 256 << 20,
            upload_bytes_per_step: 64 << 20,
            upload_time_per_step: Duration::from_millis(5),
            upload_time_max: Duration::from_millis(100),
            upload_bytes_min: 2 << 20,
            upload_bytes_whole: 8 << 20,
            age_max: Duration::from_secs(2),
            max_connections: 4096,
            head_time_max: Duration::from_secs(75),
            write_time_max: Duration::from_secs(60),
            max_body_bytes: 4 << 20,
            bodies_bytes: 32 << 20,
            max_placement_bytes: 64 << 20,
            drain_max: Duration::from_secs(25),
            silence_max: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// One line of the log, each limit a number.
    pub fn tell(&self, pages: u32, page_bytes: u64, page_tokens: u32, managed: bool) {
        tracing::info!(
            pages,
            page_bytes,
            page_tokens,
            managed,
            max_adapters_per_batch = self.max_adapters_per_batch,
            max_rank = self.max_rank,
            max_sequences = self.max_sequences,
            max_step_tokens = self.max_step_tokens,
            step_ms_max = self.step_time_max.as_millis() as u64,
            max_model_tokens = self.max_model_tokens,
            max_queued = self.max_queued,
            max_choices = self.max_choices,
            max_adapters = self.max_adapters,
            max_fetches = self.max_fetches,
            host_cache_bytes = self.host_cache_bytes,
            age_ms_max = self.age_max.as_millis() as u64,
            max_connections = self.max_connections,
            max_body_bytes = self.max_body_bytes,
            head_timeout_seconds = self.head_time_max.as_secs(),
            write_timeout_seconds = self.write_time_max.as_secs(),
            drain_seconds_max = self.drain_max.as_secs(),
            "limits"
        );
    }
}
