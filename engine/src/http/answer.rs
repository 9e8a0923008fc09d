//! One choice's answer as it grows: events in, text out.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::refusal::Refusal;
use crate::sequence::{Event, Finish, TokenEvent};
use crate::text::{Decoder, StopMatcher};

/// A drawn token with what the client may want to know about it.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    pub logprob: f32,
    pub alternatives: Vec<(u32, f32)>,
}

/// What one event adds to an answer.
#[derive(Clone, Debug)]
pub struct Delta {
    pub choice: u32,
    /// Certain text; empty while a character or a stop string may be unfinished.
    pub text: String,
    pub token: Token,
    pub cached_tokens: u32,
    /// `stop` or `length`, on the last one.
    pub finish: Option<&'static str>,
}

/// The whole answer of one choice.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<Token>,
    pub cached_tokens: u32,
    pub finish: Option<&'static str>,
}

/// Dropping it tells the engine that nobody listens any more.
pub struct Choice {
    index: u32,
    events: mpsc::Receiver<Event>,
    decoder: Decoder,
    stop: StopMatcher,
    ended: bool,
}

impl Choice {
    pub fn new(index: u32, events: mpsc::Receiver<Event>, decoder: Decoder, stop: StopMatcher) -> Self {
        Self { index, events, decoder, stop, ended: false }
    }

    /// The next piece; `None` after the last one.
    pub async fn next(&mut self) -> Option<Result<Delta, Refusal>> {
        if self.ended {
            return None;
        }
        match self.events.recv().await {
            Some(Event::Token(token)) => Some(Ok(self.take(token))),
            Some(Event::Failed(refusal)) => {
                self.ended = true;
                Some(Err(refusal))
            }
            None => {
                self.ended = true;
                Some(Err(Refusal::new(503, "EngineStopped", "the engine stopped before the answer was complete")))
            }
        }
    }

    fn take(&mut self, event: TokenEvent) -> Delta {
        // A stop token ends the text before itself, whatever it would print.
        let piece = if event.finish == Some(Finish::Stop) { String::new() } else { self.decoder.push(event.token) };
        let step = self.stop.push(&piece);
        let (mut text, mut stopped) = (step.text, step.stopped.is_some());
        if event.finish.is_some() && !stopped {
            let last = self.stop.push(&self.decoder.finish());
            text.push_str(&last.text);
            stopped = last.stopped.is_some();
            if !stopped {
                text.push_str(&self.stop.finish());
            }
        }
        let finish = match event.finish {
            _ if stopped => Some("stop"),
            Some(Finish::Stop) => Some("stop"),
            Some(Finish::Length) => Some("length"),
            None => None,
        };
        if finish.is_some() {
            self.ended = true;
            self.events.close();
        }
        let token = Token { id: event.token, logprob: event.logprob, alternatives: event.alternatives };
        Delta { choice: self.index, text, token, cached_tokens: event.cached_tokens, finish }
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What ended it otherwise.
    pub async fn collect(mut self) -> Result<Answer, Refusal> {
        let mut answer = Answer::default();
        while let Some(delta) = self.next().await {
            let delta = delta?;
            answer.text.push_str(&delta.text);
            answer.tokens.push(delta.token);
            answer.cached_tokens = delta.cached_tokens;
            answer.finish = delta.finish;
        }
        Ok(answer)
    }
}

/// Tokens counted as OpenAI counts them: a prompt once, however many choices it has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub prompt: u32,
    pub cached: u32,
    pub completion: u32,
}

/// What all replies to one request have in common.
#[derive(Clone, Debug)]
pub struct Reply {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
    pub prompts: Vec<Arc<[u32]>>,
    pub choices_per_prompt: u32,
    pub return_token_ids: bool,
    /// The client asked for log-probabilities.
    pub logprobs: bool,
}

impl Reply {
    /// The prompt that a choice answers.
    pub fn prompt_of(&self, choice: u32) -> &[u32] {
        let index = (choice / self.choices_per_prompt.max(1)) as usize;
        self.prompts.get(index).map_or(&[], |prompt| prompt)
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.prompts.iter().map(|prompt| prompt.len() as u32).sum()
    }

    /// Whether a choice is the one whose cached tokens count for its prompt.
    pub fn counts_for_prompt(&self, choice: u32) -> bool {
        choice.is_multiple_of(self.choices_per_prompt.max(1))
    }
}
