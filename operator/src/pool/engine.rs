//! The one door to engine pods: what do you hold, and hold this.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_crds::wire::{ErrorEnvelope, Placement, REPORT_BYTES_MAX, Report};
use lorafleet_listen::{Full, NotReceived, Price, Received, Room, receive};

use super::report::{FREE_BYTES, Held};
use crate::build::ENGINE_PORT;
use crate::settings::Limits;

/// A client for all engine pods. Connections are kept, and for a moment what each pod last reported.
pub struct Engines {
    http: reqwest::Client,
    port: u16,
    /// How long a pod may take to answer.
    timeout: Duration,
    /// How long a report stands in for one that a busy pod did not give in time.
    report_stands: Duration,
    /// For what pods answer, of all pools: while it is read, and for as long as it is kept.
    room: Room,
    /// The parts of it that pools and their pods have.
    parts: Mutex<HashMap<String, PoolPart>>,
    /// Answers are made into reports one after the other.
    parsing: tokio::sync::Mutex<()>,
    /// By uid of the pod.
    known: Mutex<HashMap<String, Known>>,
}

/// What a pod said, and when.
struct Known {
    at: Instant,
    report: Held,
}

/// What one pool has of the room, and its pods of that, by their uids.
struct PoolPart {
    room: Room,
    pods: HashMap<String, Room>,
}

impl PoolPart {
    fn of(room: &Room) -> Self {
        Self { room: room.part(), pods: HashMap::new() }
    }
}

/// Leaves parts to these alone, and gives one to each who has none.
fn keep<T>(parts: &mut HashMap<String, T>, who: impl Iterator<Item = String>, make: impl Fn() -> T) {
    let who: HashSet<String> = who.collect();
    parts.retain(|has, _| who.contains(has));
    for missing in who {
        parts.entry(missing).or_insert_with(&make);
    }
}

/// Characters of an error that are repeated.
const ERROR_LENGTH_MAX: usize = 400;

const PRICE: Price = Price { free_bytes: FREE_BYTES, copies: 1 };

/// Of an answer that says no.
const REFUSAL_BYTES_MAX: usize = 64 << 10;

/// Why a pod could not be asked or told.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("no connection: {0}")]
    Connection(String),
    #[error("status {status}, {code}: {message}")]
    Refused { status: u16, code: String, message: String },
    #[error("the answer has {bytes} bytes or more, the limit is {limit}")]
    TooLong { bytes: usize, limit: usize },
    #[error("there is no room for its answer: {taken} the {bytes} bytes of the operator's --reports-bytes-max")]
    NoRoom { taken: &'static str, bytes: u64 },
    #[error("the answer is no report: {0}")]
    Malformed(String),
}

impl EngineError {
    /// The pod has answered, if badly.
    pub fn is_an_answer(&self) -> bool {
        !matches!(self, Self::Timeout(_) | Self::Connection(_))
    }
}

impl From<Full> for EngineError {
    fn from(full: Full) -> Self {
        let taken = match full.part {
            true => "those of its pool, or its own, would take more than their part of",
            false => "those of all engine pods take",
        };
        Self::NoRoom { taken, bytes: full.bytes }
    }
}

impl Engines {
    /// # Errors
    /// If the system gives no HTTP client.
    pub fn new(limits: &Limits, reports_bytes_max: u64) -> reqwest::Result<Self> {
        let http = reqwest::Client::builder()
            .timeout(limits.engine_timeout)
            .connect_timeout(limits.engine_timeout)
            // Pods are reached as they are, never through a proxy of the environment.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(1)
            .pool_idle_timeout(Duration::from_secs(30))
            .build()?;
        let port = u16::try_from(ENGINE_PORT).unwrap_or_default();
        let room = Room::new(reports_bytes_max);
        let (parts, parsing, known) = (Mutex::default(), tokio::sync::Mutex::default(), Mutex::default());
        let (timeout, report_stands) = (limits.engine_timeout, limits.report_stands);
        Ok(Self { http, port, timeout, report_stands, room, parts, parsing, known })
    }

    /// Says who shares the room: all pools that there are, and the pods of one of them. Those who are not named have no part
    /// any more.
    pub fn share_among(&self, pools: impl Iterator<Item = String>, pool: &str, pods: impl Iterator<Item = String>) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        keep(&mut parts, pools, || PoolPart::of(&self.room));
        if let Some(PoolPart { room, pods: known }) = parts.get_mut(pool) {
            keep(known, pods, || room.part());
        }
    }

    /// The part of one pod.
    fn part(&self, pool: &str, pod: &str) -> Room {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let PoolPart { room, pods } = parts.entry(pool.to_owned()).or_insert_with(|| PoolPart::of(&self.room));
        pods.entry(pod.to_owned()).or_insert_with(|| room.part()).clone()
    }

    /// `GET /v1/lora_adapters` of the pod with this uid, of the pool with that one. A pod that is too busy to answer in time has not forgotten what
    /// it holds: its last report stands a little longer, and so it does where there is no room for a new one. A pod that
    /// refuses the connection has ended.
    pub async fn report(&self, pool: &str, uid: &str, address: &str, key: &str) -> Result<Held, EngineError> {
        let room = self.part(pool, uid);
        // Taken out, so that what has not changed can be moved into the new report.
        let mut known = self.lock().remove(uid).filter(|known| known.at.elapsed() < self.report_stands);
        // Who came later has his part too: what is beyond one's own is not kept for ever.
        known = known.filter(|known| known.report.is_within_its_part());
        let url = self.url(address, &Report::path(known.as_ref().map(|known| known.report.holdings.as_str())));
        let heard = match self.answer(self.http.get(url).bearer_auth(key), &room).await {
            Ok(body) => self.read(&body.bytes, &mut known, &room).await,
            Err(error) => Err(error),
        };
        let now = match (heard, known) {
            (Ok(report), _) => Known { at: Instant::now(), report },
            (Err(EngineError::Timeout(_) | EngineError::NoRoom { .. }), Some(known)) => known,
            (Err(error), _) => return Err(error),
        };
        let report = now.report.clone();
        let mut all = self.lock();
        all.retain(|_, known| known.at.elapsed() < self.report_stands);
        all.insert(uid.to_owned(), now);
        Ok(report)
    }

    /// A report with what it leaves out because it is known.
    async fn read(&self, body: &[u8], known: &mut Option<Known>, room: &Room) -> Result<Held, EngineError> {
        let _turn = self.parsing.lock().await;
        let report: Report = serde_json::from_slice(body).map_err(|error| EngineError::Malformed(error.to_string()))?;
        if !report.unchanged {
            return Ok(Held::new(report, body.len(), room)?);
        }
        let Some(Known { at, report: before }) = known.take().filter(|known| known.report.holdings == report.holdings)
        else {
            return Err(EngineError::Malformed("it leaves out holdings that are not known here".to_owned()));
        };
        Held::with_holdings_of(report, body.len(), before, room).map_err(|(full, before)| {
            *known = Some(Known { at, report: before });
            full.into()
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `PUT /v1/placement`. Its answer is the pod's report, which the next pass asks for: it is not read.
    pub async fn place(&self, address: &str, key: &str, placement: &Placement) -> Result<(), EngineError> {
        let request = self.http.put(self.url(address, "/v1/placement")).bearer_auth(key).json(placement);
        let response = request.send().await.map_err(|error| self.lost(error))?;
        if response.status().is_success() { Ok(()) } else { Err(self.refusal(response).await) }
    }

    fn url(&self, address: &str, path: &str) -> String {
        let port = self.port;
        if address.contains(':') {
            format!("http://[{address}]:{port}{path}")
        } else {
            format!("http://{address}:{port}{path}")
        }
    }

    async fn answer(&self, request: reqwest::RequestBuilder, room: &Room) -> Result<Received, EngineError> {
        let response = request.send().await.map_err(|error| self.lost(error))?;
        if response.status().is_success() {
            return self.body(response, REPORT_BYTES_MAX, room, PRICE).await;
        }
        Err(self.refusal(response).await)
    }

    /// What a pod said that did not do what it was asked for.
    async fn refusal(&self, response: reqwest::Response) -> EngineError {
        let status = response.status().as_u16();
        let small = Price { free_bytes: REFUSAL_BYTES_MAX as u64, ..PRICE };
        let body = match self.body(response, REFUSAL_BYTES_MAX, &self.room, small).await {
            Ok(body) => body,
            Err(error) => return error,
        };
        let (code, message) = match serde_json::from_slice::<ErrorEnvelope>(&body.bytes) {
            Ok(envelope) => (envelope.error.code, envelope.error.message),
            Err(_) => ("unknown".to_owned(), String::from_utf8_lossy(&body.bytes).into_owned()),
        };
        let short = |text: String| text.chars().take(ERROR_LENGTH_MAX).collect();
        EngineError::Refused { status, code: short(code), message: short(message) }
    }

    async fn body(
        &self,
        response: reqwest::Response,
        most: usize,
        room: &Room,
        price: Price,
    ) -> Result<Received, EngineError> {
        let pieces = futures::stream::try_unfold(response, |mut response| async {
            Ok(response.chunk().await?.map(|piece| (piece, response)))
        });
        receive(pin!(pieces), most, room, price).await.map_err(|error| match error {
            NotReceived::TooLarge { bytes } => EngineError::TooLong { bytes, limit: most },
            NotReceived::NoRoom(full) => full.into(),
            NotReceived::Broken(error) => self.lost(error),
        })
    }

    fn lost(&self, error: reqwest::Error) -> EngineError {
        if error.is_timeout() {
            return EngineError::Timeout(self.timeout);
        }
        // The address changes with each pod and each attempt; what counts is the innermost cause.
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        EngineError::Connection(cause.to_string())
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
