//! Regular expressions as PEFT takes them, and those that are meant to do harm.

use std::time::Duration;

use lorafleet_artifact::{BaseShape, Reason};
use serde_json::json;

use crate::support::{Files, Tensor, base, open_policy, write};
use crate::{check_config, pair, support};

/// Without the bounds these would take longer than anybody waits. With them each takes well under a second of a processor,
/// and no machine that runs tests is so slow or busy that it takes this long.
const BOUNDED: Duration = Duration::from_secs(600);

/// The order of the file decides which of two matching patterns wins; the general JSON type would sort them.
#[test]
fn the_first_pattern_wins() {
    let base = base("base");
    for (patterns, rank) in [(r#"{"q_proj": 2, "_proj|q_proj": 3}"#, 2), (r#"{".*q_proj": 3, "q_proj": 2}"#, 3)] {
        let config = format!(
            r#"{{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": {patterns}}}"#
        );
        let tensors: Vec<Tensor> =
            (0..2).flat_map(|layer| pair(&base, &format!("model.layers.{layer}.self_attn.q_proj"), rank)).collect();
        let weights = write(&tensors);
        support::verify(config.as_bytes(), &weights, Default::default(), &base, &open_policy(), 100).unwrap();
    }
}

/// Nothing that Python would not compile is read as something else.
#[test]
fn expressions_that_are_none_of_pythons() {
    let patterns = [
        r"a)|(b",
        "(a",
        "[a",
        "[]",
        r"a\",
        r"\hq",
        r"\Kq",
        r"\p{L}",
        r"\Qq\E",
        r"\g<1>",
        r"\N{DIGIT ONE}",
        r"[\1]",
        r"[b-a]",
        r"[a-\w]",
        "*a",
        "a|+",
        "a**",
        "a{2}{3}",
        "a++?",
        "^*",
        r"\b+",
        "(?<n>a)",
        "(?P<1>a)",
        "(?P<n->a)",
        "(?|a|b)",
        "(?&n)",
        "(?L)a",
        "a(?i)b",
        "(?-i)a",
        "(?i",
        "(?",
        "(?#",
        "(?(1-)a)",
        r"\9",
        r"\x7",
        r"\ud800",
        r"\777",
    ];
    for pattern in patterns {
        check_config(json!({"target_modules": pattern}), Reason::Malformed, "is not a regular expression of Python's");
    }
    // In front of it stands what PEFT puts there.
    check_config(json!({"rank_pattern": {"(?i)q_proj": 8}}), Reason::Malformed, "elsewhere than at its start");
    check_config(json!({"layers_to_transform": 1, "layers_pattern": "(layers"}), Reason::Malformed, "')' is missing");
}

/// An expression that backtracks without end is cut off: it costs milliseconds, not the process.
#[test]
fn hostile_expressions_end() {
    for pattern in
        [r"(?:(?:a|[^.]|_)*?)*(?=x)(\w+\s?)*\1zzz", r"(([a-z._0-9])+)+(?=!)\1", r"(?:.*.*.*.*.*)*(?<=y)z\b(?=q)"]
    {
        let mut files = Files::of_case("plain-r8-qv");
        files.config["target_modules"] = pattern.into();
        let start = std::time::Instant::now();
        let refusal = files.verify(&base("base"), &open_policy()).unwrap_err();
        assert!(matches!(refusal.reason, Reason::Malformed | Reason::ModuleUnknown), "{refusal}");
        assert!(start.elapsed() < BOUNDED, "{pattern} took {:?}", start.elapsed());
    }
}

/// As many expressions as there may be, each as slow as it may be, over the modules of a large model: a fraction of a second,
/// whatever comes out.
#[test]
fn many_slow_expressions_end_soon() {
    let base = BaseShape { layers: 80, ..base("base") };
    let modules: Vec<String> = base.modules().map(|module| module.to_string()).collect();
    let tensors: Vec<Tensor> = modules.iter().flat_map(|module| pair(&base, module, 1)).collect();
    let weights = write(&tensors);
    let slow = [
        (16, r"(.*)(.*)(.*)\1zz"),
        (16, r"(.*)(.*)\1zz"),
        (16, r"(?:.*)(?=z)(.*)\1x"),
        (16, r"(\w+\.)*(?<=q)z"),
        (128, r"(.{0,60}.{0,60}.{0,60})*z"),
        (128, r"(?:.*\.){0,40}z"),
        // One for each layer, as some tools write them.
        (128, r".*\.12\..*(q|k)_proj"),
    ];
    for (count, pattern) in slow {
        let patterns: serde_json::Map<_, _> = (0..count).map(|at| (format!("{pattern}{at}"), json!(1))).collect();
        let config = json!({
            "peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": modules,
            "rank_pattern": patterns, "alpha_pattern": patterns,
        });
        let start = std::time::Instant::now();
        let _ = support::verify(
            config.to_string().as_bytes(),
            &weights,
            Default::default(),
            &base,
            &open_policy(),
            1 << 20,
        );
        assert!(start.elapsed() < BOUNDED, "{pattern} took {:?}", start.elapsed());
    }
}

#[test]
fn expressions_are_counted() {
    let patterns = |count: usize, make: &dyn Fn(usize) -> String| json!({"rank_pattern": (0..count).map(|at| (make(at), json!(8))).collect::<serde_json::Map<_, _>>()});
    check_config(patterns(129, &|at| format!("x{at}|y")), Reason::Malformed, "128 regular expressions");
    check_config(patterns(17, &|at| format!("(?<!x){at}")), Reason::Malformed, "16 regular expressions that look");
    check_config(patterns(17, &|at| format!("(x)y\\1z{at}")), Reason::Malformed, "16 regular expressions that look");
    check_config(patterns(65_537, &|at| format!("layers.{at}.x")), Reason::Malformed, "65536");
    let mut files = Files::of_case("plain-r8-qv");
    files.config["rank_pattern"] =
        patterns(60_000, &|at| format!(r"layers\.{at}\.self_attn.o_proj"))["rank_pattern"].clone();
    files.verify(&base("base"), &open_policy()).unwrap();
}
