//! One request to one pod, and the choice of the next pod while nothing has been sent to the client.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use lorafleet_crds::wire::ErrorEnvelope;

use crate::error::{Code, Refusal};
use crate::fleet::Fleet;
use crate::limits::Limits;
use crate::load::{Counted, InFlight};
use crate::metrics::{Metrics, RetryCause};
use crate::resolve::Target;
use crate::route::{Choice, NowhereReady, RouteRequest, Unfit, route};

/// Longest answer of a pod that is read only to be passed on if every other pod fails too.
const FAILURE_BYTES_MAX: usize = 64 << 10;
const IDLE_CONNECTIONS_PER_POD_MAX: usize = 64;

/// Client of all pods, with its pool of connections.
#[derive(Clone)]
pub struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
    answer_timeout: Duration,
}

/// What is sent to a pod; cheap to send again.
pub struct Outgoing<'a> {
    pub target: &'a Target,
    pub path: &'a str,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// A pod whose answer has begun.
pub struct Answering {
    pub pod: String,
    pub response: Response<Incoming>,
    pub counted: Option<Counted>,
}

/// A pod that could not take the request, so that another may. Nothing has reached the client.
struct Failed {
    cause: RetryCause,
    answer: Response<Full<Bytes>>,
}

/// Why there is no answer to relay.
pub enum NoAnswer {
    Refused(Refusal),
    /// What the last pod said.
    Said(Response<Full<Bytes>>),
}

impl From<Refusal> for NoAnswer {
    fn from(refusal: Refusal) -> Self {
        NoAnswer::Refused(refusal)
    }
}

impl Upstream {
    pub fn new(limits: &Limits) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(limits.connect_timeout_seconds));
        connector.set_nodelay(true);
        connector.set_keepalive(Some(Duration::from_secs(15)));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(IDLE_CONNECTIONS_PER_POD_MAX)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self { client, answer_timeout: limits.answer_timeout_seconds }
    }

    /// Offers a request to pods, best first, until one begins to answer.
    ///
    /// Another pod is tried only if the first could not be connected to, did not take the gateway's key, or said 503
    /// (draining), 429 (busy), 409 (it serves something else) or, of an adapter, 404 (it does not hold it): then it has
    /// computed nothing. A pod that breaks off later may have, so that the client decides.
    pub async fn offer(
        &self,
        fleet: &Fleet,
        in_flight: &std::sync::Arc<InFlight>,
        metrics: &Metrics,
        limits: &Limits,
        outgoing: &Outgoing<'_>,
    ) -> Result<Answering, NoAnswer> {
        let mut excluded = BTreeSet::new();
        let mut failures: Vec<Failed> = Vec::new();
        while failures.len() < limits.max_attempts as usize {
            let choice = match choose(fleet, in_flight, outgoing, &excluded) {
                Ok(choice) => choice,
                Err(refusal) => return Err(last_word(failures, refusal)),
            };
            if let Some(failed) = failures.last() {
                metrics.retried(failed.cause);
            }
            let counted = in_flight.pod(&choice.pod);
            match self.send(&choice, outgoing).await? {
                Ok(response) => return Ok(Answering { pod: choice.pod, response, counted }),
                Err(failed) => {
                    tracing::warn!(pod = choice.pod, cause = ?failed.cause, "a pod could not take a request");
                    excluded.insert(choice.pod);
                    failures.push(failed);
                }
            }
        }
        let pods = excluded.into_iter().map(|pod| (pod, Unfit::Tried)).collect();
        Err(last_word(failures, NowhereReady { target: outgoing.target.clone(), pods }.into()))
    }

    /// The head of the answer (also an error that another pod would give as well), or that another pod may be tried.
    async fn send(
        &self,
        choice: &Choice,
        outgoing: &Outgoing<'_>,
    ) -> Result<Result<Response<Incoming>, Failed>, Refusal> {
        let mut request = Request::new(Full::new(outgoing.body.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri(choice.address, outgoing.path)?;
        *request.headers_mut() = outgoing.headers.clone();
        let pod = &choice.pod;
        let response = match tokio::time::timeout(self.answer_timeout, self.client.request(request)).await {
            Err(_) => {
                let seconds = self.answer_timeout.as_secs_f64();
                return Err(Refusal::new(
                    Code::EngineTimeout,
                    format!("pod {pod} gave no answer within {seconds:.1} seconds"),
                ));
            }
            Ok(Err(error)) if error.is_connect() => {
                let message = format!("pod {pod} cannot be connected to: {}", cause_of(&error));
                return Ok(Err(Failed { cause: RetryCause::Connect, answer: refusal_answer(&message) }));
            }
            Ok(Err(error)) => {
                let message = format!("pod {pod} broke the connection before it answered: {}", cause_of(&error));
                return Err(Refusal::new(Code::EngineLost, message));
            }
            Ok(Ok(response)) => response,
        };
        let of_adapter = matches!(outgoing.target, Target::Adapter { .. });
        if !may_be_offered_again(response.status(), of_adapter) {
            return Ok(Ok(response));
        }
        let (head, body) = response.into_parts();
        let limited = http_body_util::Limited::new(body, FAILURE_BYTES_MAX).collect();
        let body = match tokio::time::timeout(Duration::from_secs(2), limited).await {
            Ok(Ok(body)) => Some(body.to_bytes()),
            _ => None,
        };
        let said = body.as_deref().and_then(|body| serde_json::from_slice::<ErrorEnvelope>(body).ok());
        let cause = cause(head.status, said.as_ref().map(|said| said.error.code.as_str()));
        let answer = match body {
            // The gateway's key, not the client's: one of the two has not read the new one yet.
            _ if cause == RetryCause::Denied => refusal_answer(&format!("pod {pod} does not take the gateway's key")),
            Some(body) => Response::from_parts(head, Full::new(body)),
            None => refusal_answer(&format!("pod {pod} answered {} and no more", head.status)),
        };
        Ok(Err(Failed { cause, answer }))
    }

    /// One bounded GET, for the pods' reports.
    pub async fn get(
        &self,
        address: SocketAddr,
        path: &str,
        headers: HeaderMap,
        bytes_max: usize,
    ) -> Result<Bytes, String> {
        let mut request = Request::new(Full::new(Bytes::new()));
        *request.uri_mut() = uri(address, path).map_err(|refusal| refusal.message)?;
        *request.headers_mut() = headers;
        let response = self.client.request(request).await.map_err(|error| cause_of(&error))?;
        if response.status() != StatusCode::OK {
            return Err(format!("{path} answered {}", response.status()));
        }
        let body = http_body_util::Limited::new(response.into_body(), bytes_max).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| format!("{path}: {error}"))
    }
}

/// Whether a pod that answers with this status has computed nothing, and another pod may do better.
fn may_be_offered_again(status: StatusCode, of_adapter: bool) -> bool {
    match status {
        StatusCode::NOT_FOUND => of_adapter,
        StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::CONFLICT
        | StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN => true,
        _ => false,
    }
}

/// Why such a pod did not take the request, by its status and by the `code` of its error.
fn cause(status: StatusCode, code: Option<&str>) -> RetryCause {
    match (status, code) {
        (StatusCode::NOT_FOUND, None | Some("ModelNotFound")) => RetryCause::NotHeld,
        // A fault of the adapter's source, not of the key.
        (StatusCode::FORBIDDEN, Some("SourceForbidden" | "SourceDenied")) => RetryCause::Unavailable,
        (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => RetryCause::Denied,
        (StatusCode::TOO_MANY_REQUESTS, _) => RetryCause::Busy,
        (StatusCode::CONFLICT, _) => RetryCause::Conflict,
        _ => RetryCause::Unavailable,
    }
}

/// What the client hears when no pod took its request: the last of those that could say more than that they do not hold the
/// adapter. That alone would be a lie: it exists.
fn last_word(failures: Vec<Failed>, otherwise: Refusal) -> NoAnswer {
    let said = failures.into_iter().rev().find(|failed| failed.cause != RetryCause::NotHeld);
    said.map_or(NoAnswer::Refused(otherwise), |failed| NoAnswer::Said(failed.answer))
}

fn choose(
    fleet: &Fleet,
    in_flight: &InFlight,
    outgoing: &Outgoing<'_>,
    excluded: &BTreeSet<String>,
) -> Result<Choice, Refusal> {
    let request = RouteRequest {
        target: outgoing.target,
        prompt_tokens: outgoing.body.len() as u64 / 4,
        excluded,
        outstanding: &in_flight.by_pod(),
        draw: crate::random_u64(),
    };
    let choice = route(&fleet.view(), &request, fleet.now_ms())?;
    let reasons = || choice.reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(" | ");
    tracing::debug!(target = %outgoing.target, pod = choice.pod, reasons = reasons(), "routed");
    Ok(choice)
}

fn refusal_answer(message: &str) -> Response<Full<Bytes>> {
    use axum::response::IntoResponse as _;
    let refusal = Refusal::new(Code::EngineUnreachable, message);
    let json = refusal.json();
    refusal.into_response().map(|_| Full::new(json))
}

fn uri(address: SocketAddr, path: &str) -> Result<Uri, Refusal> {
    format!("http://{address}{path}").parse().map_err(|error| {
        Refusal::new(Code::Internal, format!("no address of a pod from {address} and {path}: {error}"))
    })
}

/// The innermost cause, which is what the operating system or the peer did.
fn cause_of(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
