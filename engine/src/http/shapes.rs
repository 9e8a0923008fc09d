//! OpenAI's reply bodies. Pure.

use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::{Map, Value, json};

use super::answer::{Answer, Delta, Reply, Token, Usage};
use super::ask::Kind;
use crate::text::Vocabulary;

pub fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
    })
}

fn head(reply: &Reply, object: &str) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("id".into(), json!(reply.id));
    body.insert("object".into(), json!(object));
    body.insert("created".into(), json!(reply.created));
    body.insert("model".into(), json!(reply.model));
    body.insert("system_fingerprint".into(), json!(reply.fingerprint));
    body
}

/// The reply to a request that does not stream. It is written as it is read: as values it would be many times as large.
pub struct Whole<'a> {
    pub kind: Kind,
    pub reply: &'a Reply,
    pub answers: &'a [Answer],
    pub counted: Usage,
    pub vocabulary: &'a Vocabulary,
}

impl Serialize for Whole<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind, reply, answers, counted, vocabulary } = *self;
        let mut body = serializer.serialize_map(None)?;
        for (key, value) in head(reply, if kind == Kind::Chat { "chat.completion" } else { "text_completion" }) {
            body.serialize_entry(&key, &value)?;
        }
        let choice = |(index, answer)| WholeChoice { kind, reply, index, answer, vocabulary };
        body.serialize_entry("choices", &Each((0..).zip(answers).map(choice)))?;
        body.serialize_entry("usage", &usage(counted))?;
        if reply.return_token_ids && kind == Kind::Chat {
            body.serialize_entry("prompt_token_ids", reply.prompt_of(0))?;
        }
        body.end()
    }
}

struct WholeChoice<'a> {
    kind: Kind,
    reply: &'a Reply,
    index: u32,
    answer: &'a Answer,
    vocabulary: &'a Vocabulary,
}

impl Serialize for WholeChoice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind, reply, index, answer, vocabulary } = *self;
        let logprobs = Logprobs { kind, tokens: &answer.tokens, offset: 0, vocabulary };
        let mut choice = serializer.serialize_map(None)?;
        choice.serialize_entry("index", &index)?;
        choice.serialize_entry("finish_reason", &answer.finish)?;
        choice.serialize_entry("logprobs", &reply.logprobs.then_some(logprobs))?;
        match kind {
            Kind::Chat => {
                let message = json!({ "role": "assistant", "content": answer.text, "refusal": null });
                choice.serialize_entry("message", &message)?;
            }
            Kind::Completion => choice.serialize_entry("text", &answer.text)?,
        }
        if reply.return_token_ids {
            choice.serialize_entry("token_ids", &Each(answer.tokens.iter().map(|token| token.id)))?;
            if kind == Kind::Completion {
                choice.serialize_entry("prompt_token_ids", reply.prompt_of(index))?;
            }
        }
        choice.end()
    }
}

/// A list that is made while it is written.
struct Each<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Each<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// Where a stream is in one choice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    pub begun: bool,
    /// Characters of all token texts so far, for completions' `text_offset`.
    pub offset: usize,
}

/// The chunk that opens a chat choice.
pub fn opening(reply: &Reply, choice: u32, with_usage: bool) -> Value {
    let delta = json!({ "role": "assistant", "content": "" });
    let mut choice = json!({ "index": choice, "delta": delta, "logprobs": null, "finish_reason": null });
    if reply.return_token_ids {
        choice["token_ids"] = Value::Null;
    }
    chunk(Kind::Chat, reply, choice, with_usage)
}

pub fn piece(
    kind: Kind,
    reply: &Reply,
    delta: &Delta,
    progress: Progress,
    with_usage: bool,
    vocabulary: &Vocabulary,
) -> Value {
    let tokens = std::slice::from_ref(&delta.token);
    let logprobs = Logprobs { kind, tokens, offset: progress.offset, vocabulary };
    let logprobs = reply.logprobs.then_some(logprobs);
    let mut choice = json!({ "index": delta.choice, "logprobs": logprobs, "finish_reason": delta.finish });
    match kind {
        Kind::Chat if delta.text.is_empty() => choice["delta"] = json!({}),
        Kind::Chat => choice["delta"] = json!({ "content": delta.text }),
        Kind::Completion => choice["text"] = json!(delta.text),
    }
    if reply.return_token_ids {
        choice["token_ids"] = json!([delta.token.id]);
    }
    chunk(kind, reply, choice, with_usage)
}

fn chunk(kind: Kind, reply: &Reply, choice: Value, with_usage: bool) -> Value {
    let mut body = head(reply, if kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" });
    body.insert("choices".into(), json!([choice]));
    if with_usage {
        body.insert("usage".into(), Value::Null);
    }
    Value::Object(body)
}

/// The last chunk of a stream that asked for its usage.
pub fn closing(kind: Kind, reply: &Reply, counted: Usage) -> Value {
    let mut body = head(reply, if kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" });
    body.insert("choices".into(), json!([]));
    body.insert("usage".into(), usage(counted));
    Value::Object(body)
}

/// Of tokens that follow one another; `offset` is where the first begins, in letters.
struct Logprobs<'a> {
    kind: Kind,
    tokens: &'a [Token],
    offset: usize,
    vocabulary: &'a Vocabulary,
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.kind {
            Kind::Chat => self.chat(serializer),
            Kind::Completion => self.completion(serializer),
        }
    }
}

impl Logprobs<'_> {
    fn chat<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { tokens, vocabulary, .. } = *self;
        let entry = move |id: u32, logprob: f32| json!({ "token": vocabulary.text(id), "logprob": logprob, "bytes": vocabulary.bytes(id) });
        let content = tokens.iter().map(move |token| {
            let mut shown = entry(token.id, token.logprob);
            shown["top_logprobs"] = token.alternatives.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
            shown
        });
        let mut body = serializer.serialize_map(Some(2))?;
        body.serialize_entry("content", &Each(content))?;
        body.serialize_entry("refusal", &Value::Null)?;
        body.end()
    }

    fn completion<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { tokens, vocabulary, offset, .. } = *self;
        let letters = move |at: &mut usize, token: &Token| {
            let begins = *at;
            *at += vocabulary.text(token.id).chars().count();
            Some(begins)
        };
        // The drawn token is among them even if it is not among the best.
        let top = move |token: &Token| {
            let mut top = Map::new();
            for (id, logprob) in token.alternatives.iter().chain([&(token.id, token.logprob)]) {
                top.entry(vocabulary.text(*id)).or_insert_with(|| json!(logprob));
            }
            top
        };
        let mut body = serializer.serialize_map(Some(4))?;
        body.serialize_entry("tokens", &Each(tokens.iter().map(move |token| vocabulary.text(token.id))))?;
        body.serialize_entry("token_logprobs", &Each(tokens.iter().map(|token| f64::from(token.logprob))))?;
        body.serialize_entry("top_logprobs", &Each(tokens.iter().map(top)))?;
        body.serialize_entry("text_offset", &Each(tokens.iter().scan(offset, letters)))?;
        body.end()
    }
}
