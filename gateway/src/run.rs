//! The process: puts the parts together, and ends them in order on SIGTERM.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kube::Client;
use lorafleet_listen::{Bounds, End, Room, Told};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::fleet::{Fleet, HEARING_MAX};
use crate::front::{self, Gateway, Secrets};
use crate::health::{self, Health};
use crate::limits::Limits;
use crate::load::InFlight;
use crate::metrics::Metrics;
use crate::secret_files;
use crate::sources::{Sources, keep_up_to_date};
use crate::upstream::Upstream;
use crate::vital::Vital;

/// Time for the last error events to leave once the time to drain is over.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What the process is told.
#[derive(Clone, Debug)]
pub struct Settings {
    pub namespace: String,
    pub pool: String,
    pub listen: SocketAddr,
    pub metrics_listen: SocketAddr,
    pub engine_key_file: PathBuf,
    pub api_keys_dir: Option<PathBuf>,
    pub limits: Limits,
}

/// Log lines as JSON on standard output; `RUST_LOG` says how much.
pub fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).init();
}

/// Serves until SIGTERM or SIGINT, and until what is in progress then has ended or a second signal comes.
pub async fn run(settings: Settings) -> anyhow::Result<End> {
    let told = Told::new().context("listening for signals")?;
    let limits = settings.limits.clone();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "starting");
    limits.tell();
    let metrics = Arc::new(Metrics::new(limits.max_metric_models as usize)?);
    let vital = Vital::default();
    let secrets = read_secrets(&settings, &metrics, &vital).await?;
    let client = Client::try_default().await.context("no configuration to reach the API server")?;
    let listener = bind(settings.listen).await?;
    let metrics_listener = bind(settings.metrics_listen).await?;
    tracing::info!(clients = %listener.local_addr()?, metrics = %metrics_listener.local_addr()?, "listening");
    let gateway = Arc::new(Gateway {
        fleet: Fleet::new(HEARING_MAX),
        in_flight: InFlight::new(&limits),
        upstream: Upstream::new(&limits),
        bodies: Room::new(limits.max_bodies_bytes),
        replies: Room::new(limits.max_replies_bytes),
        metrics: Arc::clone(&metrics),
        stop: CancellationToken::new(),
        secrets,
        limits,
    });
    let draining = Arc::new(AtomicBool::new(false));
    let health = Health { gateway: Arc::clone(&gateway), draining: Arc::clone(&draining) };
    // Probes are answered to the end.
    let never = CancellationToken::new();
    let probes = lorafleet_listen::serve(metrics_listener, health::routes(health), Bounds::PROBES, |_| (), never);
    vital.spawn("probes", probes);
    let sources = Sources {
        client,
        namespace: settings.namespace,
        pool: settings.pool,
        upstream: gateway.upstream.clone(),
        engine_key: gateway.secrets.engine_key.clone(),
        in_flight: Arc::clone(&gateway.in_flight),
        metrics,
        fleet: Arc::clone(&gateway.fleet),
        vital: vital.clone(),
    };
    vital.spawn("view", keep_up_to_date(sources));
    serve_until_told(&gateway, listener, &draining, told, &vital).await
}

/// Serves; on a signal first says so to the probes, then takes nothing new, then ends what is still under way.
async fn serve_until_told(
    gateway: &Arc<Gateway>,
    listener: TcpListener,
    draining: &AtomicBool,
    mut told: Told,
    vital: &Vital,
) -> anyhow::Result<End> {
    let limits = gateway.limits.clone();
    let drain = CancellationToken::new();
    let serving = tokio::spawn({
        let (routes, metrics) = (front::routes(Arc::clone(gateway)), Arc::clone(&gateway.metrics));
        let (limits, drain) = (limits.clone(), drain.clone());
        async move {
            let count = move |change| metrics.connection(change);
            lorafleet_listen::serve(listener, routes, limits.of_connections(), count, drain).await;
        }
    });
    let is_told = tokio::select! {
        heard = told.next() => {
            tracing::info!(signal = heard.name(), "draining");
            true
        }
        () = vital.ended() => false,
    };
    draining.store(true, Ordering::Relaxed);
    let drained = async {
        tokio::time::sleep(limits.drain_delay_seconds).await;
        drain.cancel();
        let mut serving = std::pin::pin!(serving);
        if tokio::time::timeout(limits.drain_timeout_seconds, serving.as_mut()).await.is_err() {
            tracing::warn!("requests are still in progress: ending them");
            gateway.stop.cancel();
            if tokio::time::timeout(LAST_WORDS, serving).await.is_err() {
                let requests: u32 = gateway.in_flight.by_model().values().sum();
                tracing::warn!(requests, "clients that do not read what they are told are cut off");
            }
        }
    };
    tokio::select! {
        () = drained => {
            ensure!(is_told, "a task ended without which the gateway knows nothing new");
            tracing::info!("stopped");
            Ok(End::Drained)
        }
        heard = told.next() => {
            tracing::warn!(signal = heard.name(), "told again: what is in progress is cut off");
            Ok(End::CutOff(heard))
        }
    }
}

async fn read_secrets(settings: &Settings, metrics: &Arc<Metrics>, vital: &Vital) -> anyhow::Result<Secrets> {
    let file = settings.engine_key_file.clone();
    let engine_key = secret_files::watch_engine_key(file.clone(), vital)
        .await
        .with_context(|| format!("reading the engines' key from {}", file.display()))?;
    let api_keys = match settings.api_keys_dir.clone() {
        None => None,
        Some(folder) => Some(
            secret_files::watch_api_keys(folder.clone(), settings.namespace.clone(), Arc::clone(metrics), vital)
                .await
                .with_context(|| format!("reading the API keys from {}", folder.display()))?,
        ),
    };
    Ok(Secrets { api_keys, engine_key })
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))
}
