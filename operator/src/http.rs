//! `/metrics`, `/healthz` and `/readyz`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use lorafleet_listen::Bounds;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

#[derive(Clone)]
struct Shared {
    metrics: Arc<Metrics>,
    ready: Arc<AtomicBool>,
}

/// Serves until the process ends. `ready` says whether the API server has answered: a candidate that is not the leader
/// is ready too, else a rollout of two operators would never end.
pub async fn serve(listen: SocketAddr, metrics: Arc<Metrics>, ready: Arc<AtomicBool>) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(render))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .with_state(Shared { metrics, ready });
    let listener = tokio::net::TcpListener::bind(listen).await?;
    let never = CancellationToken::new();
    lorafleet_listen::serve(listener, router, Bounds::PROBES, |_| (), never).await;
    Ok(())
}

async fn render(State(shared): State<Shared>) -> Response {
    match shared.metrics.render() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn readyz(State(shared): State<Shared>) -> Response {
    if shared.ready.load(Ordering::Relaxed) {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the API server has not answered yet").into_response()
    }
}
