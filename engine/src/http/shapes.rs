//! OpenAI's reply bodies. Pure.

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

/// The reply to a request that does not stream.
pub fn whole(kind: Kind, reply: &Reply, answers: &[Answer], counted: Usage, vocabulary: &Vocabulary) -> Value {
    let choices: Vec<Value> =
        (0..).zip(answers).map(|(index, answer)| whole_choice(kind, reply, index, answer, vocabulary)).collect();
    let mut body = head(reply, if kind == Kind::Chat { "chat.completion" } else { "text_completion" });
    body.insert("choices".into(), Value::Array(choices));
    body.insert("usage".into(), usage(counted));
    if reply.return_token_ids && kind == Kind::Chat {
        body.insert("prompt_token_ids".into(), json!(reply.prompt_of(0)));
    }
    Value::Object(body)
}

fn whole_choice(kind: Kind, reply: &Reply, index: u32, answer: &Answer, vocabulary: &Vocabulary) -> Value {
    let logprobs = match kind {
        _ if !reply.logprobs => Value::Null,
        Kind::Chat => chat_logprobs(&answer.tokens, vocabulary),
        Kind::Completion => completion_logprobs(&answer.tokens, 0, vocabulary),
    };
    let mut choice = json!({ "index": index, "finish_reason": answer.finish, "logprobs": logprobs });
    match kind {
        Kind::Chat => choice["message"] = json!({ "role": "assistant", "content": answer.text, "refusal": null }),
        Kind::Completion => choice["text"] = json!(answer.text),
    }
    if reply.return_token_ids {
        let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
        choice["token_ids"] = json!(ids);
        if kind == Kind::Completion {
            choice["prompt_token_ids"] = json!(reply.prompt_of(index));
        }
    }
    choice
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
    let logprobs = match kind {
        _ if !reply.logprobs => Value::Null,
        Kind::Chat => chat_logprobs(tokens, vocabulary),
        Kind::Completion => completion_logprobs(tokens, progress.offset, vocabulary),
    };
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

fn chat_logprobs(tokens: &[Token], vocabulary: &Vocabulary) -> Value {
    let entry = |id: u32, logprob: f32| json!({ "token": vocabulary.text(id), "logprob": logprob, "bytes": vocabulary.bytes(id) });
    let content = tokens.iter().map(|token| {
        let mut shown = entry(token.id, token.logprob);
        shown["top_logprobs"] = token.alternatives.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
        shown
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

fn completion_logprobs(tokens: &[Token], offset: usize, vocabulary: &Vocabulary) -> Value {
    let mut offset = offset;
    let (mut texts, mut offsets, mut tops) = (Vec::new(), Vec::new(), Vec::new());
    for token in tokens {
        let text = vocabulary.text(token.id);
        offsets.push(offset);
        offset += text.chars().count();
        // The drawn token is among them even if it is not among the best.
        let mut top = Map::new();
        for (id, logprob) in token.alternatives.iter().chain([&(token.id, token.logprob)]) {
            top.entry(vocabulary.text(*id)).or_insert_with(|| json!(logprob));
        }
        tops.push(Value::Object(top));
        texts.push(text);
    }
    let logprobs: Vec<f32> = tokens.iter().map(|token| token.logprob).collect();
    json!({ "tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}
