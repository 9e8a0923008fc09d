//! A conversation as clients send it.

use std::collections::BTreeMap;

use minijinja::Value;
use serde::{Deserialize, Deserializer};

/// Roles that a message may have; templates print them unquoted, so nothing else is let through.
pub const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// What a chat template is given.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// OpenAI's function schemas, in the client's order of keys. `None` is not the same as empty for a template.
    pub tools: Option<Vec<Value>>,
    /// Ends the text with the start of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`); they do not hide the ones above.
    pub variables: BTreeMap<String, Value>,
    /// For templates that print the date; in seconds since 1970.
    pub now_s: u64,
}

/// One message. `content` may come as null, as text, or as parts of text, which are joined by line ends.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Message {
    pub role: String,
    #[serde(default, deserialize_with = "content")]
    pub content: Option<String>,
    /// `tool_calls`, `name` and whatever else a template may read.
    #[serde(flatten)]
    pub fields: BTreeMap<String, Value>,
}

impl Message {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), fields: BTreeMap::new() }
    }

    /// A content of null is left out, as Hugging Face leaves it out: templates ask whether it is defined.
    pub(super) fn to_value(&self) -> Value {
        let content = self.content.as_deref().map(|content| ("content", Value::from(content)));
        let own = [("role", Value::from(self.role.as_str()))].into_iter().chain(content);
        let others = self.fields.iter().map(|(key, value)| (key.as_str(), value.clone()));
        Value::from_pairs(own.chain(others.filter(|(key, _)| !matches!(*key, "role" | "content"))))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

fn content<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let parts = match Option::<Content>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Content::Text(text)) => return Ok(Some(text)),
        Some(Content::Parts(parts)) => parts,
    };
    let texts = parts.into_iter().map(|part| match (part.kind.as_str(), part.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(serde::de::Error::missing_field("text")),
        (kind, _) => {
            let kind: String = kind.chars().take(40).collect();
            Err(serde::de::Error::custom(format!("content part of type '{kind}' is not supported, only 'text'")))
        }
    });
    Ok(Some(texts.collect::<Result<Vec<_>, D::Error>>()?.join("\n")))
}
