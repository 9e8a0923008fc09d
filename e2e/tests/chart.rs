//! The chart renders what it promises, and refuses values that it does not understand. `UPDATE_GOLDEN=1` writes the renders
//! anew.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::repository;
use lorafleet_e2e::shell::{Finished, Shell};
use lorafleet_e2e::tools;

fn chart() -> PathBuf {
    repository().join("charts/lorafleet")
}

fn helm(args: &[&str]) -> Finished {
    let helm = tools::helm(&Cache::open().unwrap()).unwrap();
    // Nothing of the user's own helm counts.
    let home = std::env::temp_dir().join("lorafleet-helm");
    let shell =
        Shell::new(helm).env("HELM_CONFIG_HOME", &home).env("HELM_CACHE_HOME", &home).env("HELM_DATA_HOME", &home);
    shell.args(args).finish().unwrap()
}

fn template(values: &Path, more: &[&str]) -> Finished {
    let (chart, values) = (chart().display().to_string(), values.display().to_string());
    let args = ["template", "lorafleet", &chart, "--namespace", "lorafleet-system", "--values", &values];
    helm(&[&args, more].concat())
}

/// The files of one of the chart's test folders, by name.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = chart().join("tests").join(folder);
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

#[test]
#[ignore = "needs helm: cargo xtask test"]
fn lint_finds_nothing() {
    for values in files("values") {
        let finished =
            helm(&["lint", "--strict", &chart().display().to_string(), "--values", &values.display().to_string()]);
        assert!(finished.success, "{}: {}{}", values.display(), finished.stdout, finished.stderr);
    }
}

#[test]
#[ignore = "needs helm: cargo xtask test"]
fn renders_are_the_golden_ones() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    for values in files("values") {
        // The definitions are compared where they are generated; here they would drown everything else.
        let finished = template(&values, &["--set", "crds.install=false"]);
        assert!(finished.success, "{}: {}", values.display(), finished.stderr);
        let golden = chart().join("tests/golden").join(values.file_name().unwrap());
        if update {
            fs::write(&golden, &finished.stdout).unwrap();
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        let differing = expected.lines().zip(finished.stdout.lines()).position(|(golden, now)| golden != now);
        assert!(
            expected == finished.stdout,
            "{} differs from line {:?} on: run with UPDATE_GOLDEN=1 and look at the difference",
            golden.display(),
            differing.map(|line| line + 1)
        );
    }
    assert_eq!(files("values").len(), files("golden").len(), "a golden render without values");
}

#[test]
#[ignore = "needs helm: cargo xtask test"]
fn values_that_are_not_understood_are_refused_by_name() {
    for values in files("invalid") {
        let text = fs::read_to_string(&values).unwrap();
        let expected = text.lines().next().and_then(|line| line.strip_prefix("# Refused: ")).unwrap();
        let finished = template(&values, &[]);
        assert!(!finished.success, "{} is taken", values.display());
        assert!(finished.stderr.contains(expected), "{}: {}", values.display(), finished.stderr);
    }
}

#[test]
#[ignore = "needs helm: cargo xtask test"]
fn definitions_are_upgraded_and_stay() {
    let default = chart().join("tests/values/default.yaml");
    let kept = template(&default, &["--show-only", "templates/crds.yaml"]).stdout;
    let generated =
        fs::read_dir(chart().join("files/crds")).unwrap().map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    let generated: Vec<String> = generated.collect();
    assert_eq!(generated.len(), 3);
    for definition in &generated {
        // Every line of the generated file is there, and the annotation beside them.
        let kept_form =
            definition.replace("\nmetadata:\n", "\nmetadata:\n  annotations:\n    helm.sh/resource-policy: keep\n");
        assert!(kept.contains(kept_form.trim()), "not in the render: {}", definition.lines().nth(4).unwrap());
    }
    let free = template(&default, &["--show-only", "templates/crds.yaml", "--set", "crds.keep=false"]).stdout;
    assert!(!free.contains("resource-policy") && generated.iter().all(|definition| free.contains(definition.trim())));
}
