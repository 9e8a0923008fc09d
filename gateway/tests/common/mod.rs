//! A real gateway on a real socket, its view made by hand, with pods that behave as a test wants.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may say what it expects plainly")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use clap::Parser;
use futures::StreamExt as _;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterState, Load, Role, Tier};
use lorafleet_gateway::fleet::Fleet;
use lorafleet_gateway::front::{self, Gateway, Secrets};
use lorafleet_gateway::limits::Limits;
use lorafleet_gateway::load::InFlight;
use lorafleet_gateway::metrics::Metrics;
use lorafleet_gateway::upstream::Upstream;
use lorafleet_gateway::view::{AdapterView, FleetView, Holding, Holdings, PodReport, PodView};
use lorafleet_listen::Room;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// Longer than anything takes on the slowest of machines: a test that waits so long has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Digest of the adapter `support`.
pub const SUPPORT: Digest = Digest::from_bytes([0xa1; 32]);

/// Limits as the command line gives them, with some changed.
pub fn limits(flags: &[&str]) -> Limits {
    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        limits: Limits,
    }
    Flags::parse_from(["test"].iter().chain(flags)).limits
}

/// How a pod behaves.
#[derive(Clone)]
pub enum Behaviour {
    /// Answers with what it got, as JSON with usage.
    Echo,
    /// Answers with JSON of so many bytes.
    Large(usize),
    /// Streams two events; the second waits for the notification.
    Stream(Arc<Notify>),
    /// Streams this text at once and ends well.
    Text(&'static str),
    /// Streams one event, then breaks the connection.
    DieInStream,
    /// Sends half a JSON answer, then breaks the connection.
    DieInAnswer,
    /// Sends half a JSON answer, then nothing.
    StallInAnswer,
    /// Streams one event, then nothing.
    Stall,
    /// Streams a whole answer, then nothing: its body does not end.
    Linger,
    /// Never answers.
    Silent,
    Status(u16),
    /// Answers as an engine that does not know the adapter.
    NotHeld,
    /// Streams without end as fast as it is read.
    Flood,
}

/// A pod that listens.
#[derive(Clone)]
pub struct Pod {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
    /// Keeps the port of a pod that does not listen from all others.
    _bound: Option<Arc<TcpSocket>>,
}

/// What a pod has seen.
#[derive(Default)]
pub struct Seen {
    pub requests: AtomicUsize,
    /// Answers whose client went away before their end.
    pub dropped: AtomicUsize,
    pub last: Mutex<Option<(HeaderMap, Bytes)>>,
}

impl Seen {
    pub fn count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub fn last_body(&self) -> String {
        let last = self.last.lock().unwrap();
        String::from_utf8(last.as_ref().unwrap().1.to_vec()).unwrap()
    }

    pub fn last_header(&self, name: &str) -> Option<String> {
        let last = self.last.lock().unwrap();
        last.as_ref().unwrap().0.get(name).map(|value| value.to_str().unwrap().to_owned())
    }
}

pub const EVENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
pub const USAGE_EVENT: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";
pub const DONE: &str = "data: [DONE]\n\n";

/// Starts a pod.
pub async fn pod(behaviour: Behaviour) -> Pod {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Seen::default());
    let routes = Router::new().fallback(answer).with_state((behaviour, Arc::clone(&seen)));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Pod { address, seen, _bound: None }
}

/// A pod that refuses connections.
pub async fn dead_pod() -> Pod {
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    Pod { address: bound.local_addr().unwrap(), seen: Arc::default(), _bound: Some(Arc::new(bound)) }
}

struct DropCounter(Arc<Seen>, bool);

impl Drop for DropCounter {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn echo(body: &Bytes) -> Response {
    let body = format!(
        r#"{{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":7}},"echo":{}}}"#,
        String::from_utf8_lossy(body)
    );
    ([(header::CONTENT_TYPE, "application/json"), (HEADER_ADAPTER, "support@a1a1a1a1a1a1")], body).into_response()
}

async fn answer(State((behaviour, seen)): State<(Behaviour, Arc<Seen>)>, headers: HeaderMap, body: Bytes) -> Response {
    seen.requests.fetch_add(1, Ordering::SeqCst);
    *seen.last.lock().unwrap() = Some((headers, body.clone()));
    let at_once = matches!(behaviour, Behaviour::Echo | Behaviour::Large(_) | Behaviour::Text(_));
    let counter =
        DropCounter(Arc::clone(&seen), at_once || matches!(behaviour, Behaviour::Status(_) | Behaviour::NotHeld));
    match behaviour {
        Behaviour::Echo => echo(&body),
        Behaviour::Large(bytes) => {
            ([(header::CONTENT_TYPE, "application/json")], format!("\"{}\"", "x".repeat(bytes - 2))).into_response()
        }
        Behaviour::Text(text) => events(futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from(text))])),
        Behaviour::Stream(notify) => events(futures::stream::unfold((0, counter), move |(step, mut counter)| {
            let notify = Arc::clone(&notify);
            async move {
                let text = match step {
                    0 => EVENT.to_owned(),
                    1 => {
                        notify.notified().await;
                        counter.1 = true;
                        [EVENT, USAGE_EVENT, DONE].concat()
                    }
                    _ => return None,
                };
                Some((Ok::<_, std::io::Error>(Bytes::from(text)), (step + 1, counter)))
            }
        })),
        Behaviour::DieInStream => {
            let half = Bytes::from(format!("{EVENT}data: {{\"cho"));
            events(futures::stream::unfold(0, move |step| {
                let half = half.clone();
                async move {
                    if step == 0 {
                        return Some((Ok(half), 1));
                    }
                    // Else the server breaks off before it has sent anything.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    Some((Err(std::io::Error::other("killed")), 2))
                }
            }))
        }
        Behaviour::DieInAnswer => {
            let parts = [Ok(Bytes::from("{\"choices\":")), Err(std::io::Error::other("killed"))];
            let body = Body::from_stream(futures::stream::iter(parts));
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Behaviour::StallInAnswer => {
            let half = futures::stream::once(std::future::ready(Ok::<_, std::io::Error>(Bytes::from("{\"choices\":"))));
            let body = Body::from_stream(half.chain(futures::stream::pending()));
            ([(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Behaviour::Stall => once(EVENT.to_owned(), counter),
        Behaviour::Linger => once([EVENT, USAGE_EVENT, DONE].concat(), counter),
        Behaviour::Silent => {
            std::future::pending::<()>().await;
            StatusCode::OK.into_response()
        }
        Behaviour::Status(status) => error(status, &format!("Told{status}")),
        Behaviour::NotHeld => error(404, "ModelNotFound"),
        Behaviour::Flood => events(futures::stream::unfold(counter, |counter| async move {
            Some((Ok::<_, std::io::Error>(Bytes::from(EVENT.repeat(1000))), counter))
        })),
    }
}

fn error(status: u16, code: &str) -> Response {
    let body = format!(r#"{{"error":{{"message":"as told","type":"t","param":null,"code":"{code}"}}}}"#);
    let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    (StatusCode::from_u16(status).unwrap(), [json, (header::RETRY_AFTER, 7.into())], body).into_response()
}

pub const HEADER_ADAPTER: http::HeaderName = http::HeaderName::from_static("x-lorafleet-adapter");

fn events<E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static>(
    stream: impl futures::Stream<Item = Result<Bytes, E>> + Send + 'static,
) -> Response {
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(stream)).into_response()
}

/// A stream that says this and does not end.
fn once(text: String, counter: DropCounter) -> Response {
    let said = futures::stream::once(std::future::ready(Ok::<_, std::io::Error>(Bytes::from(text))));
    events(said.chain(futures::stream::pending()).inspect(move |_| _ = &counter))
}

/// A gateway that listens.
pub struct Front {
    pub gateway: Arc<Gateway>,
    pub address: SocketAddr,
    pub drain: CancellationToken,
    pub serving: tokio::task::JoinHandle<()>,
}

/// Pods named `p0`, `p1`, ... that hold the base and `support`; each later one has more requests waiting, so that they are
/// chosen in this order.
pub fn view(pods: &[&Pod], fleet: &Fleet) -> FleetView {
    let support = AdapterView { current: Some(SUPPORT), rank: 8, ..AdapterView::default() };
    let pods = pods.iter().enumerate().map(|(index, pod)| (format!("p{index}"), pod_view(pod, index, fleet)));
    FleetView {
        namespace: "demo".to_owned(),
        base: "smollm2".to_owned(),
        base_digest: None,
        base_created_unix_s: 1_700_000_000,
        adapters: Arc::new(BTreeMap::from([("support".to_owned(), support)])),
        pods: pods.collect(),
    }
}

pub fn pod_view(pod: &Pod, index: usize, fleet: &Fleet) -> PodView {
    let holding =
        Holding { digest: SUPPORT, state: AdapterState::Ready, tier: Tier::Device, bytes: 1, last_error: None };
    let report = PodReport {
        received_ms: fleet.now_ms(),
        outstanding_then: 0,
        boot_id: "boot".to_owned(),
        draining: false,
        role: Role::Shared,
        load: Load { waiting: index as u32 * 100, ..Load::default() },
        base_digest: Digest::from_bytes([0xbb; 32]),
        holdings: Arc::new(Holdings {
            adapters: BTreeMap::from([("support".to_owned(), vec![holding])]),
            ..Holdings::default()
        }),
    };
    PodView { address: pod.address, ready: true, report: Some(Arc::new(report)), poll_error: None }
}

pub async fn front(pods: &[&Pod], limits: Limits) -> Front {
    front_with(pods, limits, None).await
}

/// A front whose view lacks what its one pod holds, and that view with it.
pub async fn unheard(echo: &Pod) -> (Front, FleetView) {
    let front = front(&[echo], limits(&[])).await;
    let heard = view(&[echo], &front.gateway.fleet);
    let mut unheard = heard.clone();
    let mut report = (**unheard.pods["p0"].report.as_ref().unwrap()).clone();
    report.holdings = Arc::default();
    unheard.pods.get_mut("p0").unwrap().report = Some(Arc::new(report));
    front.gateway.fleet.publish(unheard, 0);
    (front, heard)
}

pub async fn front_with(
    pods: &[&Pod],
    limits: Limits,
    api_keys: Option<watch::Receiver<Arc<lorafleet_gateway::keys::Keys>>>,
) -> Front {
    let (_, engine_key) = watch::channel(Some(HeaderValue::from_static("Bearer engine-key")));
    let fleet = Fleet::new(PATIENCE);
    fleet.publish(view(pods, &fleet), 0);
    let gateway = Arc::new(Gateway {
        fleet,
        secrets: Secrets { api_keys, engine_key },
        in_flight: InFlight::new(&limits),
        metrics: Arc::new(Metrics::new(limits.max_metric_models as usize).unwrap()),
        upstream: Upstream::new(&limits),
        bodies: Room::new(limits.max_bodies_bytes),
        replies: Room::new(limits.max_replies_bytes),
        stop: CancellationToken::new(),
        limits: limits.clone(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let drain = CancellationToken::new();
    let serving = tokio::spawn({
        let (routes, metrics) = (front::routes(Arc::clone(&gateway)), Arc::clone(&gateway.metrics));
        let drain = drain.clone();
        async move {
            let count = move |change| metrics.connection(change);
            lorafleet_listen::serve(listener, routes, limits.of_connections(), count, drain).await;
        }
    });
    Front { gateway, address, drain, serving }
}

impl Front {
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Posts a body to the chat route.
    pub async fn chat(&self, body: &str) -> reqwest::Response {
        self.post("/v1/chat/completions", body, None).await
    }

    pub async fn post(&self, path: &str, body: &str, key: Option<&str>) -> reqwest::Response {
        let mut request = reqwest::Client::new().post(self.url(path)).header("content-type", "application/json");
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.body(body.to_owned()).send().await.unwrap()
    }

    /// Sends the start of a request whose body never ends.
    pub async fn unfinished(&self, body_bytes: usize) -> TcpStream {
        let mut client = TcpStream::connect(self.address).await.unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body_bytes + 1);
        client.write_all(head.as_bytes()).await.unwrap();
        client.write_all(&vec![b'x'; body_bytes]).await.unwrap();
        client
    }

    pub fn metrics(&self) -> String {
        let in_flight = &self.gateway.in_flight;
        String::from_utf8(self.gateway.metrics.text(&in_flight.by_model(), in_flight.queued()).unwrap()).unwrap()
    }

    pub fn metric(&self, line_start: &str) -> Option<String> {
        let text = self.metrics();
        let line = text.lines().find(|line| line.starts_with(line_start))?;
        Some(line.rsplit(' ').next().unwrap_or_default().to_owned())
    }
}

/// Status, `code` and message of an error answer.
pub async fn error_of(response: reqwest::Response) -> (u16, String, String) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    let body: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let field = |name: &str| body["error"][name].as_str().unwrap_or_else(|| panic!("{name}: {text}")).to_owned();
    (status, field("code"), field("message"))
}

/// Waits until `met`.
pub async fn until(what: &str, mut met: impl FnMut() -> bool) {
    let began = Instant::now();
    while !met() {
        assert!(began.elapsed() < PATIENCE, "it never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Says `heard` once somebody waits for what the pods say, as the answer to that question.
pub async fn say(fleet: &Fleet, heard: impl FnOnce(FleetView) -> FleetView) {
    fleet.wanted().await;
    let round = fleet.begin_round();
    fleet.publish(heard((*fleet.view()).clone()), round);
}
