//! The HTTP side: routes, bodies, keys. Tasks here enqueue and stream; they never touch the state.

mod admin;
mod answer;
mod ask;
mod auth;
mod fields;
mod generate;
mod observe;
mod open;
mod shapes;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use futures::StreamExt as _;
use lorafleet_listen::{Full, NotReceived, Price, Received, Room, receive};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use crate::fleet::Fleet;
use crate::metrics::Meter;
use crate::refusal::Refusal;
use crate::text::Text;

pub use auth::{KeyError, Keys};
pub use open::{OpenRequest, OpenRequests};

/// What all routes share.
pub struct App {
    pub fleet: Fleet,
    pub text: Arc<Text>,
    pub base: Base,
    pub keys: Keys,
    pub meter: Arc<Meter>,
    /// Those that compute or load something.
    pub requests: OpenRequests,
    /// What the bodies of requests may take together until they are understood; placements apart.
    pub bodies: Room,
    pub placements: Room,
    /// For the other routes of whoever has the admin key: no client stands in their way.
    pub orders: Room,
    /// Requests that may be made into tokens at once.
    pub parsers: Arc<Semaphore>,
    /// Numbers the prompts, so that choices of one prompt can share its pages.
    pub groups: AtomicU64,
    /// Seconds since 1970.
    pub started_unix: u64,
}

/// The base model as clients see it.
#[derive(Clone, Debug)]
pub struct Base {
    pub name: String,
    pub digest: lorafleet_artifact::Digest,
    /// Where its files were at this start.
    pub origin: lorafleet_crds::wire::Tier,
    pub vocabulary: u32,
    /// No longer text fits the context.
    pub text_bytes_max: usize,
    /// What the model was made for; `Limits::max_model_tokens` is what is served.
    pub context: u32,
}

/// A body that does not arrive within this time ends its request.
const BODY_TIME_MAX: Duration = Duration::from_secs(30);
/// Bodies are parsed as they are. Small ones go on while large ones, perhaps slow, take all the room.
const BODY_PRICE: Price = Price { free_bytes: 8 << 10, copies: 1 };
/// How long the rest of a body that is too large is read and thrown away.
const DISCARD_TIME_MAX: Duration = Duration::from_secs(2);

pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completion))
        .route("/v1/models", get(observe::models))
        .route("/v1/models/{*model}", get(observe::model))
        .route("/v1/load_lora_adapter", post(admin::load))
        .route("/v1/unload_lora_adapter", post(admin::unload))
        .route("/v1/placement", put(admin::place))
        .route("/v1/lora_adapters", get(admin::report))
        .route("/metrics", get(observe::metrics))
        .route("/healthz", get(observe::healthz))
        .route("/readyz", get(observe::readyz))
        .fallback(async |request: Request<Body>| {
            let path = crate::refusal::shown(request.uri().path());
            Refusal::new(404, "RouteNotFound", format!("there is no route {} {path}", request.method())).into_response()
        })
        .method_not_allowed_fallback(async |request: Request<Body>| {
            let path = crate::refusal::shown(request.uri().path());
            let message = format!("{path} does not take {}", request.method());
            Refusal::new(405, "MethodNotAllowed", message).into_response()
        })
        .layer(axum::middleware::from_fn_with_state(app.clone(), count))
        .with_state(app)
}

/// Counts replies by route and status; the path is matched against the known routes, so it is no free label.
async fn count(State(app): State<Arc<App>>, request: Request<Body>, next: axum::middleware::Next) -> Response {
    const ROUTES: [&str; 10] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/placement",
        "/v1/lora_adapters",
        "/metrics",
        "/healthz",
        "/readyz",
    ];
    let route = ROUTES.into_iter().find(|route| *route == request.uri().path()).unwrap_or("other");
    let response = next.run(request).await;
    app.meter.replied(route, response.status().as_u16());
    response
}

/// The whole body, within the limits of size and time.
///
/// # Errors
/// 413 above the limit, 408 if it takes too long, 429 if the bodies of other requests fill the room.
async fn body(request: Request<Body>, most: usize, room: &Room) -> Result<Received, Refusal> {
    let declared = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if let Some(bytes) = declared.filter(|bytes: &usize| *bytes > most) {
        // A client that waits for `100 Continue` has sent nothing yet, and shall not.
        if !request.headers().contains_key(header::EXPECT) {
            discard(request.into_body(), most).await;
        }
        return Err(too_large(bytes, most));
    }
    let pieces = request.into_body().into_data_stream();
    match tokio::time::timeout(BODY_TIME_MAX, receive(pieces, most, room, BODY_PRICE)).await {
        Ok(received) => received.map_err(|error| match error {
            NotReceived::TooLarge { bytes } => too_large(bytes, most),
            NotReceived::NoRoom(Full { bytes, .. }) => {
                Refusal::busy(format!("the bodies of other requests take all the room there is, {bytes} bytes"))
            }
            NotReceived::Broken(error) => {
                Refusal::new(400, "InvalidRequest", format!("the body could not be read: {error}"))
            }
        }),
        Err(_) => Err(Refusal::new(408, "BodyTimeout", format!("the body did not arrive within {BODY_TIME_MAX:?}"))),
    }
}

fn too_large(bytes: usize, most: usize) -> Refusal {
    Refusal::new(413, "BodyTooLarge", format!("the body has {bytes} bytes or more, the limit is {most}"))
}

/// Reads on for a moment, so that a client that is still sending hears the refusal and not a broken connection.
async fn discard(body: Body, most: usize) {
    let mut pieces = body.into_data_stream();
    let mut left = most.saturating_mul(4);
    let drain = async {
        while let Some(Ok(piece)) = pieces.next().await
            && left > 0
        {
            left = left.saturating_sub(piece.len());
        }
    };
    // Whoever takes longer gets the broken connection.
    let _ = tokio::time::timeout(DISCARD_TIME_MAX, drain).await;
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(bytes)
        .map_err(|error| Refusal::new(400, "InvalidRequest", format!("the body is not what this route takes: {error}")))
}

fn json<T: Serialize>(status: u16, value: &T) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], bytes).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "a reply could not be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = json(self.status, &self.envelope());
        if let Some(seconds) = self.retry_after_seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == 401 {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
