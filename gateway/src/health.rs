//! `/metrics`, `/healthz` and `/readyz`, on a port of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};

use crate::front::Gateway;

/// What the probes ask.
#[derive(Clone)]
pub struct Health {
    pub gateway: Arc<Gateway>,
    /// SIGTERM has come: the cluster shall send nothing new.
    pub draining: Arc<AtomicBool>,
}

pub fn routes(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(health)
}

/// Ready once the pool has been read, whatever happens to the API server afterwards.
async fn ready(State(health): State<Health>) -> Response {
    if health.draining.load(Ordering::Relaxed) {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response();
    }
    if !health.gateway.fleet.synced() {
        return (StatusCode::SERVICE_UNAVAILABLE, "the pool has not been read from the API server yet\n")
            .into_response();
    }
    "ok\n".into_response()
}

async fn metrics(State(health): State<Health>) -> Response {
    let in_flight = &health.gateway.in_flight;
    match health.gateway.metrics.text(&in_flight.by_model(), in_flight.queued()) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
