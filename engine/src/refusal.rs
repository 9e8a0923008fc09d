//! What a client is told when the answer is no.

use std::borrow::Cow;

use lorafleet_crds::wire::{ErrorBody, ErrorEnvelope, error_type};

/// A typed no: HTTP status, stable code, and a message that names the thing, the limit and both values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refusal {
    pub status: u16,
    pub code: Cow<'static, str>,
    pub message: String,
    /// The request's field that is at fault.
    pub param: Option<Cow<'static, str>>,
    pub retry_after_seconds: Option<u32>,
}

impl Refusal {
    pub fn new(status: u16, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { status, code: code.into(), message: message.into(), param: None, retry_after_seconds: None }
    }

    /// 400: the request itself is at fault.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, "InvalidRequest", message) }
    }

    /// 404: no such model, said before anything was computed.
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("the model '{}' does not exist", shown(name));
        Self { param: Some("model".into()), ..Self::new(404, "ModelNotFound", message) }
    }

    /// 429: try again later.
    pub fn busy(message: impl Into<String>) -> Self {
        Self { retry_after_seconds: Some(1), ..Self::new(429, "Busy", message) }
    }

    pub fn draining() -> Self {
        let message = "this server is draining and takes no new requests";
        Self { retry_after_seconds: Some(1), ..Self::new(503, "Draining", message) }
    }

    /// OpenAI's `type` for this status.
    pub fn kind(&self) -> &'static str {
        error_type(self.status)
    }

    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            message: self.message.clone(),
            kind: self.kind().to_owned(),
            param: self.param.as_deref().map(str::to_owned),
            code: self.code.clone().into_owned(),
        }
    }

    pub fn envelope(&self) -> ErrorEnvelope {
        ErrorEnvelope { error: self.body() }
    }
}

/// A client's text as it may stand in a message: bounded, without control characters.
pub fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().take(120).map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect();
    if text.chars().nth(120).is_some() {
        shown.push('…');
    }
    shown
}
