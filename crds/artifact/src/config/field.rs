//! Reading single fields, with errors that name the key and show the value.

use serde::Deserialize;
use serde_json::Value;

use crate::json::Pairs;
use crate::reason::{Refusal, excerpt};

pub(super) struct Fields<'a>(pub &'a Pairs<Value>);

impl<'a> Fields<'a> {
    /// The value unless it is absent or null.
    pub(super) fn set(&self, key: &str) -> Option<&'a Value> {
        let found = self.0.0.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value).filter(|value| !value.is_null())
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, Refusal> {
        match self.set(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(key, other, "true or false")),
        }
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, Refusal> {
        self.set(key).map(|value| number(key, value)).transpose()
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, Refusal> {
        match self.set(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(key, other, "text")),
        }
    }
}

pub(super) fn wrong(key: &str, value: &Value, expected: &str) -> Refusal {
    let (key, value) = (excerpt(key, 200), excerpt(&value.to_string(), 120));
    Refusal::malformed(format!("adapter_config.json has {key} = {value}, expected {expected}"))
}

pub(super) fn number(key: &str, value: &Value) -> Result<f64, Refusal> {
    value.as_f64().filter(|number| number.is_finite()).ok_or_else(|| wrong(key, value, "a number"))
}

/// One integer or a list of them.
pub(super) fn integers(key: &str, value: &Value, limit: usize) -> Result<Vec<i64>, Refusal> {
    let one = |value: &Value| value.as_i64().ok_or_else(|| wrong(key, value, "an integer"));
    match value {
        Value::Array(items) if items.len() <= limit => items.iter().map(one).collect(),
        Value::Array(items) => Err(too_many(key, items.len(), limit)),
        other => one(other).map(|number| vec![number]),
    }
}

/// One text or a list of them.
pub(super) fn texts(key: &str, value: &Value, limit: usize) -> Result<Vec<String>, Refusal> {
    let one = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| wrong(key, value, "text"));
    match value {
        Value::Array(items) if items.len() <= limit => items.iter().map(one).collect(),
        Value::Array(items) => Err(too_many(key, items.len(), limit)),
        Value::String(text) if text.is_empty() => Ok(Vec::new()),
        other => one(other).map(|text| vec![text]),
    }
}

fn too_many(key: &str, count: usize, limit: usize) -> Refusal {
    Refusal::malformed(format!("adapter_config.json has {count} entries in {key}, the limit is {limit}"))
}

/// The map under `key` in the order of the file; empty if absent or null.
pub(super) fn ordered_map(json: &[u8], key: &'static str) -> Result<Vec<(String, Value)>, Refusal> {
    // A second pass over the text: the general value type sorts its keys, and here their order decides.
    #[derive(Deserialize)]
    struct Ordered {
        #[serde(default)]
        rank_pattern: Option<Pairs<Value>>,
        #[serde(default)]
        alpha_pattern: Option<Pairs<Value>>,
    }
    let ordered: Ordered = serde_json::from_slice(json)
        .map_err(|error| Refusal::malformed(format!("adapter_config.json: rank_pattern or alpha_pattern: {error}")))?;
    let found = if key == "rank_pattern" { ordered.rank_pattern } else { ordered.alpha_pattern };
    Ok(found.unwrap_or_default().0)
}
