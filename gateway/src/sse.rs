//! Following a stream of server-sent events as it passes. Pure: chunks in, chunks out.
//!
//! Whole events go on in the chunk in which their last byte came. The start of an unfinished event waits for its end (a
//! client cannot use it before either), so that the gateway can end a broken stream with an event of its own.

use bytes::{Bytes, BytesMut};
use serde::Deserialize;

/// Longest event that is followed; the rest of a stream with a longer one passes unread.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// Tokens of one request, as the engine counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptTokens>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct PromptTokens {
    #[serde(default)]
    pub cached_tokens: Option<u64>,
}

/// The part of a reply, whole or one event of a stream, that says what it cost.
#[derive(Deserialize)]
struct Costs {
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    choices: Option<Vec<serde::de::IgnoredAny>>,
}

impl Usage {
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }

    /// Usage of a whole JSON reply; `None` if it has none.
    pub fn of_reply(body: &[u8]) -> Option<Self> {
        serde_json::from_slice::<Costs>(body).ok()?.usage
    }
}

/// State of one stream.
#[derive(Debug, Default)]
pub struct Follower {
    hide_usage: bool,
    unfinished: BytesMut,
    /// An event was longer than can be followed.
    blind: bool,
    /// Events with data, without the closing `[DONE]` and the usage event.
    pub events: u64,
    pub usage: Option<Usage>,
    /// `[DONE]` has passed, or the engine's own error: the client knows how it ended.
    pub done: bool,
}

impl Follower {
    /// `hide_usage`: drop the usage event, which the client has not asked for.
    pub fn new(hide_usage: bool) -> Self {
        Self { hide_usage, ..Self::default() }
    }

    /// What goes on to the client now. May be empty.
    pub fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.blind {
            return chunk;
        }
        let whole = if self.unfinished.is_empty() {
            chunk
        } else {
            self.unfinished.extend_from_slice(&chunk);
            self.unfinished.split().freeze()
        };
        let mut kept = BytesMut::new();
        let mut dropped = false;
        let mut start = 0;
        while let Some(length) = whole.get(start..).and_then(event_length) {
            let event = whole.slice(start..start + length);
            start += length;
            if self.read(&event) {
                kept.extend_from_slice(&event);
            } else {
                dropped = true;
            }
        }
        let rest = whole.slice(start..);
        if rest.len() > EVENT_BYTES_MAX {
            self.blind = true;
            kept.extend_from_slice(&rest);
            return kept.freeze();
        }
        self.unfinished.extend_from_slice(&rest);
        // The usual chunk is whole events and nothing dropped: it goes on as it came.
        if dropped { kept.freeze() } else { whole.slice(..start) }
    }

    /// Takes note of one event; whether the client shall see it.
    fn read(&mut self, event: &[u8]) -> bool {
        let Some(data) = data_of(event) else {
            return true;
        };
        // An engine that says why it ends says no `[DONE]` after it.
        if data == b"[DONE]" || data.starts_with(b"{\"error\"") {
            self.done = true;
            return true;
        }
        // Only a usage event has a number there; the others are not worth parsing.
        if contains(data, b"\"usage\"")
            && let Ok(Costs { usage: Some(usage), choices }) = serde_json::from_slice::<Costs>(data)
        {
            self.usage = Some(usage);
            if choices.is_some_and(|choices| choices.is_empty()) {
                return !self.hide_usage;
            }
        }
        self.events += 1;
        true
    }

    /// Whether events could no longer be told apart, so that an end without `[DONE]` proves nothing.
    pub fn blind(&self) -> bool {
        self.blind
    }
}

/// Length of the first whole event with its blank line.
fn event_length(bytes: &[u8]) -> Option<usize> {
    let mut line_start = 0;
    loop {
        let line = bytes.get(line_start..)?;
        let length = line.iter().position(|byte| *byte == b'\n')? + 1;
        line_start += length;
        if matches!(line.get(..length), Some(b"\n" | b"\r\n")) {
            return Some(line_start);
        }
    }
}

/// The data of an event with one `data` line: the only form in which completions are streamed.
fn data_of(event: &[u8]) -> Option<&[u8]> {
    let line = event.split(|byte| *byte == b'\n').find(|line| line.starts_with(b"data:"))?;
    Some(line.strip_prefix(b"data:")?.trim_ascii())
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[cfg(test)]
#[path = "sse_tests.rs"]
mod tests;
