//! A JSON object that is taken apart field by field: what is left at the end was not understood, and is refused by name.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::refusal::{Refusal, shown};

/// Fields that change nothing about an answer.
const INERT: [&str; 11] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "priority",
    "parallel_tool_calls",
    "spaces_between_special_tokens",
];

/// Fields that would change the answer and are not served, unless they have the value that asks for nothing.
const NOT_SERVED: [(&str, &[&str]); 25] = [
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("prediction", &[]),
    ("reasoning_effort", &["\"none\""]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
    ("suffix", &["\"\""]),
    ("echo", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("prompt_logprobs", &[]),
    ("truncate_prompt_tokens", &[]),
    ("continue_final_message", &["false"]),
    ("chat_template", &[]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("merged_adapters", &[]),
];

/// What the values of a body may take in memory, by [`weight`].
const VALUES_BYTES_MAX: usize = 16 << 20;

/// What the values of a JSON text take in memory, about: an object of eight letters takes hundreds of bytes. Counted before
/// anything is made of it; nothing is checked.
fn weight(body: &[u8]) -> usize {
    let (mut bytes, mut within_text, mut escaped) = (0_usize, false, false);
    for letter in body {
        match letter {
            _ if escaped => escaped = false,
            b'\\' if within_text => escaped = true,
            b'"' => within_text = !within_text,
            _ if within_text => {}
            b'{' => bytes += 768,
            b'[' => bytes += 160,
            b',' | b':' => bytes += 32,
            _ => {}
        }
    }
    bytes
}

pub struct Fields(Map<String, Value>);

impl Fields {
    /// # Errors
    /// 400 if the body is no JSON object, or one of too many values.
    pub fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let bytes = weight(body);
        if bytes > VALUES_BYTES_MAX {
            let message = format!("the values of the body take about {bytes} bytes, the limit is {VALUES_BYTES_MAX}");
            return Err(Refusal::new(400, "InvalidRequest", message));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(Refusal::new(400, "InvalidRequest", "the body is no JSON object")),
            Err(error) => Err(Refusal::new(400, "InvalidRequest", format!("the body is no JSON: {error}"))),
        }
    }

    /// A field's value; null and absent are the same.
    ///
    /// # Errors
    /// 400 if it has another type.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, Refusal> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|error| Refusal::invalid(name, format!("'{name}' is not as expected: {error}"))),
        }
    }

    /// A number within its bounds.
    ///
    /// # Errors
    /// 400 with the value and the bounds.
    pub fn number(&mut self, name: &'static str, default: f32, low: f32, high: f32) -> Result<f32, Refusal> {
        let value = self.take::<f32>(name)?.unwrap_or(default);
        if value >= low && value <= high {
            return Ok(value);
        }
        Err(Refusal::invalid(name, format!("'{name}' is {value}, allowed is {low} to {high}")))
    }

    /// A count within its bounds, or `None`.
    ///
    /// # Errors
    /// 400 with the value and the bounds.
    pub fn count(&mut self, name: &'static str, low: i64, high: i64) -> Result<Option<u32>, Refusal> {
        let Some(value) = self.take::<i64>(name)? else { return Ok(None) };
        let within = (low..=high).contains(&value).then(|| u32::try_from(value).ok()).flatten();
        match within {
            Some(value) => Ok(Some(value)),
            None => Err(Refusal::invalid(name, format!("'{name}' is {value}, allowed is {low} to {high}"))),
        }
    }

    /// # Errors
    /// 400 by name for the first field that is left and would change the answer, or is not known at all.
    pub fn finish(self) -> Result<(), Refusal> {
        for (name, value) in self.0 {
            if value.is_null() || INERT.contains(&name.as_str()) {
                continue;
            }
            let shown_name = shown(&name);
            let known = NOT_SERVED.iter().find(|(field, _)| *field == name);
            let message = match known {
                Some((_, nothing)) if nothing.contains(&value.to_string().as_str()) => continue,
                Some(_) => format!("'{shown_name}' is not supported here, and leaving it out would change the answer"),
                None => format!("'{shown_name}' is not a field of this request"),
            };
            return Err(Refusal { code: "UnsupportedField".into(), ..Refusal::invalid(shown_name, message) });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_many_small_values_are_refused_before_they_grow() {
        let check = |open: &str, piece: &str, times: usize, fits: bool| {
            let body = format!("{{\"metadata\":{open}{}0]}}", piece.repeat(times));
            assert_eq!(Fields::parse(body.as_bytes()).is_ok(), fits, "{piece} {times} times");
        };
        check("[", "{\"\":0},", 500_000, false);
        check("[", "{\"\":0},", 10_000, true);
        check("[", "[0],", 1_000_000, false);
        check("[", "[0],", 50_000, true);
        check("[", "0,", 2_000_000, false);
        // A prompt of ids, as long as they come.
        check("[", "31999,", 400_000, true);
        // Within texts nothing counts.
        check("[", "\"{{[[,,\\\"{{::\",", 200_000, true);
    }
}
