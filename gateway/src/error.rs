//! What a client is told when the answer is no: OpenAI's envelope with a stable `code`.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use lorafleet_crds::wire::{ErrorBody, ErrorEnvelope, error_type};

use crate::body::BodyError;
use crate::resolve::{ResolveError, Target};
use crate::route::NowhereReady;

/// A typed no.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.as_str())]
pub struct Refusal {
    pub code: Code,
    pub message: String,
    pub param: Option<&'static str>,
}

/// Every code that the gateway itself answers with. An engine's own errors pass as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// The request is malformed.
    InvalidRequest,
    /// No key, or one that is not known.
    InvalidKey,
    /// No such route.
    RouteNotFound,
    MethodNotAllowed,
    /// No such model, or the key may not use it.
    ModelNotFound,
    /// The model exists, but not this version of it.
    VersionNotFound,
    /// The adapter exists and is refused; the message says why.
    AdapterRefused,
    /// The digits are the start of more than one version.
    AmbiguousVersion,
    /// The body did not come in time.
    BodyTimeout,
    BodyTooLarge,
    /// Too many requests at once; try again.
    Busy,
    /// The gateway has not seen its pool yet.
    NotSynced,
    /// The adapter is known and ready nowhere; the message says what is in the way.
    AdapterNotReady,
    BaseNotReady,
    /// No pod could be connected to.
    EngineUnreachable,
    /// The pod broke the connection before its answer was whole.
    EngineLost,
    /// The pod did not answer, or stopped answering, in time.
    EngineTimeout,
    /// The pod's answer is larger than the gateway holds.
    ReplyTooLarge,
    /// The gateway stops.
    Draining,
    /// A fault of the gateway.
    Internal,
}

impl Code {
    pub fn as_str(self) -> &'static str {
        match self {
            Code::InvalidRequest => "InvalidRequest",
            Code::InvalidKey => "InvalidKey",
            Code::RouteNotFound => "RouteNotFound",
            Code::MethodNotAllowed => "MethodNotAllowed",
            Code::ModelNotFound => "ModelNotFound",
            Code::VersionNotFound => "VersionNotFound",
            Code::AdapterRefused => "AdapterRefused",
            Code::AmbiguousVersion => "AmbiguousVersion",
            Code::BodyTimeout => "BodyTimeout",
            Code::BodyTooLarge => "BodyTooLarge",
            Code::Busy => "Busy",
            Code::NotSynced => "NotSynced",
            Code::AdapterNotReady => "AdapterNotReady",
            Code::BaseNotReady => "BaseNotReady",
            Code::EngineUnreachable => "EngineUnreachable",
            Code::EngineLost => "EngineLost",
            Code::EngineTimeout => "EngineTimeout",
            Code::ReplyTooLarge => "ReplyTooLarge",
            Code::Draining => "Draining",
            Code::Internal => "Internal",
        }
    }

    pub fn status(self) -> StatusCode {
        match self {
            Code::InvalidRequest => StatusCode::BAD_REQUEST,
            Code::InvalidKey => StatusCode::UNAUTHORIZED,
            Code::RouteNotFound | Code::ModelNotFound | Code::VersionNotFound | Code::AdapterRefused => {
                StatusCode::NOT_FOUND
            }
            Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Code::AmbiguousVersion => StatusCode::CONFLICT,
            Code::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Code::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Code::Busy => StatusCode::TOO_MANY_REQUESTS,
            Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Code::EngineLost | Code::ReplyTooLarge => StatusCode::BAD_GATEWAY,
            Code::NotSynced | Code::AdapterNotReady | Code::BaseNotReady | Code::EngineUnreachable | Code::Draining => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Code::EngineTimeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// Seconds after which another attempt makes sense; `None` if the same request will fail again.
    fn retry_after_seconds(self) -> Option<u32> {
        match self {
            Code::Busy | Code::NotSynced | Code::EngineUnreachable | Code::Draining => Some(1),
            Code::AdapterNotReady | Code::BaseNotReady => Some(2),
            _ => None,
        }
    }
}

impl Refusal {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: None }
    }

    /// As an event that ends a stream whose head has been sent.
    pub fn event(&self) -> Bytes {
        let mut event = b"data: ".to_vec();
        event.extend_from_slice(&self.json());
        event.extend_from_slice(b"\n\n");
        event.into()
    }

    pub fn json(&self) -> Bytes {
        let error = ErrorBody {
            message: self.message.clone(),
            kind: error_type(self.code.status().as_u16()).to_owned(),
            param: self.param.map(str::to_owned),
            code: self.code.as_str().to_owned(),
        };
        // Strings alone: this cannot fail.
        serde_json::to_vec(&ErrorEnvelope { error }).unwrap_or_default().into()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.code.status(), [(header::CONTENT_TYPE, json)], self.json()).into_response();
        if let Some(seconds) = self.code.retry_after_seconds() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == Code::InvalidKey {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Self {
        Self { param: error.field(), ..Self::new(Code::InvalidRequest, error.to_string()) }
    }
}

impl From<ResolveError> for Refusal {
    fn from(error: ResolveError) -> Self {
        let code = match &error {
            ResolveError::Unknown { .. } => Code::ModelNotFound,
            ResolveError::UnknownVersion { .. } => Code::VersionNotFound,
            ResolveError::BadVersion { .. } => Code::InvalidRequest,
            ResolveError::Ambiguous { .. } => Code::AmbiguousVersion,
            ResolveError::Refused { .. } => Code::AdapterRefused,
            ResolveError::NotServedYet { .. } => Code::AdapterNotReady,
        };
        Self { param: Some("model"), ..Self::new(code, error.to_string()) }
    }
}

impl From<NowhereReady> for Refusal {
    fn from(error: NowhereReady) -> Self {
        let code = match error.target {
            Target::Base { .. } => Code::BaseNotReady,
            Target::Adapter { .. } => Code::AdapterNotReady,
        };
        Self { param: Some("model"), ..Self::new(code, error.to_string()) }
    }
}
