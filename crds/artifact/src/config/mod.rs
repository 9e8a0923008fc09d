//! `adapter_config.json` as PEFT writes it.
//!
//! Everything that changes the mathematics and is not served is refused by name. Keys that are not known here pass if
//! they are unset, or if they only tune a feature that is off.

mod features;
mod field;

use serde_json::Value;

use crate::json::Pairs;
use crate::pattern::{NamePattern, Targets};
use crate::reason::{Refusal, excerpt};
use field::Fields;

/// Most bytes that a configuration may have. Configurations that name every module of a large model stay far below.
pub const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Most entries of a list or map in it.
const ENTRIES_MAX: usize = 65_536;
/// Most regular expressions of one map or list. Entries that only name modules do not count: a configuration may well
/// have one for each.
const EXPRESSIONS_MAX: usize = 128;
/// Most of these that look around or back.
const BACKTRACKING_MAX: usize = 16;
/// The largest rank that means anything: twice the widest model that is served.
const RANK_MAX: u64 = 65_536;

/// A LoRA configuration that can be served exactly.
#[derive(Clone, Debug)]
pub struct AdapterConfig {
    pub rank: u32,
    pub alpha: f64,
    /// The scale is alpha / sqrt(rank) instead of alpha / rank.
    pub rank_stabilised: bool,
    /// Where `ensure_weight_tying` is set: the adapter of the head would also change the embedding of a tied base.
    pub weight_tying: bool,
    /// As it stands in the file; for people.
    pub base_model_name: Option<String>,
    pub(crate) targets: Targets,
    pub(crate) rank_pattern: Vec<(NamePattern, u32)>,
    pub(crate) alpha_pattern: Vec<(NamePattern, f64)>,
}

impl AdapterConfig {
    /// # Errors
    /// Malformed if the bytes are no configuration, UnsupportedFeature if they ask for what is not served.
    pub fn parse(json: &[u8]) -> Result<Self, Refusal> {
        if json.len() as u64 > CONFIG_BYTES_MAX {
            let length = json.len();
            return Err(Refusal::new(
                crate::Reason::TooLarge,
                format!("adapter_config.json has {length} bytes, the limit is {CONFIG_BYTES_MAX}"),
            ));
        }
        let pairs: Pairs<Value> = serde_json::from_slice(json)
            .map_err(|error| Refusal::malformed(format!("adapter_config.json is not valid JSON: {error}")))?;
        let fields = Fields(&pairs);
        features::check(&fields)?;
        check_dropout(&fields)?;
        Ok(Self {
            rank: rank(&fields)?,
            alpha: fields.number("lora_alpha")?.ok_or_else(|| missing("lora_alpha"))?,
            rank_stabilised: fields.flag("use_rslora")?,
            weight_tying: fields.flag("ensure_weight_tying")?,
            base_model_name: fields.text("base_model_name_or_path")?.map(str::to_owned),
            targets: targets(&fields)?,
            rank_pattern: patterns(json, "rank_pattern", rank_of)?,
            alpha_pattern: patterns(json, "alpha_pattern", alpha_of)?,
        })
    }

    /// Rank of a targeted module, by its name in the model: the first pattern that matches, else `r`.
    pub(crate) fn rank_of(&self, module: &str) -> Result<u32, Refusal> {
        first_match(&self.rank_pattern, module).map(|found| found.unwrap_or(self.rank))
    }

    /// Scale of the delta B A of a targeted module of this rank: PEFT's, rounded to single precision as PEFT's arithmetic
    /// does. A tiny one becomes zero there too; an infinite one would make the module's output NaN.
    pub(crate) fn scale_of(&self, module: &str, rank: u32) -> Result<f32, Refusal> {
        let alpha = first_match(&self.alpha_pattern, module)?.unwrap_or(self.alpha);
        let divisor = if self.rank_stabilised { f64::from(rank).sqrt() } else { f64::from(rank) };
        let scale = (alpha / divisor) as f32;
        if scale.is_finite() {
            return Ok(scale);
        }
        let (exact, limit) = (alpha / divisor, f32::MAX);
        Err(Refusal::malformed(format!(
            "the alpha {alpha:e} over rank {rank} gives '{module}' the scale {exact:e}, single precision ends at {limit:e}"
        )))
    }
}

fn first_match<T: Copy>(patterns: &[(NamePattern, T)], module: &str) -> Result<Option<T>, Refusal> {
    for (pattern, value) in patterns {
        if pattern.matches(module)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

fn missing(key: &str) -> Refusal {
    Refusal::malformed(format!("adapter_config.json has no '{key}'"))
}

fn rank(fields: &Fields<'_>) -> Result<u32, Refusal> {
    rank_of("r", fields.set("r").ok_or_else(|| missing("r"))?)
}

fn rank_of(key: &str, value: &Value) -> Result<u32, Refusal> {
    let rank = value.as_u64().filter(|rank| (1..=RANK_MAX).contains(rank));
    rank.and_then(|rank| u32::try_from(rank).ok()).ok_or_else(|| {
        let (key, value) = (excerpt(key, 200), excerpt(&value.to_string(), 80));
        Refusal::malformed(format!("adapter_config.json has {key} = {value}, expected a rank from 1 to {RANK_MAX}"))
    })
}

/// Of no influence on what is served, but PEFT does not load a configuration that has a wrong one.
fn check_dropout(fields: &Fields<'_>) -> Result<(), Refusal> {
    let Some(value) = fields.set("lora_dropout") else { return Ok(()) };
    match value.as_f64() {
        Some(dropout) if dropout <= 1.0 => Ok(()),
        _ => Err(field::wrong("lora_dropout", value, "a number up to 1")),
    }
}

fn alpha_of(key: &str, value: &Value) -> Result<f64, Refusal> {
    field::number(key, value)
}

/// A map whose order counts: PEFT takes the first pattern that matches.
fn patterns<T>(
    json: &[u8],
    key: &'static str,
    value_of: fn(&str, &Value) -> Result<T, Refusal>,
) -> Result<Vec<(NamePattern, T)>, Refusal> {
    let pairs = field::ordered_map(json, key)?;
    if pairs.len() > ENTRIES_MAX {
        let count = pairs.len();
        return Err(Refusal::malformed(format!("{key} has {count} entries, the limit is {ENTRIES_MAX}")));
    }
    let entry = |(pattern, value): (String, Value)| {
        let place = format!("{key}['{}']", excerpt(&pattern, 200));
        Ok((NamePattern::suffix(&place, &pattern)?, value_of(&place, &value)?))
    };
    let entries = pairs.into_iter().map(entry);
    let mut out = Vec::new();
    let (mut expressions, mut backtracking) = (0, 0);
    for entry in entries {
        let entry = entry?;
        expressions += usize::from(entry.0.is_expression());
        backtracking += usize::from(entry.0.backtracks());
        if expressions > EXPRESSIONS_MAX {
            return Err(Refusal::malformed(format!(
                "{key} holds more than {EXPRESSIONS_MAX} regular expressions that are not plain names"
            )));
        }
        if backtracking > BACKTRACKING_MAX {
            return Err(Refusal::malformed(format!(
                "{key} holds more than {BACKTRACKING_MAX} regular expressions that look around or back"
            )));
        }
        out.push(entry);
    }
    Ok(out)
}

fn targets(fields: &Fields<'_>) -> Result<Targets, Refusal> {
    let target = fields.set("target_modules").ok_or_else(|| missing("target_modules"))?;
    let layers = match fields.set("layers_to_transform") {
        None => None,
        Some(Value::Array(items)) if items.is_empty() => None,
        Some(value) => Some(field::integers("layers_to_transform", value, ENTRIES_MAX)?),
    };
    let layer_patterns = match fields.set("layers_pattern") {
        None => Vec::new(),
        Some(value) => field::texts("layers_pattern", value, EXPRESSIONS_MAX)?,
    };
    if layers.is_none() && !layer_patterns.is_empty() {
        return Err(Refusal::malformed("layers_pattern is set without layers_to_transform"));
    }
    let exclude = match fields.set("exclude_modules") {
        None => None,
        Some(Value::String(pattern)) if pattern.is_empty() => None,
        Some(Value::String(pattern)) => Some(NamePattern::full("exclude_modules", pattern)?.into()),
        Some(value) => Some(field::texts("exclude_modules", value, ENTRIES_MAX)?.into()),
    };
    if let Value::String(pattern) = target {
        if layers.is_some() {
            return Err(Refusal::malformed("layers_to_transform is set while target_modules is one pattern"));
        }
        return Targets::pattern(pattern, exclude);
    }
    let names = field::texts("target_modules", target, ENTRIES_MAX)?;
    Targets::names(names, layers, &layer_patterns, exclude)
}
