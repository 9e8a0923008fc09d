//! URIs and allow-lists.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

use lorafleet_artifact::{Reason, SourceUri, base_files, check_file_name, check_folder};
use proptest::prelude::*;

fn uri(text: &str) -> SourceUri {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn one_normal_form() {
    fn check(text: &str, normal: &str) {
        assert_eq!(uri(text).to_string(), normal);
        assert_eq!(uri(normal), uri(text));
    }
    check("s3://bucket", "s3://bucket");
    check("s3://bucket/", "s3://bucket");
    check("s3://bucket/a/b/", "s3://bucket/a/b");
    check("S3://bucket/A", "s3://bucket/A");
    check("/srv/adapters/", "file:///srv/adapters");
    check("file:///srv/adapters", "file:///srv/adapters");
    check("/", "file:///");
    check("hf://org/repo@main", "hf://org/repo@main");
    check("pvc://claim/path", "pvc://claim/path");
    check("https://Host.example:8443/x", "https://host.example:8443/x");
    check("s3://b/a%20b", "s3://b/a%20b");
    check("s3://b/...", "s3://b/...");
    check("s3://b/a..b", "s3://b/a..b");
}

#[test]
fn what_is_no_source() {
    let long = format!("s3://b/{}", "a".repeat(3000));
    let wrong = [
        "",
        "x",
        "adapters/x",
        "./x",
        "../x",
        "ftp://h/x",
        "s3:/b/x",
        "s3://",
        "s3:///x",
        "s3://b//x",
        "s3://b/x//",
        "s3://b/./x",
        "s3://b/../x",
        "s3://b/x/..",
        "s3://b/x/../../y",
        "s3://b/%2e%2e/x",
        "s3://b/%2E%2e/x",
        "s3://b/.%2e/x",
        "s3://b/%252e%252e/x",
        "s3://b/%25252e%25252e/x",
        "s3://b/a%2fb",
        "s3://b/a%2Fb",
        "s3://b/a%5cb",
        "s3://b/a\\b",
        "s3://b/a\0b",
        "s3://b/a%00b",
        "s3://b/a\nb",
        "s3://b/a%0ab",
        "s3://b/x?y=1",
        "s3://b/x#y",
        "s3://user:pw@b/x",
        "s3://b@c/x",
        "s3://../x",
        "s3://b..c/x",
        "s3://b%2ec/x",
        "s3://b:80/x",
        "file://host/x",
        "file://x",
        "/../etc/passwd",
        "/srv/../etc",
        "/srv/%2e%2e/etc",
        "https://u@h/x",
        &long,
    ];
    for text in wrong {
        let refusal = text.parse::<SourceUri>().expect_err(text);
        assert_eq!(refusal.reason, Reason::SourceForbidden, "{text:?}");
    }
}

#[test]
fn prefixes_are_whole_segments() {
    fn check(source: &str, prefix: &str, within: bool) {
        assert_eq!(uri(source).is_within(&uri(prefix)), within, "{source} in {prefix}");
    }
    check("s3://good/team", "s3://good/team", true);
    check("s3://good/team/x", "s3://good/team", true);
    check("s3://good/team/x/", "s3://good/team/", true);
    check("s3://good/team/x/y", "s3://good", true);
    check("s3://good/team-evil", "s3://good/team", false);
    check("s3://good/tea", "s3://good/team", false);
    check("s3://good/Team", "s3://good/team", false);
    check("s3://good.evil/team", "s3://good/team", false);
    check("s3://good.evil", "s3://good", false);
    check("s3://goo/d/team", "s3://good/team", false);
    check("file:///good/team", "s3://good/team", false);
    check("s3://b/adapters/10", "s3://b/adapters/1", false);
    check("/srv/adapters/x", "/srv/adapters", true);
    check("/srv/adapters", "/srv/adapters/x", false);
    check("/srv", "/", true);
}

#[test]
fn the_longest_prefix_wins() {
    let prefixes = ["s3://b", "s3://b/team/x", "s3://b/team", "s3://b/team/x", "s3://c"].map(uri);
    let find = |text: &str| uri(text).longest_prefix(&prefixes);
    assert_eq!(find("s3://b/other"), Some(0));
    assert_eq!(find("s3://b/team/y"), Some(2));
    assert_eq!(find("s3://b/team/x/1"), Some(1));
    assert_eq!(find("s3://d/team"), None);
}

#[test]
fn joins_take_plain_names() {
    assert_eq!(uri("s3://b/x").join("adapter_config.json").unwrap().to_string(), "s3://b/x/adapter_config.json");
    for name in ["", ".", "..", "a/b", "../a", "a\\b", "%2e%2e", "a%2fb", "a\0"] {
        assert_eq!(uri("s3://b/x").join(name).unwrap_err().reason, Reason::SourceForbidden, "{name:?}");
        assert!(check_file_name(name).is_err());
    }
}

#[test]
fn folders() {
    fn check(names: &[&str], reason: Option<Reason>) {
        assert_eq!(check_folder(names.iter().copied()).err().map(|refusal| refusal.reason), reason, "{names:?}");
    }
    check(&["adapter_config.json", "adapter_model.safetensors", "README.md", "adapter_model.bin"], None);
    check(&[], Some(Reason::NotFound));
    check(&["README.md"], Some(Reason::Malformed));
    check(&["adapter_model.safetensors"], Some(Reason::Malformed));
    check(&["adapter_config.json"], Some(Reason::Malformed));
    check(&["adapter_config.json", "adapter_model.bin"], Some(Reason::UnsupportedFeature));
    check(&["adapter_config.json", "adapter_model.pt"], Some(Reason::UnsupportedFeature));
    check(&["adapter_config.json", "pytorch_model.bin"], Some(Reason::UnsupportedFeature));
    check(&["adapter_config.json", "adapter_model-00001-of-00002.safetensors"], Some(Reason::UnsupportedFeature));
}

#[test]
fn folders_of_bases() {
    let files = base_files(["tokenizer.json", "model.safetensors", "README.md", "config.json"]).unwrap().1;
    assert_eq!(files, ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(base_files(["x.gguf", "README.md"]).unwrap().1, ["x.gguf"]);
    assert_eq!(base_files(["x.gguf", "y.gguf"]).unwrap_err().reason, Reason::Malformed);
    assert_eq!(base_files(["model.safetensors"]).unwrap_err().reason, Reason::Malformed);
    assert_eq!(base_files(["pytorch_model.bin", "config.json"]).unwrap_err().reason, Reason::UnsupportedFeature);
    assert_eq!(base_files([]).unwrap_err().reason, Reason::NotFound);
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics_and_is_stable(text in ".{0,60}") {
        for text in [text.clone(), format!("s3://b/{text}"), format!("/{text}")] {
            if let Ok(source) = text.parse::<SourceUri>() {
                prop_assert_eq!(source.to_string().parse::<SourceUri>().unwrap(), source.clone());
                prop_assert!(source.segments().iter().all(|segment| segment != ".." && !segment.contains('/')));
            }
        }
    }

    /// Nothing outside of a prefix is ever within it, whatever its text looks like.
    #[test]
    fn within_means_the_same_start(text in "[a.%2e/-]{0,20}") {
        let prefix = uri("s3://b/team");
        if let Ok(source) = format!("s3://b/{text}").parse::<SourceUri>() {
            let inside = source.to_string() == "s3://b/team" || source.to_string().starts_with("s3://b/team/");
            prop_assert_eq!(source.is_within(&prefix), inside);
        }
    }
}
