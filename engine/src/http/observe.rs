//! Routes that show: models, metrics, health.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use crate::exposition;
use crate::refusal::Refusal;

const SILENCE_MAX: Duration = Duration::from_secs(60);

pub async fn models(State(app): State<Arc<App>>) -> Response {
    let limits = &app.fleet.engine().limits;
    let base = json!({
        "id": app.base.name,
        "object": "model",
        "created": app.started_unix,
        "owned_by": "lorafleet",
        "root": app.base.name,
        "parent": null,
        "max_model_len": limits.max_model_tokens,
        "digest": app.base.digest,
    });
    let snapshot = app.fleet.engine().snapshot();
    let catalog = app.fleet.catalog();
    let adapter = |id: &str, name: &str, digest: &lorafleet_artifact::Digest| {
        json!({
            "id": id,
            "object": "model",
            "created": app.started_unix,
            "owned_by": "lorafleet",
            "root": name,
            "parent": app.base.name,
            "max_model_len": limits.max_model_tokens,
            "digest": digest,
            "rank": snapshot.facts(digest).map(|facts| facts.rank).filter(|rank| *rank > 0),
        })
    };
    let mut models = vec![base];
    models.extend(catalog.names.aliases().iter().map(|(name, digest)| adapter(name, name, digest)));
    // Versions beside the one that the bare name means can be asked for by their digest.
    let others = catalog.names.versions().filter(|(name, digest)| catalog.names.aliases().get(*name) != Some(digest));
    models.extend(others.map(|(name, digest)| adapter(&format!("{name}@{}", digest.short()), name, &digest)));
    super::json(200, &json!({ "object": "list", "data": Value::Array(models) }))
}

/// Healthy: the step loop goes round. Only while there is something to do, and only after a time that no step takes.
pub async fn healthz(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let (silent, open) = (app.meter.silent(), app.fleet.engine().open_sequences());
    if open > 0 && silent > SILENCE_MAX {
        let message =
            format!("{open} sequences are open and no step has ended for {silent:?}, the limit is {SILENCE_MAX:?}");
        return Err(Refusal::new(503, "StepsHang", message));
    }
    Ok(super::json(200, &json!({ "status": "ok" })))
}

/// Ready: takes traffic. Not while draining, and not before each adapter with a floor is there or has failed.
pub async fn readyz(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    if app.draining.load(Ordering::Acquire) {
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
