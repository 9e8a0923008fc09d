//! Python's `json.dumps` over template values, so that tool schemas read as in training.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::paid::{self, DEPTH_MAX};

/// Longest separator: it is written once for each item.
const SEPARATOR_BYTES_MAX: usize = 64;

#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    pub indent: Option<usize>,
    /// Between items, and after a key.
    pub separators: Option<Vec<String>>,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

/// Pays for what it writes as it goes: a list that holds itself twice, and that one twice again, is short to make and
/// endless to write.
pub(super) fn dumps(state: &State<'_, '_>, value: &Value, style: &Style) -> Result<String, Error> {
    let (item, key) = match style.separators.as_deref() {
        Some([item, key]) if item.len().max(key.len()) > SEPARATOR_BYTES_MAX => {
            let bytes = item.len().max(key.len());
            return Err(refuse(format!("a separator has {bytes} bytes, the limit is {SEPARATOR_BYTES_MAX}")));
        }
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(other) => return Err(refuse(format!("separators are a pair, not {} strings", other.len()))),
        None if style.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut writer = Writer { state, style, item, key, out: String::new() };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a, 's, 'e> {
    state: &'a State<'s, 'e>,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: String,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(refuse(format!("a value is nested deeper than {DEPTH_MAX}")));
        }
        let bytes = value.as_str().map_or(0, str::len) as u64;
        self.state.consume_fuel(1 + bytes / 64)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(refuse(format!("a value of kind {kind} is not JSON"))),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.before_item(empty, depth + 1);
            self.value(&item, depth + 1)?;
            empty = false;
        }
        self.after_items(empty, depth);
        self.out.push(']');
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.style.sort_keys {
            keys.iter().try_for_each(|key| paid::pay(self.state, key, true))?;
            keys.sort_by_key(ToString::to_string);
        }
        self.out.push('{');
        for (index, key) in keys.iter().enumerate() {
            self.before_item(index == 0, depth + 1);
            paid::pay(self.state, key, true)?;
            self.string(&key.to_string());
            self.out.push_str(self.key);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.after_items(keys.is_empty(), depth);
        self.out.push('}');
        Ok(())
    }

    fn before_item(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(self.item);
        }
        self.line(depth);
    }

    fn after_items(&mut self, empty: bool, depth: usize) {
        if !empty {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => self.escape(control),
                foreign if self.style.ensure_ascii && !foreign.is_ascii() => self.escape(foreign),
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, letter: char) {
        for unit in letter.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

/// Integers as they are, others as Python's `repr` writes a float.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let float = f64::try_from(value.clone())?;
    if !float.is_finite() {
        return Err(refuse(format!("{float} is not JSON")));
    }
    let size = float.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return Ok(format!("{digits}e{sign}{:02}", exponent.abs()));
    }
    Ok(format!("{float:?}"))
}

fn refuse(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
