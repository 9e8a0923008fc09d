//! The generated rules in the chart are what the code says. Write them with `cargo xtask crds`.

use std::path::Path;

#[test]
fn generated_rules_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/lorafleet/files/rbac");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        lorafleet_operator::rbac::write_to(&folder).unwrap();
    }
    for file in lorafleet_operator::rbac::rules_files().unwrap() {
        let found = std::fs::read_to_string(folder.join(file.name)).unwrap_or_default();
        assert!(found == file.yaml, "{} is out of date: run `cargo xtask crds`", file.name);
    }
}
