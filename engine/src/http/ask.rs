//! From an OpenAI body to what the engine understands. Pure: no clock, no queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::fields::Fields;
use crate::refusal::Refusal;
use crate::sequence::Params;
use crate::text::{Chat, Message, StopMatcher, TemplateValue, Text, TextError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Chat,
    Completion,
}

/// A request, checked and in tokens.
#[derive(Debug)]
pub struct Ask {
    pub kind: Kind,
    /// As the client wrote it.
    pub model: String,
    pub prompts: Vec<Arc<[u32]>>,
    /// Choices per prompt.
    pub choices: u32,
    /// One for each prompt: the default of `max_tokens` depends on its length.
    pub params: Vec<Arc<Params>>,
    pub seed: Option<u64>,
    pub stop: StopMatcher,
    pub include_stop: bool,
    pub stream: bool,
    pub include_usage: bool,
    pub return_token_ids: bool,
}

/// What a request may be, and what it is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub vocabulary: u32,
    pub max_model_tokens: u32,
    pub max_choices: u32,
    /// A longer text has more tokens than the model holds, whatever they are: it is refused before anybody counts them,
    /// which takes a hundred times its size in memory.
    pub text_bytes_max: usize,
}

/// OpenAI's default for the completions route.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;
const LOGPROBS_MAX: i64 = 20;
/// Text of an answer that is sent whole.
const REPLY_BYTES_MAX: u64 = 32 << 20;
/// Of a token, and of one log-probability with its token, in such an answer.
const TOKEN_BYTES: u64 = 16;
const LOGPROB_BYTES: u64 = 96;
const LOGIT_BIAS_MAX: usize = 1024;
const STOP_TOKENS_MAX: usize = 64;

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected text, token ids, or a list of either")]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    #[serde(default)]
    continuous_usage_stats: bool,
    /// Padding against traffic analysis; changes no answer.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

impl Ask {
    /// The model is looked up before anything else is looked at.
    ///
    /// # Errors
    /// 404 for an unknown model, 400 naming the field that is at fault.
    pub fn parse(
        kind: Kind,
        body: &[u8],
        text: &Text,
        bounds: Bounds,
        now_unix_s: u64,
        resolve: impl FnOnce(&str) -> Result<String, Refusal>,
    ) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body)?;
        let model = resolve(&model(&mut fields)?)?;
        let prompts = match kind {
            Kind::Chat => vec![chat(&mut fields, text, bounds, now_unix_s)?],
            Kind::Completion => prompts(&mut fields, text, bounds)?,
        };
        let choices = choices(&mut fields, prompts.len(), bounds)?;
        let params = params(kind, &mut fields, text, bounds)?;
        let max_tokens = max_tokens(kind, &mut fields)?;
        let ask = Self {
            kind,
            model,
            params: prompts
                .iter()
                .map(|prompt| fitted(&params, prompt.len(), max_tokens, bounds))
                .collect::<Result<_, _>>()?,
            prompts,
            choices,
            seed: fields.take::<i64>("seed")?.map(i64::cast_unsigned),
            stop: stop(&mut fields)?,
            include_stop: fields.take("include_stop_str_in_output")?.unwrap_or(false),
            stream: fields.take("stream")?.unwrap_or(false),
            include_usage: stream_options(&mut fields)?,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
        };
        let ask = ask.bounded(max_tokens.is_some())?;
        if ask.include_stop {
            let message =
                "'include_stop_str_in_output' is not supported here, and leaving it out would change the answer";
            return Err(Refusal::invalid("include_stop_str_in_output", message));
        }
        fields.finish()?;
        Ok(ask)
    }
}

impl Ask {
    /// An answer that is sent whole is held whole: where nobody said how long it may be, it is shortened to what may be held.
    ///
    /// # Errors
    /// 400 for one that was asked for and is too large.
    fn bounded(mut self, asked: bool) -> Result<Self, Refusal> {
        let logprobs = self.params.first().and_then(|params| params.logprobs);
        let each = TOKEN_BYTES + logprobs.map_or(0, |top| LOGPROB_BYTES * (1 + u64::from(top)));
        let tokens: u64 = self.params.iter().map(|params| u64::from(params.max_tokens)).sum();
        let (choices, bytes) = (u64::from(self.choices), tokens * u64::from(self.choices) * each);
        if self.stream || bytes <= REPLY_BYTES_MAX {
            return Ok(self);
        }
        if asked {
            let message = format!(
                "{tokens} tokens in {choices} choices, each with its log-probabilities, may make an answer of {bytes} bytes, the limit is {REPLY_BYTES_MAX}: ask for less, or let it stream"
            );
            return Err(Refusal::invalid("max_tokens", message));
        }
        let most = REPLY_BYTES_MAX / (each * choices * self.params.len().max(1) as u64);
        for params in &mut self.params {
            let max_tokens = params.max_tokens.min(u32::try_from(most).unwrap_or(u32::MAX).max(1));
            Arc::make_mut(params).max_tokens = max_tokens;
        }
        Ok(self)
    }
}

/// Empty is the base, as everywhere else where no adapter is named; a field that is missing or blank is somebody's mistake.
fn model(fields: &mut Fields) -> Result<String, Refusal> {
    let name = fields.take::<String>("model")?;
    name.filter(|name| name.is_empty() || !name.trim().is_empty()).ok_or_else(|| {
        let message =
            "'model' is missing: it is the base's name, an adapter's, or 'adapter@digest'; \"\" asks for the base";
        Refusal::invalid("model", message)
    })
}

fn chat(fields: &mut Fields, text: &Text, bounds: Bounds, now_s: u64) -> Result<Arc<[u32]>, Refusal> {
    let messages: Vec<Message> = fields.take("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(Refusal::invalid("messages", "'messages' is missing or empty"));
    }
    let variables: BTreeMap<String, TemplateValue> = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let add_generation_prompt = fields.take("add_generation_prompt")?.unwrap_or(true);
    let chat = Chat { messages, tools: None, add_generation_prompt, variables, now_s };
    let refused = |error: TextError| text_refusal("messages", &error);
    let rendered = text.render_chat(&chat).map_err(refused)?;
    check_text("messages", &rendered, bounds)?;
    text.encode_rendered(&rendered).map(Arc::from).map_err(refused)
}

fn check_text(param: &'static str, text: &str, bounds: Bounds) -> Result<(), Refusal> {
    let (bytes, most) = (text.len(), bounds.text_bytes_max);
    if bytes <= most {
        return Ok(());
    }
    let message = format!(
        "the prompt has {bytes} bytes: more than the {most} of the longest prompt of {} tokens, which is what this server holds",
        bounds.max_model_tokens
    );
    Err(Refusal { code: "ContextTooLong".into(), ..Refusal::invalid(param, message) })
}

fn prompts(fields: &mut Fields, text: &Text, bounds: Bounds) -> Result<Vec<Arc<[u32]>>, Refusal> {
    let missing = || Refusal::invalid("prompt", "'prompt' is missing or empty");
    let encode = |prompt: &String| {
        check_text("prompt", prompt, bounds)?;
        text.encode(prompt).map_err(|error| text_refusal("prompt", &error))
    };
    let prompts = match fields.take::<Prompt>("prompt")?.ok_or_else(missing)? {
        Prompt::Text(prompt) => vec![encode(&prompt)?],
        // An empty list fits both; either way there is nothing to complete.
        Prompt::Tokens(prompt) => vec![prompt],
        Prompt::TokenLists(prompts) => prompts,
        Prompt::Texts(prompts) => {
            check_count(prompts.len(), bounds)?;
            prompts.iter().map(encode).collect::<Result<_, _>>()?
        }
    };
    check_count(prompts.len(), bounds)?;
    for prompt in &prompts {
        if let Some(token) = prompt.iter().find(|token| **token >= bounds.vocabulary) {
            let message = format!("token {token} is not in the vocabulary of {} tokens", bounds.vocabulary);
            return Err(Refusal::invalid("prompt", message));
        }
    }
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(missing());
    }
    Ok(prompts.into_iter().map(Arc::from).collect())
}

fn check_count(prompts: usize, bounds: Bounds) -> Result<(), Refusal> {
    let most = bounds.max_choices;
    if prompts <= most as usize {
        return Ok(());
    }
    Err(Refusal::invalid("prompt", format!("{prompts} prompts, the limit is {most}")))
}

fn choices(fields: &mut Fields, prompts: usize, bounds: Bounds) -> Result<u32, Refusal> {
    let most = i64::from(bounds.max_choices);
    let choices = fields.count("n", 1, most)?.unwrap_or(1);
    let best_of = fields.count("best_of", 1, most)?.unwrap_or(choices);
    if best_of != choices {
        let message = format!("'best_of' is {best_of} and 'n' {choices}: ranking answers is not supported");
        return Err(Refusal::invalid("best_of", message));
    }
    let all = u64::from(choices) * prompts as u64;
    if all > u64::from(bounds.max_choices) {
        return Err(Refusal::invalid("n", format!("{all} choices over all prompts, the limit is {most}")));
    }
    Ok(choices)
}

/// Everything but `max_tokens`, which depends on the prompt.
fn params(kind: Kind, fields: &mut Fields, text: &Text, bounds: Bounds) -> Result<Params, Refusal> {
    let ignore_eos: bool = fields.take("ignore_eos")?.unwrap_or(false);
    let mut stop_tokens = if ignore_eos { Vec::new() } else { text.end_tokens().to_vec() };
    let more: Vec<u32> = fields.take("stop_token_ids")?.unwrap_or_default();
    if more.len() > STOP_TOKENS_MAX {
        let message = format!("{} stop tokens, the limit is {STOP_TOKENS_MAX}", more.len());
        return Err(Refusal::invalid("stop_token_ids", message));
    }
    stop_tokens.extend(more);
    // -1 is "off" for clients of other servers.
    let top_k = fields.take::<i64>("top_k")?.filter(|top_k| *top_k != -1).unwrap_or(0);
    Ok(Params {
        temperature: fields.number("temperature", 1.0, 0.0, 100.0)?,
        top_k: u32::try_from(top_k).map_err(|_| {
            Refusal::invalid("top_k", format!("'top_k' is {top_k}, allowed is -1 and 0 to {}", u32::MAX))
        })?,
        top_p: fields.number("top_p", 1.0, f32::MIN_POSITIVE, 1.0)?,
        min_p: fields.number("min_p", 0.0, 0.0, 1.0)?,
        presence_penalty: fields.number("presence_penalty", 0.0, -2.0, 2.0)?,
        frequency_penalty: fields.number("frequency_penalty", 0.0, -2.0, 2.0)?,
        repetition_penalty: fields.number("repetition_penalty", 1.0, 0.01, 100.0)?,
        logit_bias: Arc::new(logit_bias(fields, bounds)?),
        logprobs: logprobs(kind, fields)?,
        max_tokens: 1,
        as_many_as_fit: false,
        min_tokens: fields.count("min_tokens", 0, i64::from(bounds.max_model_tokens))?.unwrap_or(0),
        stop_tokens: stop_tokens.into(),
    })
}

fn logit_bias(fields: &mut Fields, bounds: Bounds) -> Result<BTreeMap<u32, f32>, Refusal> {
    let given: BTreeMap<String, f32> = fields.take("logit_bias")?.unwrap_or_default();
    if given.len() > LOGIT_BIAS_MAX {
        let message = format!("'logit_bias' has {} entries, the limit is {LOGIT_BIAS_MAX}", given.len());
        return Err(Refusal::invalid("logit_bias", message));
    }
    let entry = |(token, bias): (String, f32)| match token.parse::<u32>() {
        Ok(id) if id < bounds.vocabulary && (-100.0..=100.0).contains(&bias) => Ok((id, bias)),
        _ => {
            let token = crate::refusal::shown(&token);
            let message = format!(
                "'logit_bias' has {token}: {bias}, allowed are tokens below {} and -100 to 100",
                bounds.vocabulary
            );
            Err(Refusal::invalid("logit_bias", message))
        }
    };
    given.into_iter().map(entry).collect()
}

/// Chat: a boolean and a count; completions: a count.
fn logprobs(kind: Kind, fields: &mut Fields) -> Result<Option<u8>, Refusal> {
    let count = match kind {
        Kind::Completion => fields.count("logprobs", 0, LOGPROBS_MAX)?,
        Kind::Chat => {
            let wanted: bool = fields.take("logprobs")?.unwrap_or(false);
            let top = fields.count("top_logprobs", 0, LOGPROBS_MAX)?;
            if !wanted && top.is_some_and(|top| top > 0) {
                return Err(Refusal::invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true"));
            }
            wanted.then_some(top.unwrap_or(0))
        }
    };
    Ok(count.map(|count| count as u8))
}

fn max_tokens(kind: Kind, fields: &mut Fields) -> Result<Option<u32>, Refusal> {
    let most = i64::from(u32::MAX);
    let older = fields.count("max_tokens", 1, most)?;
    let newer = match kind {
        Kind::Chat => fields.count("max_completion_tokens", 1, most)?,
        Kind::Completion => None,
    };
    Ok(newer.or(older).or((kind == Kind::Completion).then_some(COMPLETION_TOKENS_DEFAULT)))
}

/// A prompt and its answer must fit what the model can hold.
fn fitted(params: &Params, prompt: usize, max_tokens: Option<u32>, bounds: Bounds) -> Result<Arc<Params>, Refusal> {
    let most = bounds.max_model_tokens;
    let left = u32::try_from(prompt).ok().and_then(|prompt| most.checked_sub(prompt)).unwrap_or(0);
    let wanted = max_tokens.unwrap_or(left);
    if left == 0 || wanted > left {
        let answer = max_tokens.unwrap_or(1);
        let message =
            format!("the prompt has {prompt} tokens and the answer up to {answer}, this server holds {most} in all");
        return Err(Refusal { code: "ContextTooLong".into(), ..Refusal::invalid("max_tokens", message) });
    }
    Ok(Arc::new(Params { max_tokens: wanted, as_many_as_fit: max_tokens.is_none(), ..params.clone() }))
}

fn stop(fields: &mut Fields) -> Result<StopMatcher, Refusal> {
    let stops = match fields.take::<Stop>("stop")? {
        None => Vec::new(),
        Some(Stop::One(stop)) => vec![stop],
        Some(Stop::Many(stops)) => stops,
    };
    StopMatcher::new(stops).map_err(|error| text_refusal("stop", &error))
}

fn stream_options(fields: &mut Fields) -> Result<bool, Refusal> {
    let options: StreamOptions = fields.take("stream_options")?.unwrap_or_default();
    if options.continuous_usage_stats {
        return Err(Refusal::invalid("stream_options", "'continuous_usage_stats' is not supported"));
    }
    Ok(options.include_usage)
}

fn text_refusal(param: &'static str, error: &TextError) -> Refusal {
    let status = match error {
        TextError::TooLong { .. } => 413,
        _ => 400,
    };
    Refusal { param: Some(param.into()), ..Refusal::new(status, error.code(), error.to_string()) }
}
