//! Which modules a configuration means. PEFT's rules, on the names of the model's modules.

mod python;

use fancy_regex::{Regex, RegexBuilder};

use crate::reason::{Refusal, excerpt};

/// Most bytes of one regular expression.
const PATTERN_BYTES_MAX: usize = 8192;
/// Steps of backtracking for one name, so that a hostile expression ends. With the most expressions of a configuration that
/// backtrack and the modules of a large model these are some ten million in all, a fraction of a second. Those that need no
/// backtracking never take one.
const BACKTRACK_MAX: usize = 5_000;
/// Of a compiled expression, in bytes.
const COMPILED_BYTES_MAX: usize = 64 << 10;

/// A regular expression over a module's name.
#[derive(Clone, Debug)]
pub(crate) struct NamePattern {
    /// As written, for messages.
    text: String,
    matcher: Matcher,
}

#[derive(Clone, Debug)]
enum Matcher {
    /// The expression has no operator but the dot, and matches a name or its last segments: no engine needed, which
    /// matters for configurations that hold one entry per module. `None` stands for any byte.
    DottedSuffix(Vec<Option<u8>>),
    Regex(Box<Regex>),
}

impl NamePattern {
    /// `re.fullmatch(pattern, name)`.
    pub(crate) fn full(key: &str, pattern: &str) -> Result<Self, Refusal> {
        Self::compile(key, pattern, pattern, r"\z")
    }

    /// `re.match(rf"(.*\.)?({pattern})$", name)`.
    pub(crate) fn suffix(key: &str, pattern: &str) -> Result<Self, Refusal> {
        if let Some(bytes) = plain_bytes(pattern).filter(|_| pattern.len() <= PATTERN_BYTES_MAX) {
            return Ok(Self { text: pattern.to_owned(), matcher: Matcher::DottedSuffix(bytes) });
        }
        Self::compile(key, pattern, &format!(r"(.*\.)?({pattern})$"), "")
    }

    /// `re.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", name)`.
    fn layer(pattern: &str) -> Result<Self, Refusal> {
        Self::compile("layers_pattern", pattern, &format!(r"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."), "")
    }

    /// `python` is what PEFT hands to `re`, with the pattern in it; it is matched from the start of a name, up to `end`.
    fn compile(key: &str, pattern: &str, python: &str, end: &str) -> Result<Self, Refusal> {
        let shown = excerpt(pattern, 200);
        if pattern.len() > PATTERN_BYTES_MAX {
            let length = pattern.len();
            return Err(Refusal::malformed(format!(
                "{key} holds a pattern of {length} bytes, the limit is {PATTERN_BYTES_MAX}"
            )));
        }
        let failed = |error: String| {
            Refusal::malformed(format!("{key}: '{shown}' is not a regular expression of Python's: {error}"))
        };
        let expression = python::translate(python).map_err(failed)?;
        let regex = RegexBuilder::new(&format!(r"\A(?:{expression}){end}"))
            .backtrack_limit(BACKTRACK_MAX)
            .delegate_size_limit(COMPILED_BYTES_MAX)
            .build()
            .map_err(|error| failed(error.to_string()))?;
        Ok(Self { text: pattern.to_owned(), matcher: Matcher::Regex(Box::new(regex)) })
    }

    pub(crate) fn matches(&self, name: &str) -> Result<bool, Refusal> {
        match &self.matcher {
            Matcher::DottedSuffix(pattern) => Ok(dotted_suffix(pattern, name)),
            Matcher::Regex(regex) => regex.is_match(name).map_err(|error| self.failed(name, &error)),
        }
    }

    /// The layer number that a `layer` expression finds; `Some(None)` if it matches without one.
    fn layer_of(&self, name: &str) -> Result<Option<Option<i64>>, Refusal> {
        let Matcher::Regex(regex) = &self.matcher else { return Ok(None) };
        let captures = regex.captures(name).map_err(|error| self.failed(name, &error))?;
        Ok(captures.map(|captures| captures.name("idx")?.as_str().parse().ok()))
    }

    /// Needs the engine of regular expressions.
    pub(crate) fn is_expression(&self) -> bool {
        matches!(self.matcher, Matcher::Regex(_))
    }

    /// It may look around or back: the time that it takes is not bounded by the lengths of itself and the name.
    pub(crate) fn backtracks(&self) -> bool {
        const PARTS: [&str; 10] = ["(?=", "(?!", "(?<", "(?>", "(?(", "(?P=", "(?P>", "++", "*+", "?+"];
        let escaped = |letter: u8| letter.is_ascii_digit() || b"kgKGZ".contains(&letter);
        let escapes =
            || self.text.as_bytes().windows(2).any(|pair| matches!(pair, [b'\\', letter] if escaped(*letter)));
        self.is_expression() && (PARTS.iter().any(|part| self.text.contains(part)) || escapes())
    }

    fn failed(&self, name: &str, error: &fancy_regex::Error) -> Refusal {
        let shown = excerpt(&self.text, 200);
        Refusal::malformed(format!("the pattern '{shown}' cannot be matched against '{name}': {error}"))
    }
}

/// The bytes that an expression without operators matches, dots as any byte; `None` if it has operators.
fn plain_bytes(pattern: &str) -> Option<Vec<Option<u8>>> {
    let mut bytes = Vec::new();
    let mut rest = pattern.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'.' => bytes.push(None),
            b'\\' if rest.next() == Some(b'.') => bytes.push(Some(b'.')),
            byte if byte.is_ascii_alphanumeric() || byte == b'_' => bytes.push(Some(byte)),
            _ => return None,
        }
    }
    (!bytes.is_empty()).then_some(bytes)
}

/// The last bytes of `name` match, and a dot or nothing comes before them.
fn dotted_suffix(pattern: &[Option<u8>], name: &str) -> bool {
    let name = name.as_bytes();
    let Some(start) = name.len().checked_sub(pattern.len()) else { return false };
    let (before, rest) = name.split_at(start);
    let same = |(have, want): (&u8, &Option<u8>)| want.is_none_or(|want| want == *have);
    matches!(before.last(), None | Some(b'.')) && rest.iter().zip(pattern).all(same)
}

/// `target_modules` together with what narrows it.
#[derive(Clone, Debug)]
pub(crate) struct Targets {
    rule: Rule,
    exclude: Option<Names>,
    /// As written, for messages.
    text: String,
}

#[derive(Clone, Debug)]
enum Rule {
    /// Every linear module but the head.
    AllLinear,
    Pattern(NamePattern),
    Names {
        names: Names,
        layers: Option<Layers>,
    },
}

#[derive(Clone, Debug)]
struct Layers {
    numbers: Vec<i64>,
    /// Tried in this order.
    patterns: Vec<NamePattern>,
}

/// Names of modules, or one expression over the whole name.
#[derive(Clone, Debug)]
pub(crate) enum Names {
    List(std::collections::BTreeSet<String>),
    Pattern(NamePattern),
}

impl From<NamePattern> for Names {
    fn from(pattern: NamePattern) -> Self {
        Self::Pattern(pattern)
    }
}

impl From<Vec<String>> for Names {
    fn from(names: Vec<String>) -> Self {
        Self::List(names.into_iter().collect())
    }
}

/// How a name is among others: itself, or by its last segments.
#[derive(PartialEq, Eq)]
enum Found {
    No,
    Whole,
    Suffix,
}

impl Names {
    fn find(&self, name: &str) -> Result<Found, Refusal> {
        Ok(match self {
            Self::Pattern(pattern) if pattern.matches(name)? => Found::Whole,
            Self::Pattern(_) => Found::No,
            Self::List(names) if names.contains(name) => Found::Whole,
            Self::List(names) => {
                let mut suffixes = name.match_indices('.').filter_map(|(at, _)| name.get(at + 1..));
                if suffixes.any(|suffix| names.contains(suffix)) { Found::Suffix } else { Found::No }
            }
        })
    }
}

impl Targets {
    pub(crate) fn pattern(pattern: &str, exclude: Option<Names>) -> Result<Self, Refusal> {
        let text = format!("'{}'", excerpt(pattern, 200));
        let rule = if pattern.eq_ignore_ascii_case("all-linear") {
            Rule::AllLinear
        } else {
            Rule::Pattern(NamePattern::full("target_modules", pattern)?)
        };
        Ok(Self { rule, exclude, text })
    }

    pub(crate) fn names(
        names: Vec<String>,
        layers: Option<Vec<i64>>,
        layer_patterns: &[String],
        exclude: Option<Names>,
    ) -> Result<Self, Refusal> {
        let text = excerpt(&format!("[{}]", names.join(", ")), 200);
        let layers = match layers {
            None => None,
            Some(numbers) => {
                // Without a pattern, the first numbered segment below another one is the layer.
                let any = [r"[^.]*".to_owned()];
                let patterns = if layer_patterns.is_empty() { &any[..] } else { layer_patterns };
                let patterns = patterns.iter().map(|pattern| NamePattern::layer(pattern)).collect::<Result<_, _>>()?;
                Some(Layers { numbers, patterns })
            }
        };
        Ok(Self { rule: Rule::Names { names: names.into(), layers }, exclude, text })
    }

    /// Whether PEFT would put an adapter on the module of this name. `head` says that it is the output layer.
    pub(crate) fn contain(&self, name: &str, head: bool) -> Result<bool, Refusal> {
        if let Some(exclude) = &self.exclude
            && exclude.find(name)? != Found::No
        {
            return Ok(false);
        }
        match &self.rule {
            Rule::AllLinear => Ok(!head),
            Rule::Pattern(pattern) => pattern.matches(name),
            Rule::Names { names, layers } => match (names.find(name)?, layers) {
                (Found::No, _) => Ok(false),
                // PEFT narrows only what it found by its end, not what was named in full.
                (Found::Whole, _) | (Found::Suffix, None) => Ok(true),
                (Found::Suffix, Some(layers)) => layers.contain(name),
            },
        }
    }

    pub(crate) fn is_all_linear(&self) -> bool {
        matches!(self.rule, Rule::AllLinear)
    }

    /// For messages.
    pub(crate) fn as_written(&self) -> &str {
        &self.text
    }
}

impl Layers {
    fn contain(&self, name: &str) -> Result<bool, Refusal> {
        for pattern in &self.patterns {
            if let Some(layer) = pattern.layer_of(name)? {
                return Ok(layer.is_some_and(|layer| self.numbers.contains(&layer)));
            }
        }
        Ok(false)
    }
}
