//! The operators, filters and tests that pay for what they do before they do it.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Deepest nesting of a value that is written out or compared.
pub(super) const DEPTH_MAX: usize = 64;
/// Digits of a number in a format.
const FORMAT_DIGITS_MAX: usize = 3;
/// What a step towards deeper nesting costs: a value that all the fuel is spent on can still be dropped.
const DEEPER_COST: u64 = 50;

pub(super) const CONCAT: &str = "~";
pub(super) const EQUAL: &str = "==";
pub(super) const UNEQUAL: &str = "!=";
pub(super) const LESS: &str = "<";
pub(super) const LESS_OR_EQUAL: &str = "<=";
pub(super) const GREATER: &str = ">";
pub(super) const GREATER_OR_EQUAL: &str = ">=";
pub(super) const IN: &str = "in[]";
pub(super) const ITEM: &str = "[.]";
pub(super) const LIST: &str = "[]";
pub(super) const TUPLE: &str = "()";
pub(super) const MAP: &str = "{}";
pub(super) const DEEPER: &str = "+1";
pub(super) const KEPT: &str = ".=";
pub(super) const WHOLE: &str = "+n";

/// Each with the name of its paying twin.
macro_rules! twins {
    ($($name:literal)*) => { [$(($name, concat!("paid:", $name))),*] };
}

/// Filters that do no more than look at a list's items, or at nothing.
const FLAT_FILTERS: [(&str, &str); 14] =
    twins!("length" "count" "first" "last" "list" "items" "reverse" "default" "d" "batch" "slice" "chain" "zip" "bool");
/// Those that make a value of each letter of a text.
const SPELLING: [&str; 17] = [
    "list",
    "batch",
    "slice",
    "chain",
    "zip",
    "join",
    "sort",
    "unique",
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "min",
    "max",
    "sum",
    "groupby",
];
/// Filters that may write out, compare or sort whatever they are given.
const DEEP_FILTERS: [(&str, &str); 32] = twins!(
    "safe" "escape" "e" "lower" "upper" "title" "capitalize" "replace" "dictsort" "trim" "join" "split" "lines" "round"
    "abs" "int" "float" "attr" "min" "max" "sort" "string" "sum" "indent" "select" "reject" "selectattr" "rejectattr"
    "map" "groupby" "unique" "format"
);
/// Tests that write out or compare.
const TESTS: [(&str, &str); 22] = twins!(
    "startingwith" "endingwith" "lower" "upper" "eq" "equalto" "==" "ne" "!=" "lt" "lessthan" "<" "le" "<=" "gt"
    "greaterthan" ">" "ge" ">=" "in" "sameas" "divisibleby"
);

fn twin(twins: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    twins.iter().find(|(known, _)| *known == name).map(|(_, paid)| *paid)
}

/// The paying twin of a filter that comes with the interpreter.
pub(super) fn filter(name: &str) -> Option<&'static str> {
    twin(&FLAT_FILTERS, name).or_else(|| twin(&DEEP_FILTERS, name))
}

/// The paying twin of a test that comes with the interpreter.
pub(super) fn test(name: &str) -> Option<&'static str> {
    twin(&TESTS, name)
}

/// Adds everything that [`super::instructions`] calls, and what templates call by name.
pub(super) fn add(environment: &mut Environment<'static>) {
    add_operators(environment);
    for (names, deep) in [(&FLAT_FILTERS[..], false), (&DEEP_FILTERS, true)] {
        for (name, paid) in names {
            environment.add_filter(*paid, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                arguments.iter().try_for_each(|argument| pay(state, argument, deep))?;
                pay_for_pieces(state, name, &arguments)?;
                let made = state.apply_filter(name, &arguments)?;
                deeper(state, &made)?;
                Ok::<_, Error>(made)
            });
        }
    }
    for (name, paid) in TESTS {
        environment.add_test(paid, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            arguments.iter().try_for_each(|argument| pay(state, argument, true))?;
            state.perform_test(name, &arguments)
        });
    }
    // It writes out all there is.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    environment.add_function("namespace", namespace);
    environment.add_function("dict", dict);
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let deep = !matches!(method, "get" | "items" | "keys" | "values");
        pay(state, value, deep)?;
        arguments.iter().try_for_each(|argument| pay(state, argument, true))?;
        if value.as_str().is_some() {
            let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
            pay_for_pieces(state, method, &all)?;
        }
        let made = unknown_method_callback(state, value, method, arguments)?;
        deeper(state, &made)?;
        Ok(made)
    });
}

fn add_operators(environment: &mut Environment<'static>) {
    environment.add_filter(CONCAT, |state: &State<'_, '_>, left: Value, right: Value| {
        pay(state, &left, true)?;
        pay(state, &right, true)?;
        Ok::<_, Error>(match (left.as_str(), right.as_str()) {
            (Some(left), Some(right)) => Value::from([left, right].concat()),
            _ => Value::from(format!("{left}{right}")),
        })
    });
    let mut compare = |name, holds: fn(&Value, &Value) -> bool| {
        environment.add_filter(name, move |state: &State<'_, '_>, left: Value, right: Value| {
            pay_to_compare(state, &left, &right)?;
            Ok::<_, Error>(holds(&left, &right))
        });
    };
    compare(EQUAL, |left, right| left == right);
    compare(UNEQUAL, |left, right| left != right);
    compare(LESS, |left, right| left < right);
    compare(LESS_OR_EQUAL, |left, right| left <= right);
    compare(GREATER, |left, right| left > right);
    compare(GREATER_OR_EQUAL, |left, right| left >= right);
    environment.add_filter(IN, is_in);
    environment.add_filter(ITEM, item);
    environment.add_filter(LIST, |state: &State<'_, '_>, items: Rest<ValueOrKwargs>| {
        let items = items.into_values();
        keep(state, &items)?;
        Ok::<_, Error>(Value::from(items))
    });
    environment.add_filter(TUPLE, |state: &State<'_, '_>, items: Rest<ValueOrKwargs>| {
        let items = items.into_values();
        keep(state, &items)?;
        Ok::<_, Error>(Value::from(Tuple::from(items)))
    });
    environment.add_filter(MAP, map);
    environment.add_filter(DEEPER, |state: &State<'_, '_>, value: Value| {
        state.consume_fuel(DEEPER_COST)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(WHOLE, |state: &State<'_, '_>, value: Value| {
        pay(state, &value, true)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(KEPT, |state: &State<'_, '_>, value: Value| {
        keep(state, std::slice::from_ref(&value))?;
        Ok::<_, Error>(value)
    });
}

fn holds_others(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Plain)
}

/// Pays for a look at all bytes of a text and, if `deep`, at all that a list or a map comes to when it is written out.
pub(super) fn pay(state: &State<'_, '_>, value: &Value, deep: bool) -> Result<(), Error> {
    if deep { pay_within(state, value, 0) } else { state.consume_fuel(bytes(value) / 64) }
}

fn bytes(value: &Value) -> u64 {
    value.as_str().map_or_else(|| value.as_bytes().map_or(0, <[u8]>::len), str::len) as u64
}

fn pay_within(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(refuse(format!("a value is nested deeper than {DEPTH_MAX}")));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.try_for_each(|item| {
            state.consume_fuel(1)?;
            pay_within(state, &item, depth + 1)
        }),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            state.consume_fuel(2)?;
            pay_within(state, &key, depth + 1)?;
            pay_within(state, &value.get_item(&key)?, depth + 1)
        }),
        _ => state.consume_fuel(bytes(value) / 64),
    }
}

/// Pays for the pieces into which a text is cut, and for what a format makes of its arguments: the result is charged for when
/// it is there.
fn pay_for_pieces(state: &State<'_, '_>, name: &str, arguments: &[Value]) -> Result<(), Error> {
    let Some(text) = arguments.first().and_then(Value::as_str) else { return Ok(()) };
    let pieces = match (name, arguments.get(1).and_then(Value::as_str)) {
        ("split", Some(separator)) if !separator.is_empty() => text.matches(separator).count(),
        ("split" | "lines" | "splitlines", _) => text.bytes().filter(u8::is_ascii_whitespace).count(),
        ("format", _) => return pay_for_format(state, text, arguments.get(1..).unwrap_or_default()),
        _ if SPELLING.contains(&name) => text.len(),
        _ => return Ok(()),
    };
    // A value takes as much as 32 letters.
    state.consume_fuel(pieces as u64 / 2)
}

/// Each place may take each argument once; widths are those of texts that people read.
fn pay_for_format(state: &State<'_, '_>, text: &str, arguments: &[Value]) -> Result<(), Error> {
    let wide = text.split(|letter: char| !letter.is_ascii_digit()).any(|digits| digits.len() > FORMAT_DIGITS_MAX);
    if wide || text.contains('*') || nested(text) {
        return Err(refuse(format!(
            "a format has a width of more than {FORMAT_DIGITS_MAX} digits, or one that is an argument"
        )));
    }
    let places = text.matches(['{', '%']).count() as u64;
    let (before, _) = state.fuel_levels().unwrap_or_default();
    arguments.iter().try_for_each(|argument| pay(state, argument, true))?;
    let (after, _) = state.fuel_levels().unwrap_or_default();
    state.consume_fuel((after - before + 16).saturating_mul(places))
}

/// A place within a place, such as `{:{}}`.
fn nested(text: &str) -> bool {
    text.split('{').any(|part| part.ends_with(':') || part.ends_with('.'))
}

/// A comparison ends with the shorter of the two.
fn pay_to_compare(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<(), Error> {
    if holds_others(left) && holds_others(right) {
        pay(state, left, true)?;
        return pay(state, right, true);
    }
    state.consume_fuel(bytes(left).min(bytes(right)) / 64)
}

/// Pays for a result that may hold what it was made of.
fn deeper(state: &State<'_, '_>, made: &Value) -> Result<(), Error> {
    if holds_others(made) { state.consume_fuel(DEEPER_COST) } else { Ok(()) }
}

/// Pays for what will hold these values. A namespace is refused: it could come to hold itself, and would never be dropped.
fn keep(state: &State<'_, '_>, values: &[Value]) -> Result<(), Error> {
    let is_namespace = |value: &Value| value.as_object().is_some_and(|it| it.type_name().ends_with("::Namespace"));
    if values.iter().any(is_namespace) {
        return Err(refuse("a namespace cannot be kept in another value"));
    }
    if values.iter().any(holds_others) { state.consume_fuel(DEEPER_COST) } else { Ok(()) }
}

fn is_in(state: &mut State<'_, '_>, value: Value, container: Value) -> Result<Value, Error> {
    match container.kind() {
        ValueKind::Undefined => return Ok(Value::from(false)),
        ValueKind::String => pay(state, &value, true)?,
        ValueKind::Seq | ValueKind::Iterable if holds_others(&value) => pay(state, &container, true)?,
        _ => {}
    }
    pay(state, &container, false)?;
    if container.kind() == ValueKind::Map {
        as_key(&value)?;
    }
    let found = state.perform_test("in", &[value, container])?;
    Ok(Value::from(found))
}

fn item(state: &State<'_, '_>, container: Value, key: Value) -> Result<Value, Error> {
    if container.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    pay(state, &key, false)?;
    // What is made as one looks at it is made up to there.
    if container.kind() == ValueKind::Iterable {
        let before = key.as_i64().map_or(0, i64::unsigned_abs).min(container.len().unwrap_or(usize::MAX) as u64);
        state.consume_fuel(before)?;
    }
    if holds_others(&key) { Ok(Value::UNDEFINED) } else { container.get_item(&key) }
}

fn map(state: &State<'_, '_>, pairs: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let pairs = pairs.into_values();
    keep(state, &pairs)?;
    let mut entries = Vec::with_capacity(pairs.len() / 2);
    let mut pairs = pairs.into_iter();
    while let (Some(key), Some(value)) = (pairs.next(), pairs.next()) {
        as_key(&key)?;
        pay(state, &key, false)?;
        entries.push((key, value));
    }
    Ok(Value::from_pairs(entries))
}

fn as_key(key: &Value) -> Result<(), Error> {
    if holds_others(key) { Err(refuse("a list or a map cannot be a key")) } else { Ok(()) }
}

fn namespace(state: &State<'_, '_>, fields: Option<ValueOrKwargs>) -> Result<Value, Error> {
    if let Some(fields) = fields.as_deref().filter(|fields| fields.kind() == ValueKind::Map) {
        let values = fields.try_iter()?.map(|key| fields.get_item(&key)).collect::<Result<Vec<_>, _>>()?;
        keep(state, &values)?;
    }
    minijinja::functions::namespace(fields)
}

fn dict(state: &State<'_, '_>, begun: Option<Value>, fields: Kwargs) -> Result<Value, Error> {
    let values = fields.args().map(|name| fields.peek(name)).collect::<Result<Vec<Value>, _>>()?;
    keep(state, &values)?;
    state.consume_fuel(DEEPER_COST)?;
    minijinja::functions::dict(begun, fields)
}

fn refuse(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
