//! The chat template of a model: Jinja as Hugging Face runs it, within limits.
//!
//! Source for the environment (trimmed blocks, `tojson`, `raise_exception`, `strftime_now`):
//! `transformers.utils.chat_template_utils`.

mod instructions;
mod json;
mod paid;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use minijinja::machinery::{self, CompiledTemplate, Instructions, TemplateConfig, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, escape_formatter};

use super::chat::{Chat, ROLES};
use super::clock::strftime;
use super::error::TextError;

/// Longest source of a template, in bytes: some times the longest in use.
pub const TEMPLATE_BYTES_MAX: usize = 128 << 10;
/// Longest text that a template may make, in bytes.
pub const RENDERED_BYTES_MAX: usize = 8 << 20;
/// Work of one rendering, in minijinja's unit: about one instruction, or 64 bytes of data.
const FUEL_MAX: u64 = 2_000_000;
/// Messages and tools of one conversation.
const ITEMS_MAX: usize = 4096;

/// Letters of what a template raises.
const WORDS_MAX: usize = 1000;

const PLAIN: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";

/// One template, on a machine that is busy with other things.
const READ_TIME_MAX: Duration = Duration::from_secs(20);
/// Room to read the deepest expression that a template can spell, and to drop the deepest value that all the fuel can make.
/// Memory is taken as it is used.
const STACK_BYTES: usize = 512 << 20;

/// Compiled once, rendered by many requests at a time.
pub struct ChatTemplate {
    environment: Environment<'static>,
    plain: Compiled,
    /// Used where a request brings tools.
    with_tools: Option<Compiled>,
    /// `bos_token`, `eos_token` and the like, as text.
    special_tokens: BTreeMap<String, String>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { environment: _, plain, with_tools, special_tokens } = self;
        formatter
            .debug_struct("ChatTemplate")
            .field("bytes", &plain.instructions.source().len())
            .field("with_tools", &with_tools.is_some())
            .field("special_tokens", special_tokens)
            .finish()
    }
}

/// A template as instructions, each of which pays for what it does.
struct Compiled {
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Compiled {
    fn new(name: &'static str, source: &str) -> Result<Self, TextError> {
        let malformed = |why| TextError::malformed("chat template", why);
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(malformed(format!("it has {} bytes, the limit is {TEMPLATE_BYTES_MAX}", source.len())));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax_config = syntax.map_err(|error| malformed(error.to_string()))?;
        let config = TemplateConfig { syntax_config, default_auto_escape: Arc::new(|_| AutoEscape::None) };
        // A process reads the templates of one model, and needs them as long as it lives.
        let source: &'static str = Box::leak(without_generation_blocks(source).into_boxed_str());
        let compile = move || CompiledTemplate::new(name, source, &config).map_err(|error| explain(&error));
        let compiled = in_time(compile).map_err(malformed)?;
        let blocks = compiled.blocks.iter().map(|(name, block)| Ok((*name, instructions::paying(block)?)));
        Ok(Self {
            instructions: instructions::paying(&compiled.instructions).map_err(malformed)?,
            blocks: blocks.collect::<Result<_, _>>().map_err(malformed)?,
        })
    }

    fn render(&self, environment: &Environment<'static>, variables: Value) -> Result<String, Error> {
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        machinery::eval(environment, &self.instructions, variables, &self.blocks, &mut output, AutoEscape::None)?;
        Ok(text)
    }
}

impl ChatTemplate {
    /// `with_tools` is used instead of `source` where a request brings tools.
    ///
    /// # Errors
    /// `Malformed` if a template is longer than [`TEMPLATE_BYTES_MAX`], does not compile, or does what nobody can pay for.
    pub fn new(
        source: &str,
        with_tools: Option<&str>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        Ok(Self {
            environment: environment(),
            plain: Compiled::new(PLAIN, source)?,
            with_tools: with_tools.map(|source| Compiled::new(WITH_TOOLS, source)).transpose()?,
            special_tokens,
        })
    }

    /// # Errors
    /// `UnknownRole`; `Template` for what the template raises and for work, length or items over the limits.
    pub fn render(&self, chat: &Chat) -> Result<String, TextError> {
        let tools = chat.tools.as_deref();
        let items = chat.messages.len() + tools.map_or(0, <[Value]>::len);
        if items > ITEMS_MAX {
            let why = format!("{items} messages and tools, the limit is {ITEMS_MAX}");
            return Err(TextError::Template { why });
        }
        for (index, message) in chat.messages.iter().enumerate() {
            if !ROLES.contains(&message.role.as_str()) {
                let role = message.role.chars().take(40).collect();
                return Err(TextError::UnknownRole { index, role });
            }
        }
        let text = self.run(chat).map_err(|why| TextError::Template { why })?;
        if text.len() > RENDERED_BYTES_MAX {
            return Err(TextError::TooLong { bytes: text.len(), limit: RENDERED_BYTES_MAX });
        }
        Ok(text)
    }

    fn run(&self, chat: &Chat) -> Result<String, String> {
        let tools = chat.tools.as_deref().is_some_and(|tools| !tools.is_empty());
        let template = self.with_tools.as_ref().filter(|_| tools).unwrap_or(&self.plain);
        with_room(|| template.render(&self.environment, self.variables(chat)).map_err(|error| explain(&error)))
    }

    fn variables(&self, chat: &Chat) -> Value {
        let mut variables = chat.variables.clone();
        for (name, text) in &self.special_tokens {
            variables.insert(name.clone(), Value::from(text.as_str()));
        }
        let messages: Vec<Value> = chat.messages.iter().map(super::chat::Message::to_value).collect();
        let now_s = chat.now_s;
        let own = [
            ("messages", Value::from(messages)),
            ("tools", Value::from(chat.tools.clone())),
            ("add_generation_prompt", Value::from(chat.add_generation_prompt)),
            ("strftime_now", Value::from_function(move |format: &str| strftime(format, now_s))),
        ];
        variables.extend(own.map(|(name, value)| (name.to_owned(), value)));
        variables.entry("documents".to_owned()).or_insert_with(|| Value::from(()));
        Value::from_pairs(variables)
    }
}

/// Reads a template on a thread of its own. Its constants are computed meanwhile, which nothing pays for: what takes long is
/// given up, and so is the thread. The process will not serve this model.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES);
    let working = thread.spawn(move || sender.send(work()).unwrap_or_default());
    working.map_err(|error| format!("no thread for it: {error}"))?;
    receiver.recv_timeout(READ_TIME_MAX).unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => Err(format!("reading it takes longer than {READ_TIME_MAX:?}")),
        RecvTimeoutError::Disconnected => Err("reading it ended in a panic".to_owned()),
    })
}

/// Does it on a thread of its own, for the sake of its stack.
fn with_room<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES);
        let working = thread.spawn_scoped(scope, work).map_err(|error| format!("no thread for it: {error}"))?;
        working.join().unwrap_or_else(|_| Err("it ended in a panic".to_owned()))
    })
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL_MAX));
    environment.set_formatter(python_formatter);
    paid::add(&mut environment);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// Hugging Face marks the assistant's turns for training with `{% generation %}`; for serving they are plain text.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag_on) = rest.split_at(start);
        out.push_str(before);
        let end = tag_on.find("%}").map_or(tag_on.len(), |end| end + 2);
        let (tag, after) = tag_on.split_at(end);
        match tag.trim_matches(['{', '%', '}', '-', '+', ' ', '\t', '\n', '\r']) {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Prints constants as Python does.
fn python_formatter(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.is_none() {
        return out.write_str("None").map_err(Error::from);
    }
    // The interpreter pays for what has been printed, which is too late for a value that is endless.
    paid::pay(state, value, true)?;
    match bool::try_from(value.clone()) {
        Ok(flag) if value.kind() == ValueKind::Bool => {
            out.write_str(if flag { "True" } else { "False" }).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

fn raise_exception(state: &State<'_, '_>, message: Value) -> Result<Value, Error> {
    paid::pay(state, &message, true)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// Python's `json.dumps`, which Hugging Face puts in the place of Jinja's own filter.
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<String, Error> {
    let style = json::Style {
        indent: options.get::<Option<usize>>("indent")?,
        separators: options.get::<Option<Value>>("separators")?.map(separators).transpose()?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    json::dumps(state, value, &style)
}

/// They are texts already, or none: what a list comes to as a text nobody has paid for.
fn separators(given: Value) -> Result<Vec<String>, Error> {
    let text = |value: Value| value.as_str().map(str::to_owned);
    let pair: Option<Vec<String>> = given.try_iter()?.take(3).map(text).collect();
    pair.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "separators are a pair of texts"))
}

/// What went wrong, and in which line of the template.
fn explain(error: &Error) -> String {
    let why = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let why: String = why.chars().take(WORDS_MAX).collect();
    match (error.kind(), error.line()) {
        (ErrorKind::OutOfFuel, _) => format!("it spends more than {FUEL_MAX} units of work"),
        (_, Some(line)) => format!("{why} (template line {line})"),
        (_, None) => why,
    }
}
