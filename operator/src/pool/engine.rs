//! The one door to engine pods: what do you hold, and hold this.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_crds::wire::{ErrorEnvelope, Placement, Report};

use crate::build::ENGINE_PORT;
use crate::settings::Limits;

/// A client for all engine pods. Connections are kept, and for a moment what each pod last reported.
pub struct Engines {
    http: reqwest::Client,
    report_bytes_max: usize,
    port: u16,
    /// By uid of the pod.
    reports: Mutex<HashMap<String, (Instant, Report)>>,
}

/// How long a report stands in for one that a busy pod did not give in time.
const REPORT_STANDS: Duration = Duration::from_secs(15);

/// Longest name of holdings that is sent back to a pod.
const TAG_BYTES_MAX: usize = 128;

/// Why a pod could not be asked or told.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("no connection: {0}")]
    Connection(String),
    #[error("status {status}, {code}: {message}")]
    Refused { status: u16, code: String, message: String },
    #[error("the answer has more than {limit} bytes")]
    TooLong { limit: usize },
    #[error("the answer is no report: {0}")]
    Malformed(String),
}

impl Engines {
    /// # Errors
    /// If the system gives no HTTP client.
    pub fn new(limits: &Limits) -> reqwest::Result<Self> {
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
        Ok(Self { http, report_bytes_max: limits.report_bytes_max, port, reports: Mutex::default() })
    }

    /// `GET /v1/lora_adapters` of the pod with this uid. A pod that is too busy to answer in time has not forgotten what
    /// it holds: its last report stands a little longer. One that refuses the connection has ended.
    pub async fn report(&self, uid: &str, address: &str, key: &str) -> Result<Report, EngineError> {
        let known = self.reports().get(uid).filter(|(at, _)| at.elapsed() < REPORT_STANDS).cloned();
        let known = known.map(|(_, report)| report);
        // What is no plain word is not sent back.
        let plain = |tag: &&str| tag.len() <= TAG_BYTES_MAX && tag.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let tag = known.as_ref().map(|report| report.holdings.as_str()).filter(plain).unwrap_or_default();
        let url = self.url(address, &format!("/v1/lora_adapters?known={tag}"));
        let answer = self.answer(self.http.get(url).bearer_auth(key)).await;
        match (answer.and_then(|body| completed(&body, known.as_ref())), known) {
            (Ok(report), _) => {
                let mut reports = self.reports();
                reports.retain(|_, (at, _)| at.elapsed() < REPORT_STANDS);
                reports.insert(uid.to_owned(), (Instant::now(), report.clone()));
                Ok(report)
            }
            (Err(EngineError::Timeout(_)), Some(known)) => Ok(known),
            (Err(error), _) => {
                self.reports().remove(uid);
                Err(error)
            }
        }
    }

    fn reports(&self) -> MutexGuard<'_, HashMap<String, (Instant, Report)>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `PUT /v1/placement`.
    pub async fn place(&self, address: &str, key: &str, placement: &Placement) -> Result<(), EngineError> {
        let request = self.http.put(self.url(address, "/v1/placement")).bearer_auth(key).json(placement);
        self.answer(request).await.map(drop)
    }

    fn url(&self, address: &str, path: &str) -> String {
        let port = self.port;
        if address.contains(':') {
            format!("http://[{address}]:{port}{path}")
        } else {
            format!("http://{address}:{port}{path}")
        }
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<Vec<u8>, EngineError> {
        let mut response = request.send().await.map_err(lost)?;
        let status = response.status();
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(lost)? {
            if body.len().saturating_add(piece.len()) > self.report_bytes_max {
                return Err(EngineError::TooLong { limit: self.report_bytes_max });
            }
            body.extend_from_slice(&piece);
        }
        if status.is_success() {
            return Ok(body);
        }
        let (code, message) = match serde_json::from_slice::<ErrorEnvelope>(&body) {
            Ok(envelope) => (envelope.error.code, envelope.error.message),
            Err(_) => ("unknown".to_owned(), String::from_utf8_lossy(body.get(..200).unwrap_or(&body)).into_owned()),
        };
        Err(EngineError::Refused { status: status.as_u16(), code, message })
    }
}

/// A report with what it leaves out because it is known.
fn completed(body: &[u8], known: Option<&Report>) -> Result<Report, EngineError> {
    let report: Report = serde_json::from_slice(body).map_err(|error| EngineError::Malformed(error.to_string()))?;
    if !report.unchanged {
        return Ok(report);
    }
    let known = known.filter(|known| known.holdings == report.holdings);
    let Report { adapters, aliases, .. } = known
        .ok_or_else(|| EngineError::Malformed("it leaves out holdings that are not known here".to_owned()))?
        .clone();
    Ok(Report { adapters, aliases, unchanged: false, ..report })
}

fn lost(error: reqwest::Error) -> EngineError {
    if error.is_timeout() {
        return EngineError::Timeout(Limits::DEFAULT.engine_timeout);
    }
    // The address changes with each pod and each attempt; what counts is the innermost cause.
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    EngineError::Connection(cause.to_string())
}
