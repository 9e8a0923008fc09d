//! Routes that change or show what the engine holds.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::Request;
use axum::response::Response;
use lorafleet_crds::wire::{BaseReport, LoadRequest, Placement, Report, Role, UnloadRequest};
use serde::Deserialize;

use super::{App, body, from_json, json};
use crate::refusal::Refusal;
use crate::report;

pub async fn load(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, Refusal> {
    app.keys.admin(request.headers())?;
    let _open = app.requests.enter()?;
    let most = app.fleet.engine().limits.max_body_bytes;
    let request: LoadRequest = from_json(&body(request, most, &app.orders).await?.bytes)?;
    let reply = app.fleet.load(request).await?;
    Ok(json(200, &reply))
}

pub async fn unload(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, Refusal> {
    app.keys.admin(request.headers())?;
    let most = app.fleet.engine().limits.max_body_bytes;
    let request: UnloadRequest = from_json(&body(request, most, &app.orders).await?.bytes)?;
    let digests = app.fleet.unload(&request.lora_name)?;
    Ok(json(200, &serde_json::json!({ "lora_name": request.lora_name, "digests": digests })))
}

pub async fn place(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, Refusal> {
    app.keys.admin(request.headers())?;
    let received = body(request, app.fleet.engine().limits.max_placement_bytes, &app.placements).await?;
    let placing = app.clone();
    // Large ones take a while to read, and they are written to disk.
    let placed = tokio::task::spawn_blocking(move || placing.fleet.place(from_json::<Placement>(&received.bytes)?));
    placed.await.unwrap_or_else(|error| Err(Refusal::new(500, "Internal", error.to_string())))?;
    Ok(json(200, &describe(&app)))
}

/// Of a report: the holdings that the asker knows already.
#[derive(Deserialize)]
pub struct Known {
    #[serde(default)]
    known: String,
}

pub async fn report(
    State(app): State<Arc<App>>,
    known: Result<Query<Known>, QueryRejection>,
    request: Request<Body>,
) -> Result<Response, Refusal> {
    app.keys.client(request.headers())?;
    let Query(Known { known }) = known.map_err(|error| Refusal::invalid("known", error.body_text()))?;
    let mut report = describe(&app);
    if report.holdings == known {
        report.unchanged = true;
        report.adapters.clear();
        report.aliases.clear();
    }
    Ok(json(200, &report))
}

fn describe(app: &App) -> Report {
    let ready = app.fleet.is_ready();
    let snapshot = app.fleet.engine().snapshot();
    let catalog = app.fleet.catalog();
    let adapters = report::adapters(&catalog, &snapshot, Instant::now());
    let aliases = catalog.names.aliases().clone();
    Report {
        boot_id: app.fleet.boot_id.clone(),
        generation: catalog.placement.as_ref().map_or(0, |placement| placement.generation),
        revision: catalog.placement.as_ref().map(|placement| placement.revision.clone()).unwrap_or_default(),
        ready,
        draining: app.requests.is_closed(),
        base: BaseReport {
            name: app.base.name.clone(),
            digest: app.base.digest,
            origin: Some(app.base.origin),
            max_model_tokens: app.fleet.engine().limits.max_model_tokens,
        },
        role: Role::Shared,
        budgets: app.fleet.budgets(&snapshot),
        load: report::load(&snapshot),
        holdings: report::holdings(&adapters, &aliases),
        unchanged: false,
        adapters,
        aliases,
    }
}
