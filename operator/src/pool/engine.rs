//! The one door to engine pods: what do you hold, and hold this.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
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
        let request = self.http.get(self.url(address, "/v1/lora_adapters")).bearer_auth(key);
        let answer = self.answer(request).await;
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Ok(body) => {
                let report: Report =
                    serde_json::from_slice(&body).map_err(|error| EngineError::Malformed(error.to_string()))?;
                reports.retain(|_, (at, _)| at.elapsed() < REPORT_STANDS);
                reports.insert(uid.to_owned(), (Instant::now(), report.clone()));
                Ok(report)
            }
            Err(error @ EngineError::Timeout(_)) => match reports.get(uid) {
                Some((at, report)) if at.elapsed() < REPORT_STANDS => Ok(report.clone()),
                _ => Err(error),
            },
            Err(error) => {
                reports.remove(uid);
                Err(error)
            }
        }
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
