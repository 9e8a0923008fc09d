//! Every conformance case through the whole judgement.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod support;

use std::collections::BTreeMap;

use lorafleet_artifact::{ModuleId, ModuleKind, Reason};
use support::{base, cases, open_policy, verify_case};

#[derive(serde::Deserialize)]
struct Case {
    base: String,
    expect: String,
    #[serde(default)]
    reason: Option<Reason>,
}

#[test]
fn every_case_is_served_or_refused_as_it_says() {
    let mut counts = BTreeMap::<String, u32>::new();
    for entry in std::fs::read_dir(cases()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Ok(text) = std::fs::read(cases().join(&name).join("case.json")) else { continue };
        let case: Case = serde_json::from_slice(&text).unwrap();
        let judged = verify_case(&name, &base(&case.base), &open_policy());
        match (case.expect.as_str(), judged) {
            ("serve", Ok(_)) => {}
            ("refuse", Err(refusal)) => assert_eq!(Some(refusal.reason), case.reason, "{name}: {refusal}"),
            ("serve-or-refuse", Err(refusal)) => assert_eq!(refusal.reason, Reason::UnsupportedFeature, "{name}"),
            (expect, judged) => panic!("{name}: expected to {expect}, got {judged:?}"),
        }
        *counts.entry(case.expect).or_default() += 1;
    }
    assert_eq!(counts["serve"], 16);
    assert_eq!(counts["refuse"], 14);
    assert_eq!(counts["serve-or-refuse"], 2);
}

/// What a refusal tells: the tensor or key and both values.
#[test]
fn messages() {
    fn check(name: &str, parts: &[&str]) {
        let refusal = verify_case(name, &base("base"), &open_policy()).unwrap_err();
        for part in parts {
            assert!(refusal.message.contains(part), "{name}: '{part}' is not in: {}", refusal.message);
        }
    }
    check("b-rows", &["layers.1.self_attn.v_proj.lora_B.weight", "[48, 8]", "[32, 8]"]);
    check("rank-lies", &["layers.0.self_attn.q_proj.lora_A.weight", "[4, 64]", "[8, 64]", "rank 8"]);
    check("wrong-hidden", &["q_proj.lora_A.weight", "[8, 80]", "[8, 64]"]);
    check("layer-out-of-range", &["layers.7.self_attn.q_proj", "2 layers"]);
    check("one-unknown-key", &["foo_proj"]);
    check("zero-match", &["tower"]);
    check("missing-b", &["layers.1.self_attn.v_proj.lora_A.weight", "lora_B.weight' is missing"]);
    check("no-rank", &["'r'"]);
    check("not-lora", &["IA3", "LORA"]);
    check("nan", &["NaN", "lora_"]);
    check("huge-header", &["1152921504606846976"]);
    check("truncated", &["ends early"]);
    check("pickle-only", &["adapter_model.bin", "adapter_model.safetensors"]);
    check("dora", &["use_dora"]);
    check("modules-to-save", &["modules_to_save", "lm_head"]);
}

#[test]
fn ranks_and_scales() {
    fn check(name: &str, module: ModuleId, rank: u32, scale: f32) {
        let base = base(if name == "lm-head-tied" { "base-tied" } else { "base" });
        let verified = verify_case(name, &base, &open_policy()).unwrap();
        let fitted = verified.fitted.modules.iter().find(|fitted| fitted.module == module).unwrap();
        assert_eq!(fitted.rank, rank, "{name} {module}");
        assert_eq!(fitted.scale, scale, "{name} {module}");
        assert_eq!((fitted.a.rows, fitted.b.columns), (rank, rank));
    }
    let layer = ModuleId::in_layer;
    check("plain-r8-qv", layer(0, ModuleKind::Q), 8, 2.0);
    check("all-linear", layer(1, ModuleKind::Down), 5, 2.1);
    check("r3-odd", layer(0, ModuleKind::Down), 3, 5.0 / 3.0);
    check("rslora", layer(1, ModuleKind::V), 16, 4.0);
    check("rank-pattern", layer(0, ModuleKind::Q), 4, 2.0);
    check("rank-pattern", layer(1, ModuleKind::Q), 16, 0.5);
    check("rank-pattern", layer(1, ModuleKind::Down), 7, 3.0 / 7.0);
    check("regex-targets", layer(1, ModuleKind::Up), 8, 2.0);
    check("lm-head-tied", ModuleId::head(), 8, 2.0);
}

#[test]
fn copies_of_the_base_are_listed() {
    let extra = verify_case("extra-base-copy", &base("base"), &open_policy()).unwrap();
    let names: Vec<&str> = extra.fitted.base_copies.iter().map(|copy| copy.base_name.as_str()).collect();
    assert_eq!(names, ["model.embed_tokens.weight"]);
    let head = verify_case("lm-head-tied", &base("base-tied"), &open_policy()).unwrap();
    assert_eq!(head.fitted.base_copies[0].base_name, "lm_head.weight");
    assert_eq!(head.fitted.base_copies[0].shape, [258, 64]);
}

/// The digest that two shell commands give.
#[test]
fn digest() {
    let folder = cases().join("plain-r8-qv");
    let script = "sha256sum adapter_config.json adapter_model.safetensors | sha256sum";
    let shell = std::process::Command::new("sh").args(["-c", script]).current_dir(folder).output().unwrap();
    let expected = String::from_utf8(shell.stdout).unwrap();
    let verified = verify_case("plain-r8-qv", &base("base"), &open_policy()).unwrap();
    assert_eq!(verified.digest.hex(), expected.split(' ').next().unwrap());
}
