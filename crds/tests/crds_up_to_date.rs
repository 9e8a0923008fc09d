//! The generated files in the chart are what the types say. Write them with `cargo xtask crds`.

use std::path::Path;

#[test]
fn generated_files_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/lorafleet/files/crds");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        lorafleet_crds::crdgen::write_to(&folder).unwrap();
    }
    let files = lorafleet_crds::crdgen::crd_files().unwrap();
    let mut expected: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
    for file in &files {
        let found = std::fs::read_to_string(folder.join(&file.name)).unwrap_or_default();
        assert!(found == file.yaml, "{} is out of date: run `cargo xtask crds`", file.name);
    }
    let mut found: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected, "files that no kind writes");
}

#[test]
fn api_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/API.md");
    let page = lorafleet_crds::apidoc::markdown().unwrap();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap_or_default() == page,
        "docs/API.md is out of date: run `cargo xtask crds`"
    );
}

/// A rule that only the refusal tells of is found too late.
#[test]
fn api_reference_has_every_rule() {
    let page = lorafleet_crds::apidoc::markdown().unwrap();
    let missing: Vec<_> = lorafleet_crds::crdgen::crd_files()
        .unwrap()
        .iter()
        .flat_map(|file| messages(&serde_norway::from_str(&file.yaml).unwrap()))
        .filter(|message| !page.contains(&message.replace('|', "\\|")))
        .collect();
    assert!(missing.is_empty(), "docs/API.md lacks these rules: {missing:#?}");
}

fn messages(value: &serde_json::Value) -> Vec<String> {
    use serde_json::Value::{Array, Object};
    let below: Vec<_> = match value {
        Array(items) => items.iter().collect(),
        Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    };
    let rules = value["x-kubernetes-validations"].as_array().into_iter().flatten();
    let own = rules.filter_map(|rule| rule["message"].as_str().map(str::to_owned));
    own.chain(below.into_iter().flat_map(messages)).collect()
}
