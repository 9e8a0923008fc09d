//! A pod's answer on its way to the client.
//!
//! A stream passes event by event; it ends with `[DONE]` or with an error event that says why it does not. Everything else
//! is read whole first, so that a pod that breaks off half way is a typed error and not half an answer. A client that goes
//! away drops the relay, and with it the connection to the pod, which stops computing.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::Stream;
use http::header;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use lorafleet_listen::{Full, NotReceived, receive};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::error::{Code, Refusal};
use crate::front::{Gateway, stopped};
use crate::headers;
use crate::limits::REPLY_PRICE;
use crate::load::Counted;
use crate::metrics::{Metrics, Outcome};
use crate::sse::{Follower, Usage};
use crate::upstream::Answering;

/// Measures one request from the whole request to the end of its answer, whichever way it ends.
pub struct Meter {
    metrics: Arc<Metrics>,
    model: String,
    began: Instant,
    status: u16,
    first_byte: Option<Duration>,
    /// `None` while nobody has said how it ends.
    outcome: Option<Outcome>,
    stop: CancellationToken,
    _place: OwnedSemaphorePermit,
    /// What the request counts for: its model, and its client if it has a key.
    _counted: Vec<Counted>,
}

impl Meter {
    /// Dropped before anybody has said how it ended, it was given up: by the client, or because the gateway stops.
    pub fn new(gateway: &Gateway, model: &str, place: OwnedSemaphorePermit, counted: Vec<Counted>) -> Self {
        gateway.metrics.begin(model);
        Self {
            metrics: Arc::clone(&gateway.metrics),
            model: model.to_owned(),
            began: Instant::now(),
            status: 0,
            first_byte: None,
            outcome: None,
            stop: gateway.stop.clone(),
            _place: place,
            _counted: counted,
        }
    }

    /// The whole answer of a pod, good or its own refusal, goes to the client.
    pub fn answered(&mut self, status: u16) {
        self.status = status;
        self.outcome = Some(Outcome::Answered);
    }

    pub fn refused(&mut self, status: u16, code: Code) {
        self.status = status;
        self.outcome = Some(Outcome::Refused(code));
    }

    fn first_byte_now(&mut self) {
        let began = self.began;
        self.first_byte.get_or_insert_with(|| began.elapsed());
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.outcome.is_none() && self.stop.is_cancelled() {
            self.refused(Code::Draining.status().as_u16(), Code::Draining);
        }
        let outcome = self.outcome.unwrap_or(Outcome::ClientGone);
        self.metrics.end(&self.model, self.status, outcome, self.first_byte, self.began.elapsed());
    }
}

/// How the client asked for the answer.
pub struct Wish {
    pub stream: bool,
    /// The usage event was asked for by the gateway alone.
    pub hide_usage: bool,
}

/// The answer for the client.
pub async fn relay(answering: Answering, wish: Wish, mut meter: Meter, gateway: &Gateway) -> Response {
    let Answering { pod, response, counted } = answering;
    let (head, body) = response.into_parts();
    let status = head.status.as_u16();
    meter.status = status;
    let headers = headers::downstream(&head.headers);
    let is_stream = head.headers.get(header::CONTENT_TYPE).is_some_and(|value| {
        value.to_str().is_ok_and(|value| value.trim_start().to_ascii_lowercase().starts_with("text/event-stream"))
    });
    let mut answer = if is_stream && wish.stream && head.status.is_success() {
        // What the gateway itself ends from here on ends with an event that says so.
        meter.outcome = Some(Outcome::ClientGone);
        let events = Events {
            body,
            follower: Follower::new(wish.hide_usage),
            pod,
            meter,
            silence: gateway.limits.silence_timeout_seconds,
            stop: gateway.stop.clone(),
            ended: false,
            _on_pod: counted,
        };
        Response::new(Body::from_stream(events.into_stream()))
    } else {
        match whole(body, gateway, &pod).await {
            Ok(bytes) => {
                meter.first_byte_now();
                meter.answered(status);
                if let Some(usage) = Usage::of_reply(&bytes) {
                    meter.metrics.tokens(&meter.model, &usage);
                }
                Response::new(Body::from(bytes))
            }
            Err(refusal) => {
                tracing::warn!(pod, error = %refusal, "no whole answer");
                meter.refused(refusal.code.status().as_u16(), refusal.code);
                return refusal.into_response();
            }
        }
    };
    *answer.status_mut() = head.status;
    *answer.headers_mut() = headers;
    answer
}

/// An answer that is not a stream. It holds its room until it has been written.
async fn whole(body: Incoming, gateway: &Gateway, pod: &str) -> Result<Bytes, Refusal> {
    let Gateway { limits, replies, .. } = gateway;
    let max = usize::try_from(limits.max_reply_bytes).unwrap_or(usize::MAX);
    let pieces = futures::stream::try_unfold(body, |mut body| async move {
        let data = next_data(&mut body, limits.silence_timeout_seconds, pod).await?;
        Ok(data.map(|data| (data, body)))
    });
    receive(pin!(pieces), max, replies, REPLY_PRICE).await.map(Bytes::from_owner).map_err(|error| match error {
        NotReceived::TooLarge { .. } => {
            Refusal::new(Code::ReplyTooLarge, format!("the answer of pod {pod} is above the limit of {max} bytes"))
        }
        NotReceived::NoRoom(Full { bytes, .. }) => {
            let message = format!("the answers of other requests take all the room there is, {bytes} bytes");
            Refusal::new(Code::Busy, message)
        }
        NotReceived::Broken(refusal) => refusal,
    })
}

/// The next bytes of a body; `None` at its good end.
async fn next_data(body: &mut Incoming, silence: Duration, pod: &str) -> Result<Option<Bytes>, Refusal> {
    loop {
        let frame = match tokio::time::timeout(silence, body.frame()).await {
            Err(_) => {
                let seconds = silence.as_secs_f64();
                let message = format!("pod {pod} was silent for {seconds:.1} seconds in the middle of its answer");
                return Err(Refusal::new(Code::EngineTimeout, message));
            }
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => {
                let message = format!("pod {pod} broke off in the middle of its answer: {error}");
                return Err(Refusal::new(Code::EngineLost, message));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

/// A stream of events under way. Dropped before `[DONE]`, it counts as one whose client has gone.
struct Events {
    body: Incoming,
    follower: Follower,
    pod: String,
    meter: Meter,
    silence: Duration,
    stop: CancellationToken,
    ended: bool,
    _on_pod: Option<Counted>,
}

impl Events {
    fn into_stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> {
        futures::stream::unfold(self, |mut events| async move {
            let bytes = events.next().await?;
            Some((Ok(bytes), events))
        })
    }

    /// The next bytes for the client; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        while !self.ended {
            let data = tokio::select! {
                () = self.stop.cancelled() => Err(stopped()),
                data = next_data(&mut self.body, self.silence, &self.pod) => data,
            };
            let bytes = match data {
                Ok(Some(data)) => self.pass(data),
                Ok(None) => self.finish(),
                Err(refusal) => self.fail(&refusal),
            };
            if !bytes.is_empty() {
                self.meter.first_byte_now();
                return Some(bytes);
            }
        }
        None
    }

    /// Many clients hang up at `[DONE]`, before the pod's end of the body has come: the answer counts from there on.
    fn pass(&mut self, data: Bytes) -> Bytes {
        let bytes = self.follower.push(data);
        if self.follower.done {
            self.meter.answered(self.meter.status);
        }
        bytes
    }

    /// The pod ended its answer; without `[DONE]` it did not finish it.
    fn finish(&mut self) -> Bytes {
        self.ended = true;
        if self.follower.done {
            return Bytes::new();
        }
        if self.follower.blind() {
            self.meter.answered(self.meter.status);
            return Bytes::new();
        }
        let message = format!("pod {} ended its answer before [DONE]", self.pod);
        self.fail(&Refusal::new(Code::EngineLost, message))
    }

    /// Nothing but an event can still tell the client.
    fn fail(&mut self, refusal: &Refusal) -> Bytes {
        self.ended = true;
        if self.follower.done {
            // All that counts has passed before.
            return Bytes::new();
        }
        tracing::warn!(pod = self.pod, error = %refusal, events = self.follower.events, "a stream broke off");
        self.meter.refused(self.meter.status, refusal.code);
        refusal.event()
    }
}

impl Drop for Events {
    /// What has passed was computed, however it ended: as the engine counted it, else a token for each event.
    fn drop(&mut self) {
        let passed = Usage { completion_tokens: self.follower.events, ..Usage::default() };
        self.meter.metrics.tokens(&self.meter.model, &self.follower.usage.unwrap_or(passed));
    }
}
