//! Reading and editing a request's JSON body without touching a byte that need not change. Pure.
//!
//! Only top-level fields are looked at, and only as far as the gateway must understand them. A field that decides where a
//! request goes may stand there once: two readers that disagree on which of two `model`s counts would let a client run
//! what its key does not permit.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What the gateway understands of a body, with the places of what it may edit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspected {
    pub model: String,
    pub stream: bool,
    /// The client wants the usage event of a stream.
    pub include_usage: bool,
    model_span: Range<usize>,
    options: Options,
    /// Just before the closing brace.
    end: usize,
}

/// Where `stream_options.include_usage` is, or would go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Options {
    #[default]
    Absent,
    /// `null`, to be replaced.
    Null(Range<usize>),
    /// An object without the field: just after its opening brace, and whether other fields follow.
    Open { at: usize, empty: bool },
    /// The value of the field.
    Field(Range<usize>),
}

/// What is wrong with a body; the answer is 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body is not valid JSON: {0}")]
    NotJson(String),
    #[error("'{field}' stands twice in the body")]
    Twice { field: &'static str },
    #[error("'{field}' must be {expected}, not {found}")]
    WrongType { field: &'static str, expected: &'static str, found: String },
    #[error("'model' is missing: name the base or an adapter; \"\" asks for the base")]
    NoModel,
    #[error("'model' is blank: name the base or an adapter; \"\" asks for the base")]
    BlankModel,
    #[error("'{field}' is not supported by the gateway: enrol the merge as an adapter of its own")]
    Unsupported { field: &'static str },
}

impl BodyError {
    /// The field to name as `param` of the error.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            BodyError::NotJson(_) => None,
            BodyError::NoModel | BodyError::BlankModel => Some("model"),
            BodyError::Twice { field } | BodyError::WrongType { field, .. } | BodyError::Unsupported { field } => {
                Some(field)
            }
        }
    }
}

/// The top-level fields that matter, as they are written.
#[derive(Default)]
struct Fields<'a> {
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    stream_options: Option<&'a RawValue>,
    merged_adapters: Option<&'a RawValue>,
    twice: Option<&'static str>,
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Fields::default();
                while let Some(key) = map.next_key::<Key>()? {
                    let (slot, name) = match key {
                        Key::Model => (&mut fields.model, "model"),
                        Key::Stream => (&mut fields.stream, "stream"),
                        Key::StreamOptions => (&mut fields.stream_options, "stream_options"),
                        Key::MergedAdapters => (&mut fields.merged_adapters, "merged_adapters"),
                        Key::Other => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    if slot.replace(map.next_value()?).is_some() {
                        fields.twice = Some(name);
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Model,
    Stream,
    StreamOptions,
    MergedAdapters,
    #[serde(other)]
    Other,
}

/// Fields of `stream_options`.
struct StreamOptions<'a> {
    include_usage: Option<&'a RawValue>,
    twice: bool,
    empty: bool,
}

impl<'de> Deserialize<'de> for StreamOptions<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OptionsVisitor;
        impl<'de> Visitor<'de> for OptionsVisitor {
            type Value = StreamOptions<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StreamOptions<'de>, A::Error> {
                let mut options = StreamOptions { include_usage: None, twice: false, empty: true };
                while let Some(key) = map.next_key::<String>()? {
                    options.empty = false;
                    if key != "include_usage" {
                        map.next_value::<IgnoredAny>()?;
                    } else if options.include_usage.replace(map.next_value()?).is_some() {
                        options.twice = true;
                    }
                }
                Ok(options)
            }
        }
        deserializer.deserialize_map(OptionsVisitor)
    }
}

/// Finds what the gateway needs.
pub fn inspect(body: &[u8]) -> Result<Inspected, BodyError> {
    let not_json = |error: serde_json::Error| BodyError::NotJson(error.to_string());
    // Checked first, so that a broken character is named as such and every span is one of characters.
    let text = std::str::from_utf8(body).map_err(|error| not_json(serde_json::Error::custom(error)))?;
    let fields: Fields<'_> = serde_json::from_str(text).map_err(not_json)?;
    if let Some(field) = fields.twice {
        return Err(BodyError::Twice { field });
    }
    if fields.merged_adapters.is_some_and(|value| value.get() != "null") {
        return Err(BodyError::Unsupported { field: "merged_adapters" });
    }
    let model_raw = fields.model.ok_or(BodyError::NoModel)?;
    let model = typed::<String>(model_raw, "model", "a string")?;
    if !model.is_empty() && model.trim().is_empty() {
        return Err(BodyError::BlankModel);
    }
    let stream = match fields.stream {
        Some(raw) => typed::<Option<bool>>(raw, "stream", "true or false")?.unwrap_or(false),
        None => false,
    };
    let (options, include_usage) = match fields.stream_options {
        Some(raw) => inspect_options(text, raw)?,
        None => (Options::Absent, false),
    };
    let end = text.trim_end().len().saturating_sub(1);
    Ok(Inspected { model, stream, include_usage, model_span: span(text, model_raw), options, end })
}

fn inspect_options(text: &str, raw: &RawValue) -> Result<(Options, bool), BodyError> {
    if raw.get() == "null" {
        return Ok((Options::Null(span(text, raw)), false));
    }
    let options: StreamOptions<'_> = typed(raw, "stream_options", "an object")?;
    if options.twice {
        return Err(BodyError::Twice { field: "stream_options.include_usage" });
    }
    match options.include_usage {
        Some(field) => {
            let wanted = typed::<Option<bool>>(field, "stream_options.include_usage", "true or false")?;
            Ok((Options::Field(span(text, field)), wanted.unwrap_or(false)))
        }
        None => Ok((Options::Open { at: span(text, raw).start + 1, empty: options.empty }, false)),
    }
}

fn typed<'a, T: Deserialize<'a>>(
    raw: &'a RawValue,
    field: &'static str,
    expected: &'static str,
) -> Result<T, BodyError> {
    let found = || raw.get().chars().take(40).collect();
    serde_json::from_str(raw.get()).map_err(|_| BodyError::WrongType { field, expected, found: found() })
}

/// Place of a raw value in the text that it was borrowed from.
fn span(text: &str, raw: &RawValue) -> Range<usize> {
    let start = (raw.get().as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + raw.get().len()
}

/// The body with another `model`, and asking for the usage event if `ask_usage`. All other bytes stay.
pub fn rewrite(body: &[u8], inspected: &Inspected, model: Option<&str>, ask_usage: bool) -> Vec<u8> {
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    if let Some(model) = model {
        edits.push((inspected.model_span.clone(), serde_json::Value::from(model).to_string()));
    }
    if ask_usage && !inspected.include_usage {
        edits.push(match &inspected.options {
            Options::Absent => (inspected.end..inspected.end, r#","stream_options":{"include_usage":true}"#.to_owned()),
            Options::Null(span) => (span.clone(), r#"{"include_usage":true}"#.to_owned()),
            Options::Open { at, empty: true } => (*at..*at, r#""include_usage":true"#.to_owned()),
            Options::Open { at, empty: false } => (*at..*at, r#""include_usage":true,"#.to_owned()),
            Options::Field(span) => (span.clone(), "true".to_owned()),
        });
    }
    edits.sort_by_key(|(span, _)| span.start);
    let mut out = Vec::with_capacity(body.len() + 128);
    let mut from = 0;
    for (span, text) in edits {
        out.extend_from_slice(body.get(from..span.start).unwrap_or_default());
        out.extend_from_slice(text.as_bytes());
        from = span.end;
    }
    out.extend_from_slice(body.get(from..).unwrap_or_default());
    out
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
