use super::*;

fn entries(list: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
    list.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
}

#[test]
fn a_key_leads_to_its_client() {
    let (keys, errors) = Keys::parse(
        &entries(&[
            ("alice", r#"{"key": "alice-secret", "models": ["smollm2", "demo/support", "team-b/pirate"]}"#),
            ("bob", r#"{"key": "bob-secret-key", "models": ["x", "*"]}"#),
            ("nothing", r#"{"key": "nothing-at-all", "models": []}"#),
        ]),
        "demo",
    );
    assert_eq!(errors, []);
    let permitted =
        |key: &str| keys.find(key.as_bytes()).map(|client| (client.name.as_str(), client.permitted.clone()));
    let only = |names: &[&str]| Permitted::Only(names.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(permitted("alice-secret"), Some(("alice", only(&["smollm2", "support", "team-b/pirate"]))));
    assert_eq!(permitted("bob-secret-key"), Some(("bob", Permitted::All)));
    assert_eq!(permitted("nothing-at-all"), Some(("nothing", only(&[]))));
    for wrong in ["", "alice-secre", "alice-secret ", "ALICE-SECRET", "{"] {
        assert_eq!(permitted(wrong), None, "{wrong:?}");
    }
}

#[test]
fn no_entries_let_nobody_in() {
    let (keys, _) = Keys::parse(&BTreeMap::new(), "demo");
    assert!(keys.is_empty() && keys.find(b"").is_none());
}

#[test]
fn a_bad_entry_is_named_without_its_key_and_the_others_count() {
    let long = format!(r#"{{"key": "{}", "models": []}}"#, "k".repeat(513));
    let many = format!(r#"{{"key": "many-models-key", "models": [{}"x"]}}"#, r#""x","#.repeat(1000));
    let huge = " ".repeat(ENTRY_BYTES_MAX + 1);
    let (keys, errors) = Keys::parse(
        &entries(&[
            ("a-good", r#"{"key": "the-good-key", "models": ["*"]}"#),
            ("b-broken", r#"{"key": "secret-value"#),
            ("c-field", r#"{"key": "secret-value", "models": [], "admin": true}"#),
            ("d-short", r#"{"key": "secret", "models": []}"#),
            ("e-long", &long),
            ("f-space", r#"{"key": "secret value", "models": []}"#),
            ("g-same", r#"{"key": "the-good-key", "models": []}"#),
            ("h-many", &many),
            ("i-huge", &huge),
            ("j-type", r#"{"key": "secret-value", "models": "secret-value"}"#),
        ]),
        "demo",
    );
    assert_eq!(keys.len(), 1);
    let text: Vec<String> = errors.iter().map(EntryError::to_string).collect();
    assert_eq!(
        text.join("\n"),
        "\
entry 'b-broken' is not {\"key\": \"...\", \"models\": [...]}: an early end at line 1, column 21
entry 'c-field' is not {\"key\": \"...\", \"models\": [...]}: a missing, unknown or wrongly typed field at line 1, column 45
entry 'd-short' has a key of 6 bytes; 8 to 512 visible ASCII characters are allowed
entry 'e-long' has a key of 513 bytes; 8 to 512 visible ASCII characters are allowed
entry 'f-space' has a key of 12 bytes; 8 to 512 visible ASCII characters are allowed
entry 'g-same' has the same key as 'a-good'; 'a-good' keeps it
entry 'h-many' lists 1001 models, above the limit of 1000
entry 'i-huge' has 65537 bytes, above the limit of 65536
entry 'j-type' is not {\"key\": \"...\", \"models\": [...]}: a missing, unknown or wrongly typed field at line 1, column 48"
    );
    assert!(!text.concat().contains("secret"), "a message quotes a key");
}
