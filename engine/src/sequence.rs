//! One sequence: a prompt, its answer so far, and where its keys and values are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use lorafleet_backend::batch::{PageId, SampleSpec, Seen, SequenceId};
use lorafleet_crds::wire::Tier;
use tokio::sync::mpsc;

use crate::answers::Answers;
use crate::pages::KvOwner;
use crate::queue::Place;
use crate::refusal::Refusal;
use crate::residency::Lease;

/// How to draw an answer's tokens and when it ends. Shared by all choices of a request.
#[derive(Clone, Debug)]
pub struct Params {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub repetition_penalty: f32,
    pub logit_bias: Arc<BTreeMap<u32, f32>>,
    pub logprobs: Option<u8>,
    /// At least one.
    pub max_tokens: u32,
    /// Nobody asked for `max_tokens`: it is all that the context leaves, and fewer are as good where pages are few.
    pub as_many_as_fit: bool,
    /// None of `stop_tokens` is drawn before so many tokens.
    pub min_tokens: u32,
    /// The model's end tokens and those that the request adds; empty under `ignore_eos`.
    pub stop_tokens: Arc<[u32]>,
}

impl Params {
    /// The likeliest token each time, whatever it is.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Arc::default(),
            logprobs: None,
            max_tokens,
            as_many_as_fit: false,
            min_tokens: 0,
            stop_tokens: Arc::new([]),
        }
    }

    fn penalised(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

/// Why an answer ended inside the engine. (Stop strings are found by the reader of the events, who then hangs up.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was drawn; it is the last token.
    Stop,
    /// `max_tokens` tokens were drawn.
    Length,
}

/// What a sequence's reader receives.
#[derive(Clone, Debug)]
pub enum Event {
    Token(TokenEvent),
    /// The last event.
    Failed(Refusal),
}

#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    pub token: u32,
    pub logprob: f32,
    pub alternatives: Vec<(u32, f32)>,
    /// Prompt tokens whose keys and values were found instead of computed.
    pub cached_tokens: u32,
    /// Given on the last token.
    pub finish: Option<Finish>,
}

/// A sequence as a request makes it, before it is known what its model means.
#[derive(Debug)]
pub struct Draft {
    /// Not empty.
    pub prompt: Arc<[u32]>,
    pub params: Arc<Params>,
    pub seed: u64,
    /// Sequences of one group have one prompt; the others wait for the first one's prefill and share its pages.
    pub group: u64,
    /// Has room for each event that the sequence can send, so sending never waits.
    pub events: mpsc::Sender<Event>,
    pub arrived: Instant,
}

/// A sequence as the step thread takes it.
#[derive(Debug)]
pub struct NewSequence {
    pub owner: KvOwner,
    /// Its place in the bounded queue.
    pub place: Option<Place>,
    pub draft: Draft,
}

#[derive(Debug)]
pub struct Sequence {
    pub id: SequenceId,
    pub owner: KvOwner,
    pub group: u64,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    pub prompt_tokens: u32,
    /// Tokens whose keys and values are in `pages`.
    pub computed: u32,
    pub pages: Vec<PageId>,
    /// Leading pages that other sequences can find.
    pub published: u32,
    pub params: Arc<Params>,
    pub seed: u64,
    pub arrived: Instant,
    /// Orders the queue; later than `arrived` for a sequence that had to give up its place.
    pub queued: Instant,
    pub admitted: Option<Instant>,
    pub drawn_since_admission: u32,
    pub cached_tokens: Option<u32>,
    /// The adapter's tier when the request came; `None` for the base.
    pub tier_at_arrival: Option<Tier>,
    pub last_token: Option<Instant>,
    pub lease: Option<Lease>,
    seen: Arc<BTreeMap<u32, Seen>>,
    events: mpsc::Sender<Event>,
    _place: Option<Place>,
}

impl Sequence {
    pub fn new(id: SequenceId, new: NewSequence, tier_at_arrival: Option<Tier>) -> Self {
        let NewSequence { owner, place, draft } = new;
        let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
        if draft.params.penalised() {
            for token in draft.prompt.iter() {
                seen.entry(*token).or_default().prompt += 1;
            }
        }
        Self {
            id,
            owner,
            group: draft.group,
            tokens: draft.prompt.to_vec(),
            prompt_tokens: draft.prompt.len() as u32,
            computed: 0,
            pages: Vec::new(),
            published: 0,
            params: draft.params,
            seed: draft.seed,
            arrived: draft.arrived,
            queued: draft.arrived,
            admitted: None,
            drawn_since_admission: 0,
            cached_tokens: None,
            tier_at_arrival,
            last_token: None,
            lease: None,
            seen: Arc::new(seen),
            events: draft.events,
            _place: place,
        }
    }

    pub fn known(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens that are known but not computed; 1 while decoding.
    pub fn behind(&self) -> u32 {
        self.known() - self.computed
    }

    pub fn drawn(&self) -> u32 {
        self.known() - self.prompt_tokens
    }

    /// Ends the answer after so many tokens at the latest.
    pub fn shorten(&mut self, max_tokens: u32) {
        if max_tokens < self.params.max_tokens {
            Arc::make_mut(&mut self.params).max_tokens = max_tokens;
        }
    }

    /// The most tokens that it can come to hold.
    pub fn tokens_max(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.params.max_tokens)
    }

    /// Nobody listens any more.
    pub fn abandoned(&self) -> bool {
        self.events.is_closed()
    }

    pub fn sample_spec(&self) -> SampleSpec {
        let params = &self.params;
        let too_early = self.drawn() < params.min_tokens;
        SampleSpec {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            seed: self.seed,
            draw: u64::from(self.drawn()),
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            seen: self.seen.clone(),
            logit_bias: params.logit_bias.clone(),
            banned: if too_early { params.stop_tokens.clone() } else { Arc::new([]) },
            logprobs: params.logprobs,
        }
    }

    /// Appends a drawn token; says whether it was the last.
    pub fn push(&mut self, token: u32) -> Option<Finish> {
        self.tokens.push(token);
        self.drawn_since_admission += 1;
        if self.params.penalised() {
            Arc::make_mut(&mut self.seen).entry(token).or_default().output += 1;
        }
        if self.params.stop_tokens.contains(&token) {
            return Some(Finish::Stop);
        }
        (self.drawn() >= self.params.max_tokens).then_some(Finish::Length)
    }

    /// Its reader hears of it once it shows.
    pub fn answer(&self, event: Event, answers: &mut Answers) {
        answers.add(&self.events, event);
    }
}
