//! The chat template of a model: Jinja as Hugging Face runs it, within limits.
//!
//! Source for the environment (trimmed blocks, `tojson`, `raise_exception`, `strftime_now`):
//! `transformers.utils.chat_template_utils`.

mod json;

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::chat::{Chat, ROLES};
use super::clock::strftime;
use super::error::TextError;

/// Longest source of a template, in bytes.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// Longest text that a template may make, in bytes.
pub const RENDERED_BYTES_MAX: usize = 8 << 20;
/// Work of one rendering, in minijinja's unit: about one instruction, or 64 bytes of data.
const FUEL_MAX: u64 = 2_000_000;
/// Messages and tools of one conversation.
const ITEMS_MAX: usize = 4096;

/// Deepest nesting of a value that is printed.
const DEPTH_MAX: usize = 64;

const PLAIN: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";

/// Compiled once, rendered by many requests at a time.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and the like, as text.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// `with_tools` is used instead of `source` where a request brings tools.
    ///
    /// # Errors
    /// `Malformed` if a template is longer than [`TEMPLATE_BYTES_MAX`] or does not compile.
    pub fn new(
        source: &str,
        with_tools: Option<&str>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        let mut environment = environment()?;
        for (name, source) in [(PLAIN, Some(source)), (WITH_TOOLS, with_tools)] {
            let Some(source) = source else { continue };
            if source.len() > TEMPLATE_BYTES_MAX {
                let why = format!("it has {} bytes, the limit is {TEMPLATE_BYTES_MAX}", source.len());
                return Err(TextError::malformed("chat template", why));
            }
            let added = environment.add_template_owned(name, without_generation_blocks(source));
            added.map_err(|error| TextError::malformed("chat template", explain(&error)))?;
        }
        Ok(Self { environment, special_tokens })
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
        let name = if tools.is_some_and(|tools| !tools.is_empty()) { WITH_TOOLS } else { PLAIN };
        let template = self.environment.get_template(name).or_else(|_| self.environment.get_template(PLAIN));
        let text = template.and_then(|template| template.render(self.variables(chat)));
        let text = text.map_err(|error| TextError::Template { why: explain(&error) })?;
        if text.len() > RENDERED_BYTES_MAX {
            return Err(TextError::TooLong { bytes: text.len(), limit: RENDERED_BYTES_MAX });
        }
        Ok(text)
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
            ("strftime_now", Value::from_function(move |format: String| strftime(&format, now_s))),
        ];
        variables.extend(own.map(|(name, value)| (name.to_owned(), value)));
        variables.entry("documents".to_owned()).or_insert_with(|| Value::from(()));
        Value::from_pairs(variables)
    }
}

fn environment() -> Result<Environment<'static>, TextError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| TextError::malformed("template syntax", error.to_string()))?);
    environment.set_fuel(Some(FUEL_MAX));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(python_formatter);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    Ok(environment)
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
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        pay(state, value, 0)?;
    }
    match bool::try_from(value.clone()) {
        Ok(flag) if value.kind() == ValueKind::Bool => {
            out.write_str(if flag { "True" } else { "False" }).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// Pays for a list or a map before it is printed. The engine pays for what has been printed, which is too late for a list
/// that holds itself twice, and that one twice again.
fn pay(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a value is nested deeper than {DEPTH_MAX}")));
    }
    state.consume_fuel(1)?;
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| pay(state, &item, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| pay(state, &value.get_item(&key)?, depth + 1)),
        _ => Ok(()),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Python's `json.dumps`, which Hugging Face puts in the place of Jinja's own filter.
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<String, Error> {
    let style = json::Style {
        indent: options.get::<Option<usize>>("indent")?,
        separators: options.get::<Option<Vec<String>>>("separators")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    json::dumps(state, value, &style)
}

/// What went wrong, and in which line of the template.
fn explain(error: &Error) -> String {
    let why = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match (error.kind(), error.line()) {
        (ErrorKind::OutOfFuel, _) => format!("it spends more than {FUEL_MAX} units of work"),
        (_, Some(line)) => format!("{why} (template line {line})"),
        (_, None) => why,
    }
}
