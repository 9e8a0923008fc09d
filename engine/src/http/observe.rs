//! Routes that show: models, metrics, health.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use lorafleet_artifact::Digest;
use serde_json::{Value, json};

use super::App;
use crate::exposition;
use crate::names::Resolved;
use crate::refusal::Refusal;
use crate::snapshot::Snapshot;

pub async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, Refusal> {
    app.keys.client(&headers)?;
    let adapters = {
        let catalog = app.fleet.catalog();
        let named = catalog.names.aliases().iter().map(|(name, digest)| (name.clone(), name.clone(), *digest));
        // Versions beside the one that the bare name means can be asked for by their digest.
        let others =
            catalog.names.versions().filter(|(name, digest)| catalog.names.aliases().get(*name) != Some(digest));
        let others = others.map(|(name, digest)| (format!("{name}@{}", digest.short()), name.to_owned(), digest));
        named.chain(others).collect::<Vec<_>>()
    };
    let snapshot = app.fleet.engine().snapshot();
    let adapters = adapters.iter().map(|(id, name, digest)| adapter_model(&app, &snapshot, id, name, digest));
    let models: Vec<Value> = [base_model(&app)].into_iter().chain(adapters).collect();
    Ok(super::json(200, &json!({ "object": "list", "data": models })))
}

/// One model by any name that a request may give it.
pub async fn model(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    app.keys.client(&headers)?;
    let resolved = app.fleet.resolve(&id)?;
    Ok(super::json(
        200,
        &match resolved {
            Resolved::Base => base_model(&app),
            Resolved::Adapter { name, digest } => {
                adapter_model(&app, &app.fleet.engine().snapshot(), &id, &name, &digest)
            }
        },
    ))
}

fn base_model(app: &App) -> Value {
    json!({
        "id": app.base.name,
        "object": "model",
        "created": app.started_unix,
        "owned_by": "lorafleet",
        "root": app.base.name,
        "parent": null,
        "max_model_len": app.fleet.engine().limits.max_model_tokens,
        "digest": app.base.digest,
    })
}

fn adapter_model(app: &App, snapshot: &Snapshot, id: &str, name: &str, digest: &Digest) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": app.started_unix,
        "owned_by": "lorafleet",
        "root": name,
        "parent": app.base.name,
        "max_model_len": app.fleet.engine().limits.max_model_tokens,
        "digest": digest,
        "rank": snapshot.facts(digest).map(|facts| facts.rank).filter(|rank| *rank > 0),
    })
}

/// Healthy: the step loop goes round. Only while there is something to do, and only after a time that no step takes.
pub async fn healthz(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let (silent, open) = (app.meter.silent(), app.fleet.engine().queue.taken());
    let most = app.fleet.engine().limits.silence_max;
    if open > 0 && silent > most {
        let message = format!("{open} sequences are open and no step has ended for {silent:?}, the limit is {most:?}");
        return Err(Refusal::new(503, "StepsHang", message));
    }
    Ok(super::json(200, &json!({ "status": "ok" })))
}

/// Ready: takes traffic. Not while draining, and not before each adapter with a floor is there or has failed.
pub async fn readyz(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    if app.requests.is_closed() {
        return Err(Refusal::draining());
    }
    if !app.fleet.is_ready() {
        let message = "adapters with a floor are still on their way, or no placement has come yet";
        return Err(Refusal { retry_after_seconds: Some(1), ..Refusal::new(503, "NotReady", message) });
    }
    Ok(super::json(200, &json!({ "status": "ready" })))
}

pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let now_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let snapshot = app.fleet.engine().snapshot();
    let own = exposition::text(&app.fleet.catalog().names, &snapshot, &app.fleet.engine().limits, now_unix_s);
    let counted = app.meter.text().map_err(|error| Refusal::new(500, "Internal", error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], own + &counted).into_response())
}
