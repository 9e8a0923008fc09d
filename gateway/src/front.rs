//! The routes that clients see. `complete` is a request's way from its first byte to its last.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use lorafleet_listen::{Full, NotReceived, Room, receive};
use tokio_util::sync::CancellationToken;

use crate::body::{self, Inspected};
use crate::error::{Code, Refusal};
use crate::fleet::Fleet;
use crate::headers;
use crate::keys::{Client, Keys};
use crate::limits::{Limits, REQUEST_PRICE};
use crate::load::InFlight;
use crate::metrics::Metrics;
use crate::models;
use crate::relay::{Meter, Wish, relay};
use crate::resolve::{Permitted, Target, resolve};
use crate::upstream::{Answering, NoAnswer, Outgoing, Upstream};

/// How far what an alias means here may lag behind the pods.
const ALIAS_LAG: Duration = Duration::from_millis(200);

/// Everything that a request needs; one per process.
pub struct Gateway {
    pub limits: Limits,
    pub fleet: Arc<Fleet>,
    pub secrets: Secrets,
    pub in_flight: Arc<InFlight>,
    pub metrics: Arc<Metrics>,
    pub upstream: Upstream,
    /// For bodies of requests.
    pub bodies: Room,
    /// For answers that are no streams.
    pub replies: Room,
    /// Ends what is still under way when the time to drain is over.
    pub stop: CancellationToken,
}

/// What is read from mounted Secrets, and read again when they change.
pub struct Secrets {
    /// `None`: no folder of API keys was given, and every client may use every model.
    pub api_keys: Option<tokio::sync::watch::Receiver<Arc<Keys>>>,
    /// `Authorization` for the engines.
    pub engine_key: tokio::sync::watch::Receiver<Option<HeaderValue>>,
}

impl Secrets {
    /// Who asks, or a 401. Without keys everybody is one client.
    fn client(&self, headers: &HeaderMap) -> Result<Client, Refusal> {
        let Some(keys) = &self.api_keys else {
            return Ok(Client { name: "everybody".to_owned(), permitted: Permitted::All });
        };
        let refused = |message| Refusal::new(Code::InvalidKey, message);
        let presented =
            headers::bearer(headers).ok_or_else(|| refused("an API key is missing: Authorization: Bearer KEY"))?;
        keys.borrow().find(presented).cloned().ok_or_else(|| refused("the API key is not known"))
    }
}

/// The routes of the front door.
pub fn routes(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(complete))
        .route("/v1/completions", post(complete))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*model}", get(show_model))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(axum::middleware::from_fn(with_request_id))
        .with_state(gateway)
}

/// Every request has an id, its client's or a new one, and every answer says it.
async fn with_request_id(mut request: Request, next: Next) -> Response {
    let id = headers::request_id(request.headers(), crate::random_u128());
    request.headers_mut().insert(headers::REQUEST_ID, id.clone());
    let mut answer = next.run(request).await;
    answer.headers_mut().insert(headers::REQUEST_ID, id);
    answer
}

async fn complete(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let answered = tokio::select! {
        // First, so that nobody is sent to a pod in the place of one who has just been told.
        biased;
        () = gateway.stop.cancelled() => Err(stopped().into()),
        answered = try_complete(&gateway, request) => answered,
    };
    match answered {
        Ok(answer) => answer,
        Err(NoAnswer::Said(answer)) => {
            let (head, body) = answer.into_parts();
            let mut answer = Response::new(Body::new(body));
            *answer.status_mut() = head.status;
            *answer.headers_mut() = headers::downstream(&head.headers);
            answer
        }
        Err(NoAnswer::Refused(refusal)) => refuse(&gateway, refusal),
    }
}

/// A request whose client is known and whose body is understood.
struct Asked {
    client: Client,
    head: http::request::Parts,
    /// Holds its room until the answer begins.
    body: Bytes,
    inspected: Inspected,
}

async fn try_complete(gateway: &Gateway, request: Request) -> Result<Response, NoAnswer> {
    let limits = &gateway.limits;
    let client = gateway.secrets.client(request.headers())?;
    let mut counted = Vec::new();
    if gateway.secrets.api_keys.is_some() {
        counted.push(gateway.in_flight.client(&client.name, limits)?);
    }
    let (head, body) = request.into_parts();
    // A place is for who has said what he wants: the places of those who say it slowly are their connections.
    let body = read_body(body, gateway).await?;
    let place = gateway.in_flight.place(limits).await?;
    let inspected = body::inspect(&body).map_err(Refusal::from)?;
    if !gateway.fleet.synced() {
        return Err(Refusal::new(Code::NotSynced, "the gateway has not read its pool from the API server yet").into());
    }
    let asked = Asked { client, head, body, inspected };
    let target = asked.resolve(gateway)?;
    counted.push(gateway.in_flight.model(target.name(), limits)?);
    let mut meter = Meter::new(gateway, target.name(), place, counted);
    let answering = asked.offer(gateway, target).await.inspect_err(|no_answer| match no_answer {
        NoAnswer::Refused(refusal) => meter.refused(refusal.code.status().as_u16(), refusal.code),
        NoAnswer::Said(answer) => meter.answered(answer.status().as_u16()),
    })?;
    let request_id = asked.head.headers.get(headers::REQUEST_ID);
    tracing::debug!(client = asked.client.name, pod = answering.pod, ?request_id, "answering");
    let wish = asked.wish();
    drop(asked);
    Ok(relay(answering, wish, meter, gateway).await)
}

impl Asked {
    fn resolve(&self, gateway: &Gateway) -> Result<Target, Refusal> {
        Ok(resolve(&gateway.fleet.view(), &self.client.permitted, &self.inspected.model)?)
    }

    /// A pod that begins to answer. An adapter may be Ready in the API server a moment before this gateway has heard it from
    /// the pods, and a name may come to mean another version while the request is on its way: what no pod seems to hold is
    /// refused only after all have been asked again.
    async fn offer(&self, gateway: &Gateway, target: Target) -> Result<Answering, NoAnswer> {
        let mut offered = self.offer_once(gateway, &target).await;
        if !is_unheard(&offered) {
            return offered;
        }
        let mut hearing = gateway.fleet.hear();
        let mut asked = target;
        while is_unheard(&offered) && hearing.next().await {
            asked = self.resolve(gateway)?;
            offered = self.offer_once(gateway, &asked).await;
        }
        if is_unheard(&offered) {
            tokio::time::sleep(ALIAS_LAG).await;
            let now = self.resolve(gateway)?;
            if now != asked {
                return self.offer_once(gateway, &now).await;
            }
        }
        offered
    }

    async fn offer_once(&self, gateway: &Gateway, target: &Target) -> Result<Answering, NoAnswer> {
        let engine_key = gateway.secrets.engine_key.borrow().clone();
        let model = target.wire_model();
        let outgoing = Outgoing {
            target,
            path: self.head.uri.path(),
            headers: headers::upstream(&self.head.headers, engine_key.as_ref()),
            body: body::rewrite(&self.body, &self.inspected, model.as_deref(), self.inspected.stream).into(),
        };
        let Gateway { upstream, fleet, in_flight, metrics, limits, .. } = gateway;
        upstream.offer(fleet, in_flight, metrics, limits, &outgoing).await
    }

    fn wish(&self) -> Wish {
        Wish { stream: self.inspected.stream, hide_usage: self.inspected.stream && !self.inspected.include_usage }
    }
}

fn is_unheard(offered: &Result<Answering, NoAnswer>) -> bool {
    matches!(offered, Err(NoAnswer::Refused(refusal)) if refusal.code == Code::AdapterNotReady)
}

async fn read_body(body: Body, gateway: &Gateway) -> Result<Bytes, Refusal> {
    let Gateway { limits, bodies, .. } = gateway;
    let max = usize::try_from(limits.max_body_bytes).unwrap_or(usize::MAX);
    let received = receive(body.into_data_stream(), max, bodies, REQUEST_PRICE);
    match tokio::time::timeout(limits.body_timeout_seconds, received).await {
        Ok(Ok(body)) => Ok(Bytes::from_owner(body)),
        Ok(Err(NotReceived::TooLarge { .. })) => {
            Err(Refusal::new(Code::BodyTooLarge, format!("the body is above the limit of {max} bytes")))
        }
        Ok(Err(NotReceived::NoRoom(Full { bytes, .. }))) => {
            let message = format!("the bodies of other requests take all the room there is, {bytes} bytes");
            Err(Refusal::new(Code::Busy, message))
        }
        Ok(Err(NotReceived::Broken(error))) => {
            Err(Refusal::new(Code::InvalidRequest, format!("the body cannot be read: {error}")))
        }
        Err(_) => {
            let seconds = limits.body_timeout_seconds.as_secs_f64();
            Err(Refusal::new(Code::BodyTimeout, format!("the body did not come within {seconds:.1} seconds")))
        }
    }
}

async fn list_models(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    match gateway.secrets.client(&headers) {
        Ok(client) => json(&models::list(&gateway.fleet.view(), &client.permitted)),
        Err(refusal) => refuse(&gateway, refusal),
    }
}

async fn show_model(
    State(gateway): State<Arc<Gateway>>,
    model: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    let shown = gateway.secrets.client(&headers).and_then(|client| {
        let view = gateway.fleet.view();
        let Path(model) = model.map_err(|error| Refusal::new(Code::ModelNotFound, error.body_text()))?;
        let target = resolve(&view, &client.permitted, &model)?;
        Ok(json(&models::show(&view, &target)))
    });
    shown.unwrap_or_else(|refusal| refuse(&gateway, refusal))
}

async fn no_route(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let path: String = request.uri().path().chars().take(80).collect();
    refuse(&gateway, Refusal::new(Code::RouteNotFound, format!("there is no route {path}")))
}

async fn no_method(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let message = format!("{} does not take {}", request.uri().path(), request.method());
    refuse(&gateway, Refusal::new(Code::MethodNotAllowed, message))
}

/// What everybody is told whose answer the end of the process cuts off.
pub fn stopped() -> Refusal {
    Refusal::new(Code::Draining, "the gateway stops and this request has had its time")
}

fn refuse(gateway: &Gateway, refusal: Refusal) -> Response {
    gateway.metrics.refused(refusal.code);
    tracing::debug!(error = %refusal, "refused");
    refusal.into_response()
}

fn json(value: &serde_json::Value) -> Response {
    let head = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (head, value.to_string()).into_response()
}
