//! Requests to a gateway or an engine, as any OpenAI client makes them.
use std::io::{BufRead, BufReader};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use ureq::Agent;

use crate::forward::Route;

/// Of an answer as a whole: minutes are for thousands of tokens on a busy machine.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(600);
/// A connection that has been idle for longer is not used again: the server may be about to end it.
const IDLE_TIME_MAX: Duration = Duration::from_secs(2);

/// A client of one server.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    route: Route,
    key: Option<String>,
}

/// Status and body of an answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
    /// Header `x-lorafleet-adapter`: which adapter answered, if any.
    pub adapter: Option<String>,
}

impl Client {
    /// Of the server at the end of this route.
    pub fn new(route: Route) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_TIME_MAX))
            .max_idle_age(IDLE_TIME_MAX)
            .proxy(None);
        Self { agent: config.build().into(), route, key: None }
    }

    /// The server's base URL, `http://host:port`.
    pub fn url(&self) -> &str {
        self.route.url()
    }

    /// The same with `Authorization: Bearer KEY`.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    /// Sends a body and reads the JSON answer, whatever its status.
    ///
    /// # Errors
    /// When the server cannot be reached or answers with no JSON.
    pub fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        let mut request = self.agent.post(format!("{}{path}", self.url()));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let answer = request.send_json(body).with_context(|| format!("POST {}{path}", self.url()))?;
        read(answer).with_context(|| format!("answer of {}{path}", self.url()))
    }

    /// As [`Client::post`], with PUT.
    ///
    /// # Errors
    /// As there.
    pub fn put(&self, path: &str, body: &Value) -> Result<Answer> {
        let mut request = self.agent.put(format!("{}{path}", self.url()));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let answer = request.send_json(body).with_context(|| format!("PUT {}{path}", self.url()))?;
        read(answer).with_context(|| format!("answer of {}{path}", self.url()))
    }

    /// The status of a page, whatever it holds.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn status(&self, path: &str) -> Result<u16> {
        Ok(self
            .agent
            .get(format!("{}{path}", self.url()))
            .call()
            .with_context(|| format!("GET {path}"))?
            .status()
            .as_u16())
    }

    /// Reads a JSON answer, whatever its status.
    ///
    /// # Errors
    /// As [`Client::post`].
    pub fn get(&self, path: &str) -> Result<Answer> {
        let mut request = self.agent.get(format!("{}{path}", self.url()));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let answer = request.call().with_context(|| format!("GET {}{path}", self.url()))?;
        read(answer).with_context(|| format!("answer of {}{path}", self.url()))
    }

    /// A page of text, such as metrics.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub fn text(&self, path: &str) -> Result<String> {
        let mut answer =
            self.agent.get(format!("{}{path}", self.url())).call().with_context(|| format!("GET {path}"))?;
        Ok(answer.body_mut().read_to_string()?)
    }

    /// A greedy chat turn; the whole answer.
    ///
    /// # Errors
    /// As [`Client::post`].
    pub fn chat(&self, model: &str, prompt: &str, tokens_max: u32) -> Result<Answer> {
        self.post("/v1/chat/completions", &chat_body(model, prompt, tokens_max))
    }

    /// The text of a greedy chat turn.
    ///
    /// # Errors
    /// When the status is not 200; the message holds the answer.
    pub fn say(&self, model: &str, prompt: &str, tokens_max: u32) -> Result<String> {
        let answer = self.chat(model, prompt, tokens_max)?;
        match (answer.status, answer.body["choices"][0]["message"]["content"].as_str()) {
            (200, Some(text)) => Ok(text.to_owned()),
            _ => bail!("{model}: {} {}", answer.status, answer.body),
        }
    }

    /// A greedy chat turn as it is streamed: `see` gets each piece of text as it comes.
    ///
    /// # Errors
    /// When the status is not 200, or the stream ends without `[DONE]` or with an error.
    pub fn stream(&self, model: &str, prompt: &str, tokens_max: u32, see: impl FnMut(&str)) -> Result<String> {
        self.stream_body(&chat_body(model, prompt, tokens_max), see)
    }

    /// The same for any body of a chat.
    ///
    /// # Errors
    /// As [`Client::stream`].
    pub fn stream_body(&self, body: &Value, mut see: impl FnMut(&str)) -> Result<String> {
        let (mut body, model) = (body.clone(), &body["model"]);
        body["stream"] = json!(true);
        let mut request = self.agent.post(format!("{}/v1/chat/completions", self.url()));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let answer = request.send_json(&body).with_context(|| format!("stream from {}", self.url()))?;
        let status = answer.status();
        if !status.is_success() {
            bail!("{model}: {}", read(answer)?.body);
        }
        let mut text = String::new();
        for line in BufReader::new(answer.into_body().into_reader()).lines() {
            let line = line.context("read the stream")?;
            let Some(data) = line.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                return Ok(text);
            }
            let event: Value = serde_json::from_str(data).with_context(|| format!("event `{data}`"))?;
            if !event["error"].is_null() {
                bail!("{model}: the stream ended with {event}");
            }
            if let Some(piece) = event["choices"][0]["delta"]["content"].as_str() {
                see(piece);
                text.push_str(piece);
            }
        }
        bail!("{model}: the stream ended without [DONE] after `{text}`")
    }
}

fn chat_body(model: &str, prompt: &str, tokens_max: u32) -> Value {
    json!({
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens_max,
        "temperature": 0,
    })
}

fn read(mut answer: ureq::http::Response<ureq::Body>) -> Result<Answer> {
    let status = answer.status().as_u16();
    let adapter = answer.headers().get("x-lorafleet-adapter").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let text = answer.body_mut().read_to_string().context("read the answer")?;
    let body = serde_json::from_str(&text).with_context(|| format!("{status} `{text}` is no JSON"))?;
    Ok(Answer { status, body, adapter })
}
