//! Every limit of the gateway in one place; each is a flag and a `LORAFLEET_*` variable.

use std::time::Duration;

use clap::Args;
use lorafleet_listen::{Bounds, Price};

/// Requests are held twice, since each goes on with another `model`. Small bodies need no room: there are as many as there
/// are connections.
pub const REQUEST_PRICE: Price = Price { free_bytes: 16 << 10, copies: 2 };
pub const REPLY_PRICE: Price = Price { free_bytes: 32 << 10, copies: 1 };

/// A limit on everything that a client or a pod could make grow.
#[derive(Args, Clone, Debug)]
pub struct Limits {
    /// Requests in progress at once.
    #[arg(long, env = "LORAFLEET_MAX_CONCURRENT", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_concurrent: u32,
    /// Requests in progress at once for one model, so that one model's flood leaves room for others.
    #[arg(long, env = "LORAFLEET_MAX_CONCURRENT_PER_MODEL", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_concurrent_per_model: u32,
    /// Requests in progress or waiting at once for one API key, so that one client leaves room for others.
    #[arg(long, env = "LORAFLEET_MAX_CONCURRENT_PER_CLIENT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_concurrent_per_client: u32,
    /// Requests that wait for one of those places; more are answered 429.
    #[arg(long, env = "LORAFLEET_MAX_QUEUE", default_value_t = 512, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub max_queue: u32,
    /// How long a request waits for a place before it is answered 429.
    #[arg(long, env = "LORAFLEET_QUEUE_TIMEOUT_SECONDS", default_value = "10", value_parser = seconds)]
    pub queue_timeout_seconds: Duration,
    /// Open client connections.
    #[arg(long, env = "LORAFLEET_MAX_CONNECTIONS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_connections: u32,
    /// Those of one address among them [default: half of them]. Where all clients come from the address of a load balancer it may
    /// be as many: an eighth of all is kept for addresses that have few.
    #[arg(long, env = "LORAFLEET_MAX_CONNECTIONS_PER_PEER", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_connections_per_peer: Option<u32>,
    /// Bytes of a request's body.
    #[arg(long, env = "LORAFLEET_MAX_BODY_BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub max_body_bytes: u64,
    /// Bytes of all requests' bodies until their answers begin, each held twice, beyond the first 16 KiB of each; more are answered 429.
    #[arg(long, env = "LORAFLEET_MAX_BODIES_BYTES", default_value_t = 128 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub max_bodies_bytes: u64,
    /// Bytes of an answer that is not a stream.
    #[arg(long, env = "LORAFLEET_MAX_REPLY_BYTES", default_value_t = 32 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub max_reply_bytes: u64,
    /// Bytes of all answers that are not streams until they have been written, beyond the first 32 KiB of each; more are answered 429.
    #[arg(long, env = "LORAFLEET_MAX_REPLIES_BYTES", default_value_t = 128 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub max_replies_bytes: u64,
    /// How long a client may take until it has sent the head of its next request, and so how long an idle connection stays; for its
    /// first, 10 seconds at most.
    /// Above the 60 seconds for which load balancers usually keep theirs.
    #[arg(long, env = "LORAFLEET_HEAD_TIMEOUT_SECONDS", default_value = "75", value_parser = seconds)]
    pub head_timeout_seconds: Duration,
    /// How long a client may take to send the body of a request.
    #[arg(long, env = "LORAFLEET_BODY_TIMEOUT_SECONDS", default_value = "30", value_parser = seconds)]
    pub body_timeout_seconds: Duration,
    /// How long a client may leave bytes of an answer unread before it is taken for gone.
    #[arg(long, env = "LORAFLEET_WRITE_TIMEOUT_SECONDS", default_value = "60", value_parser = seconds)]
    pub write_timeout_seconds: Duration,
    /// How long connecting to a pod may take.
    #[arg(long, env = "LORAFLEET_CONNECT_TIMEOUT_SECONDS", default_value = "2", value_parser = seconds)]
    pub connect_timeout_seconds: Duration,
    /// How long a pod may take until the head of its answer, which for an answer in one piece is the whole generation.
    #[arg(long, env = "LORAFLEET_ANSWER_TIMEOUT_SECONDS", default_value = "600", value_parser = seconds)]
    pub answer_timeout_seconds: Duration,
    /// How long a pod may be silent within an answer.
    #[arg(long, env = "LORAFLEET_SILENCE_TIMEOUT_SECONDS", default_value = "120", value_parser = seconds)]
    pub silence_timeout_seconds: Duration,
    /// Pods that one request is offered to at most.
    #[arg(long, env = "LORAFLEET_MAX_ATTEMPTS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub max_attempts: u32,
    /// How long new requests are still taken after SIGTERM, until the cluster knows that this pod stops.
    #[arg(long, env = "LORAFLEET_DRAIN_DELAY_SECONDS", default_value = "3", value_parser = seconds)]
    pub drain_delay_seconds: Duration,
    /// How long requests in progress may go on after that. Both together stay below the pod's grace period.
    #[arg(long, env = "LORAFLEET_DRAIN_TIMEOUT_SECONDS", default_value = "25", value_parser = seconds)]
    pub drain_timeout_seconds: Duration,
    /// Adapters that have metric series of their own; the others are counted together as `other`.
    #[arg(long, env = "LORAFLEET_MAX_METRIC_MODELS", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub max_metric_models: u32,
}

impl Limits {
    /// One line of the log, each limit a number under the name of its flag.
    pub fn tell(&self) {
        let Self {
            max_concurrent,
            max_concurrent_per_model,
            max_concurrent_per_client,
            max_queue,
            queue_timeout_seconds,
            max_connections,
            max_connections_per_peer: _,
            max_body_bytes,
            max_bodies_bytes,
            max_reply_bytes,
            max_replies_bytes,
            head_timeout_seconds,
            body_timeout_seconds,
            write_timeout_seconds,
            connect_timeout_seconds,
            answer_timeout_seconds,
            silence_timeout_seconds,
            max_attempts,
            drain_delay_seconds,
            drain_timeout_seconds,
            max_metric_models,
        } = self;
        tracing::info!(
            max_concurrent,
            max_concurrent_per_model,
            max_concurrent_per_client,
            max_queue,
            queue_timeout_seconds = queue_timeout_seconds.as_secs_f64(),
            max_connections,
            max_connections_per_peer = self.of_connections().connections_per_peer,
            max_body_bytes,
            max_bodies_bytes,
            max_reply_bytes,
            max_replies_bytes,
            head_timeout_seconds = head_timeout_seconds.as_secs_f64(),
            body_timeout_seconds = body_timeout_seconds.as_secs_f64(),
            write_timeout_seconds = write_timeout_seconds.as_secs_f64(),
            connect_timeout_seconds = connect_timeout_seconds.as_secs_f64(),
            answer_timeout_seconds = answer_timeout_seconds.as_secs_f64(),
            silence_timeout_seconds = silence_timeout_seconds.as_secs_f64(),
            max_attempts,
            drain_delay_seconds = drain_delay_seconds.as_secs_f64(),
            drain_timeout_seconds = drain_timeout_seconds.as_secs_f64(),
            max_metric_models,
            "limits"
        );
    }

    /// Those of a connection.
    pub fn of_connections(&self) -> Bounds {
        let all = self.max_connections as usize;
        let bounds = Bounds::of_clients(all, self.head_timeout_seconds, self.write_timeout_seconds);
        match self.max_connections_per_peer {
            Some(most) => Bounds { connections_per_peer: most as usize, ..bounds },
            None => bounds,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of seconds"))?;
    if (0.0..=86_400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{seconds} seconds are outside of 0 to 86400"))
    }
}
