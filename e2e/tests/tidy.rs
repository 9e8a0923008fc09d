//! What the compiler does not check: lengths, leftovers, machine paths, and which room may lean on which.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use lorafleet_e2e::repository;

/// Longest file and function in lines; `tidy-allowed.txt` lists what is longer for now and may only shrink.
const FILE_LINES_MAX: usize = 600;
const DEVICE_FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Files whose text is made by a tool or is data.
const NOT_READ: [&str; 8] = [".lock", ".sum", ".safetensors", ".gguf", ".png", ".npy", ".fatbin", ".zst"];

/// Who may depend on whom, as docs/decisions/0001 draws it; `e2e` sees all.
const ARROWS: [(&str, &[&str]); 10] = [
    ("lorafleet-artifact", &[]),
    ("lorafleet-crds", &["lorafleet-artifact"]),
    ("lorafleet-listen", &[]),
    ("lorafleet-source", &["lorafleet-artifact"]),
    ("lorafleet-operator", &["lorafleet-artifact", "lorafleet-crds", "lorafleet-listen", "lorafleet-source"]),
    ("lorafleet-gateway", &["lorafleet-artifact", "lorafleet-crds", "lorafleet-listen"]),
    ("lorafleet-backend", &["lorafleet-artifact"]),
    ("lorafleet-cpu", &["lorafleet-artifact", "lorafleet-backend"]),
    (
        "lorafleet-engine",
        &[
            "lorafleet-artifact",
            "lorafleet-backend",
            "lorafleet-cpu",
            "lorafleet-crds",
            "lorafleet-listen",
            "lorafleet-source",
        ],
    ),
    ("lorafleet-kernels", &[]),
];

fn output(program: &str, args: &[&str]) -> String {
    let done = Command::new(program).args(args).current_dir(repository()).output().unwrap();
    assert!(done.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Paths (relative to the root) and texts of the tracked files that people write.
fn texts() -> Vec<(String, String)> {
    output("git", &["ls-files", "-z"])
        .split('\0')
        .filter(|path| !path.is_empty() && !NOT_READ.iter().any(|end| path.ends_with(end)))
        .filter_map(|path| {
            // A file deleted but not yet committed is still listed.
            let bytes = std::fs::read(repository().join(path)).ok()?;
            Some((path.to_owned(), String::from_utf8(bytes).ok()?))
        })
        .collect()
}

fn allowed() -> BTreeMap<String, usize> {
    let path = repository().join("e2e/tests/tidy-allowed.txt");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(|line| {
            let (lines, what) = line.split_once(' ').unwrap_or_else(|| panic!("tidy-allowed.txt: `{line}`"));
            (what.to_owned(), lines.parse().unwrap())
        })
        .collect()
}

/// Name and length in lines of every function, found by the indentation that rustfmt gives its braces.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let indent = &line[..line.len() - trimmed.len()];
        let before = trimmed.split("fn ").next().unwrap_or_default();
        let keywords = ["pub", "pub(crate)", "pub(super)", "async", "const", "unsafe", "extern", "\"C\""];
        if !trimmed.contains("fn ") || !before.split_whitespace().all(|word| keywords.contains(&word)) {
            continue;
        }
        // What a trait only asks for has no body.
        let opening = lines[start..].iter().find(|line| line.ends_with(['{', '}', ';']));
        if opening.is_some_and(|line| line.ends_with(';')) {
            continue;
        }
        let end = format!("{indent}}}");
        let Some(length) = lines[start..].iter().position(|line| *line == end) else { continue };
        let name = trimmed[before.len() + 3..].split(['(', '<']).next().unwrap_or_default();
        found.push((name.to_owned(), length + 1));
    }
    found
}

#[test]
fn files_and_functions_stay_short() {
    let mut wrong = Vec::new();
    let mut allowed = allowed();
    let mut judge = |what: String, lines: usize, most: usize| match allowed.remove(&what) {
        Some(limit) if lines > limit => wrong.push(format!("{what}: {lines} lines, allowed {limit}")),
        Some(limit) if lines < limit => {
            wrong.push(format!("{what}: {lines} lines now; lower or drop its {limit} in tidy-allowed.txt"));
        }
        None if lines > most => wrong.push(format!("{what}: {lines} lines, at most {most}")),
        _ => {}
    };
    for (path, text) in texts() {
        if path.ends_with(".cu") || path.ends_with(".cuh") {
            judge(path.clone(), text.lines().count(), DEVICE_FILE_LINES_MAX);
        }
        if path.ends_with(".rs") {
            judge(path.clone(), text.lines().count(), FILE_LINES_MAX);
            for (name, lines) in functions(&text) {
                judge(format!("{path} {name}"), lines, FUNCTION_LINES_MAX);
            }
        }
    }
    wrong.extend(allowed.keys().map(|what| format!("{what}: in tidy-allowed.txt but not in the tree, or short now")));
    assert!(wrong.is_empty(), "too long:\n{}", wrong.join("\n"));
}

#[test]
fn finds_functions_by_their_braces() {
    let text =
        "impl A {\n    pub async fn one(&self) {\n        x();\n    }\n    fn none();\n}\n\nfn two<T>() -> T\n{\n}\n";
    assert_eq!(functions(text), [("one".to_owned(), 3), ("two".to_owned(), 3)]);
}

#[test]
fn no_leftovers_and_no_machine_paths() {
    // Written in halves, so that this file does not find itself.
    let everywhere = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("art", "ifactory"),
        concat!("index.", "crates.io"),
        concat!("proxy.", "golang.org"),
        concat!("deb.", "debian.org"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("todo", "!("),
        concat!("dbg", "!("),
    ];
    let mut wrong = Vec::new();
    for (path, text) in texts() {
        for (number, line) in text.lines().enumerate() {
            for word in everywhere.iter().filter(|word| line.contains(*word)) {
                wrong.push(format!("{path}:{}: `{word}`", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "leftovers:\n{}", wrong.join("\n"));
}

#[test]
fn rooms_lean_only_where_the_drawing_says() {
    let metadata: serde_json::Value =
        serde_json::from_str(&output("cargo", &["metadata", "--no-deps", "--offline", "--format-version", "1"]))
            .unwrap();
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(may) = arrows.get(name) else {
            assert_eq!(name, "lorafleet-e2e", "a crate that the drawing does not know");
            continue;
        };
        let ours: BTreeSet<&str> =
            package["dependencies"].as_array().unwrap().iter().filter_map(|d| d["name"].as_str()).collect();
        wrong.extend(
            ours.into_iter()
                .filter(|other| other.starts_with("lorafleet-") && !may.contains(other))
                .map(|other| format!("{name} depends on {other}")),
        );
    }
    assert!(wrong.is_empty(), "arrows:\n{}", wrong.join("\n"));
}

/// Safe code everywhere but in the arithmetic of the CPU, where files are mapped, and in the tests and benchmarks of device
/// code.
#[test]
fn unsafe_code_only_where_allowed() {
    let may = |path: &str| {
        let may = ["engine/cpu/src", "engine/backend/src/model/map.rs", "kernels/tests", "kernels/benches"];
        may.iter().any(|place| Path::new(path).starts_with(place))
    };
    let allow = concat!("allow(", "unsafe_code");
    let wrong: Vec<PathBuf> = texts()
        .into_iter()
        .filter(|(path, text)| path.ends_with(".rs") && text.contains(allow) && !may(path))
        .map(|(path, _)| path.into())
        .collect();
    assert!(wrong.is_empty(), "unsafe code allowed in {wrong:?}");
}

/// Error codes in a source text: a name in quotes as the second argument of `Refusal::new`, as the field `code`, or, in the
/// files that are about errors, as a match arm's result.
fn error_codes(path: &str, text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut parts = text.split('"');
    let mut before = parts.next().unwrap_or_default();
    while let (Some(quoted), Some(after)) = (parts.next(), parts.next()) {
        let lead = before.trim_end();
        let status = lead.strip_suffix(',').map(|lead| lead.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end());
        let is_code = status.is_some_and(|lead| lead.ends_with("Refusal::new("))
            || lead.ends_with("code:")
            || (path.ends_with("error.rs") && lead.ends_with("=>"));
        let is_name = quoted.starts_with(|c: char| c.is_ascii_uppercase()) && quoted.chars().all(char::is_alphanumeric);
        if is_code && is_name {
            found.insert(quoted.to_owned());
        }
        before = after;
    }
    found
}

#[test]
fn finds_error_codes() {
    let text = r#"Refusal::new(422, "TooLarge", "a"); Refusal::new(
        503, "Busy", m); x { code: "Stale".into() }; A => "Gone", f("No")"#;
    let codes: Vec<_> = error_codes("a/error.rs", text).into_iter().collect();
    assert_eq!(codes, ["Busy", "Gone", "Stale", "TooLarge"]);
}

/// The variants of an enum that has no fields, as its source text has them.
fn variants(text: &str, name: &str) -> BTreeSet<String> {
    let (_, rest) = text.split_once(&format!("pub enum {name} {{\n")).unwrap_or_else(|| panic!("no enum {name}"));
    let lines = rest.lines().take_while(|line| *line != "}").map(str::trim);
    lines.filter_map(|line| line.strip_suffix(',')).filter(|line| !line.starts_with('/')).map(str::to_owned).collect()
}

/// Whoever meets a code in a log, a client or a condition finds it in one place.
#[test]
fn error_codes_are_documented() {
    let documented = std::fs::read_to_string(repository().join("docs/OPERATIONS.md")).unwrap();
    let mut codes: BTreeSet<(String, String)> = texts()
        .into_iter()
        .filter(|(path, _)| {
            let rooms = ["engine/src", "gateway/src", "crds/source/src"];
            path.ends_with(".rs") && rooms.iter().any(|room| path.starts_with(room))
        })
        .flat_map(|(path, text)| {
            error_codes(&path, &text).into_iter().map(move |code| (code, path.clone())).collect::<Vec<_>>()
        })
        .collect();
    assert!(codes.len() > 30, "found only {codes:?}");
    for (path, name) in [("crds/src/condition.rs", "Cause"), ("crds/artifact/src/reason.rs", "Reason")] {
        let words = variants(&std::fs::read_to_string(repository().join(path)).unwrap(), name);
        assert!(words.len() > 10, "{path}: found only {words:?}");
        codes.extend(words.into_iter().map(|word| (word, path.to_owned())));
    }
    let missing: Vec<_> = codes.iter().filter(|(code, _)| !documented.contains(&format!("`{code}`"))).collect();
    assert!(missing.is_empty(), "not in docs/OPERATIONS.md: {missing:?}");
}

/// Names of metrics in a source text: in quotes by themselves, with one of these beginnings or in a file where `prefix` is put
/// before each.
fn metrics(text: &str, prefix: Option<&str>) -> BTreeSet<String> {
    let is_word = |text: &str| {
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b':')
    };
    let source = text.split("#[cfg(test)]").next().unwrap_or_default();
    let quoted = source.split('"').skip(1).step_by(2).filter(|quoted| is_word(quoted));
    match prefix {
        None => quoted
            .filter(|name| name.starts_with("lorafleet_") || name.starts_with("vllm:"))
            .map(str::to_owned)
            .collect(),
        // Named where it is made: `counters("requests_total", ...)`.
        Some(prefix) => {
            let made = ["counters(", "gauges(", "gauge(", "histogram(", "Gauge::new(", "IntCounter::new("];
            let lead = |name: &str| source.split(&format!("\"{name}\"")).next().unwrap_or_default().trim_end();
            quoted
                .filter(|name| made.iter().any(|made| lead(name).ends_with(made)))
                .map(|name| format!("{prefix}{name}"))
                .collect()
        }
    }
}

/// In both directions: what is measured is documented, and what is documented is measured.
#[test]
fn metrics_and_conditions_are_documented() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let documented = read("docs/OPERATIONS.md");
    let mut measured = metrics(&read("gateway/src/metrics.rs"), Some("lorafleet_gateway_"));
    for path in ["engine/src/metrics.rs", "engine/src/exposition.rs", "operator/src/metrics.rs"] {
        measured.extend(metrics(&read(path), None));
    }
    let (_, section) = documented.split_once("\n## Metrics\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    // `name{label,label}`
    let told: BTreeSet<String> = section
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|code| code.split('{').next().unwrap_or_default().to_owned())
        .filter(|name| name.starts_with("lorafleet_") || name.starts_with("vllm:"))
        .collect();
    assert!(measured.len() > 55, "found only {measured:?}");
    let missing: Vec<_> = measured.difference(&told).collect();
    assert!(missing.is_empty(), "not in docs/OPERATIONS.md: {missing:?}");
    let gone: Vec<_> = told.difference(&measured).collect();
    assert!(gone.is_empty(), "in docs/OPERATIONS.md, and measured nowhere: {gone:?}");
    let conditions = variants(&read("crds/src/condition.rs"), "ConditionType");
    let untold: Vec<_> = conditions.iter().filter(|name| !documented.contains(&format!("`{name}"))).collect();
    assert!(conditions.len() == 9 && untold.is_empty(), "not in docs/OPERATIONS.md: {untold:?} of {conditions:?}");
}

/// The programs' Dockerfiles are one text, with the compiler that everything else is built with.
#[test]
fn dockerfiles_are_alike_and_use_the_pinned_compiler() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let toolchain = read("rust-toolchain.toml");
    let version = toolchain.lines().find_map(|line| line.strip_prefix("channel = ")).unwrap().trim_matches('"');
    for program in ["operator", "gateway", "engine"] {
        let text = read(&format!("{program}/Dockerfile"));
        assert!(
            text.contains(&format!("FROM rust:{version}-")),
            "{program}/Dockerfile builds with another Rust than {version}"
        );
        assert_eq!(text.replace(program, "engine"), read("engine/Dockerfile"), "{program}/Dockerfile");
    }
}
