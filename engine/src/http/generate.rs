//! The inference routes: parse, submit, and hand the answer on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, Request, header};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::mpsc;

use super::answer::{Choice, Delta, Reply, Usage};
use super::ask::{Ask, Bounds, Kind};
use super::shapes::{self, Progress};
use super::{App, OpenRequest, Received, body, json};
use crate::names::Resolved;
use crate::refusal::Refusal;
use crate::sequence::Draft;

pub async fn chat(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, Refusal> {
    run(app, Kind::Chat, request).await
}

pub async fn completion(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, Refusal> {
    run(app, Kind::Completion, request).await
}

async fn run(app: Arc<App>, kind: Kind, request: Request<Body>) -> Result<Response, Refusal> {
    let arrived = Instant::now();
    app.keys.client(request.headers())?;
    let open = app.requests.enter()?;
    let received = body(request, app.fleet.engine().limits.max_body_bytes, &app.bodies).await?;
    let ask = parse(app.clone(), kind, received).await?;
    let (resolved, choices) = submit(&app, &ask, arrived)?;
    let reply = reply(&app, &ask)?;
    let versioned = resolved.versioned();
    let mut response = if ask.stream {
        streamed(app, ask, reply, choices, open).await?
    } else {
        collected(&app, &ask, &reply, choices).await?
    };
    // Names may hold any letter; as bytes they are UTF-8.
    if let Some(value) = versioned.and_then(|name| HeaderValue::from_bytes(name.as_bytes()).ok()) {
        response.headers_mut().insert("x-lorafleet-adapter", value);
    }
    Ok(response)
}

/// Templates and tokenizers take their time over long texts, so they do not run on the threads that stream.
async fn parse(app: Arc<App>, kind: Kind, received: Received) -> Result<Ask, Refusal> {
    // As many at once as there are cores; it counts until it ends, also if the client is gone. Never closed.
    let turn = app.parsers.clone().acquire_owned().await;
    let parsed = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let limits = &app.fleet.engine().limits;
        let bounds = Bounds {
            vocabulary: app.base.vocabulary,
            max_model_tokens: limits.max_model_tokens,
            max_choices: limits.max_choices,
            text_bytes_max: app.base.text_bytes_max,
        };
        let resolve = |model: &str| {
            app.fleet.resolve(model)?;
            Ok(if model.is_empty() { app.base.name.clone() } else { model.to_owned() })
        };
        Ask::parse(kind, &received.bytes, &app.text, bounds, unix_s(), resolve)
    });
    parsed.await.unwrap_or_else(|error| Err(Refusal::new(500, "Internal", error.to_string())))
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn random_u64() -> Result<u64, Refusal> {
    getrandom::u64().map_err(|error| Refusal::new(500, "Internal", format!("no random numbers: {error}")))
}

/// Puts all choices of a request into the queue at once, under what the model means now.
fn submit(app: &App, ask: &Ask, arrived: Instant) -> Result<(Resolved, Vec<Choice>), Refusal> {
    let seed = ask.seed.map_or_else(random_u64, Ok)?;
    let (mut choices, mut drafts) = (Vec::new(), Vec::new());
    for (prompt, params) in ask.prompts.iter().zip(&ask.params) {
        let group = app.groups.fetch_add(1, Ordering::Relaxed);
        for _ in 0..ask.choices {
            let index = choices.len() as u32;
            let (events, receiver) = mpsc::channel(params.max_tokens as usize + 1);
            choices.push(Choice::new(index, receiver, app.text.decoder(), ask.stop.clone()));
            drafts.push(Draft {
                prompt: prompt.clone(),
                params: params.clone(),
                seed: seed.wrapping_add(index.into()),
                group,
                events,
                arrived,
            });
        }
    }
    let resolved = app.fleet.submit(&ask.model, drafts)?;
    Ok((resolved, choices))
}

fn reply(app: &App, ask: &Ask) -> Result<Reply, Refusal> {
    let prefix = if ask.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    Ok(Reply {
        id: format!("{prefix}-{:016x}{:016x}", random_u64()?, random_u64()?),
        created: unix_s(),
        model: ask.model.clone(),
        fingerprint: format!("fp_{}", app.base.digest.short()),
        prompts: ask.prompts.clone(),
        choices_per_prompt: ask.choices,
        return_token_ids: ask.return_token_ids,
        logprobs: ask.params.first().is_some_and(|params| params.logprobs.is_some()),
    })
}

async fn collected(app: &App, ask: &Ask, reply: &Reply, choices: Vec<Choice>) -> Result<Response, Refusal> {
    let answers = futures::future::try_join_all(choices.into_iter().map(Choice::collect)).await?;
    let counts = (0..).zip(&answers).filter(|(index, _)| reply.counts_for_prompt(*index));
    let counted = Usage {
        prompt: reply.prompt_tokens(),
        cached: counts.map(|(_, answer)| answer.cached_tokens).sum(),
        completion: answers.iter().map(|answer| answer.tokens.len() as u32).sum(),
    };
    let (kind, vocabulary) = (ask.kind, app.text.vocabulary());
    Ok(json(200, &shapes::Whole { kind, reply, answers: &answers, counted, vocabulary }))
}

/// Nothing is sent before the first token is there, so that what is refused late still is a plain error.
async fn streamed(
    app: Arc<App>,
    ask: Ask,
    reply: Reply,
    choices: Vec<Choice>,
    open: OpenRequest,
) -> Result<Response, Refusal> {
    let count = choices.len();
    let mut deltas = stream::select_all(choices.into_iter().map(|choice| {
        let steps = stream::unfold(choice, async |mut choice| Some((choice.next().await?, choice)));
        steps.boxed()
    }))
    .boxed();
    let first = deltas.next().await.transpose()?;
    let counted = Usage { prompt: reply.prompt_tokens(), ..Usage::default() };
    let mut writer = Writer {
        app,
        kind: ask.kind,
        include_usage: ask.include_usage,
        reply,
        progress: vec![Progress::default(); count],
        counted,
        ready: VecDeque::new(),
        deltas: Some(deltas),
        _open: open,
    };
    if let Some(delta) = first {
        writer.write(&delta);
    }
    let body = Body::from_stream(stream::unfold(writer, async |mut writer| Some((writer.next().await?, writer))));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    Ok((headers, body).into_response())
}

/// Writes deltas as server-sent events.
struct Writer {
    app: Arc<App>,
    kind: Kind,
    include_usage: bool,
    reply: Reply,
    progress: Vec<Progress>,
    counted: Usage,
    ready: VecDeque<Bytes>,
    /// `None` once the last event has been written.
    deltas: Option<BoxStream<'static, Result<Delta, Refusal>>>,
    /// Until the connection has taken all of it.
    _open: OpenRequest,
}

impl Writer {
    async fn next(&mut self) -> Option<Result<Bytes, std::convert::Infallible>> {
        while self.ready.is_empty() {
            match self.deltas.as_mut()?.next().await {
                Some(Ok(delta)) => self.write(&delta),
                Some(Err(refusal)) => {
                    self.deltas = None;
                    self.event(&serde_json::json!(refusal.envelope()));
                }
                None => {
                    self.deltas = None;
                    if self.include_usage {
                        self.event(&shapes::closing(self.kind, &self.reply, self.counted));
                    }
                    self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                }
            }
        }
        self.ready.pop_front().map(Ok)
    }

    fn write(&mut self, delta: &Delta) {
        let Some(mut progress) = self.progress.get(delta.choice as usize).copied() else { return };
        if !progress.begun {
            progress.begun = true;
            if self.kind == Kind::Chat {
                self.event(&shapes::opening(&self.reply, delta.choice, self.include_usage));
            }
            if self.reply.counts_for_prompt(delta.choice) {
                self.counted.cached += delta.cached_tokens;
            }
        }
        self.counted.completion += 1;
        let says_something =
            !delta.text.is_empty() || delta.finish.is_some() || self.reply.logprobs || self.reply.return_token_ids;
        if says_something {
            let vocabulary = self.app.text.vocabulary().clone();
            self.event(&shapes::piece(self.kind, &self.reply, delta, progress, self.include_usage, &vocabulary));
        }
        progress.offset += self.app.text.vocabulary().text(delta.token.id).chars().count();
        if let Some(slot) = self.progress.get_mut(delta.choice as usize) {
            *slot = progress;
        }
    }

    fn event(&mut self, value: &serde_json::Value) {
        self.ready.push_back(Bytes::from(format!("data: {value}\n\n")));
    }
}
