//! What fits: PEFT's own matching as oracle, and each kind of fault in several places.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod any;
mod configurations;
mod expressions;
#[path = "../support/mod.rs"]
mod support;
mod tensors;

use lorafleet_artifact::{BaseShape, Reason, SourceUri};
use serde_json::{Value, json};
use support::{Files, Tensor, base, floats, open_policy, tensors_of, write};

/// Tensors of one module, of the shapes that the base and the rank want.
fn pair(base: &BaseShape, module: &str, rank: u64) -> [Tensor; 2] {
    let width = base.width(base.module(module).unwrap().kind);
    let (input, output) = (u64::from(width.input), u64::from(width.output));
    let tensor = |part: &str, shape: Vec<u64>| {
        let bytes = floats(shape.iter().product::<u64>() as usize, 0.5);
        (format!("base_model.model.{module}.lora_{part}.weight"), "F32", shape, bytes)
    };
    [tensor("A", vec![rank, input]), tensor("B", vec![output, rank])]
}

fn check_config(change: Value, reason: Reason, message: &str) {
    let mut files = Files::of_case("plain-r8-qv");
    for (key, value) in change.as_object().unwrap() {
        files.config[key] = value.clone();
    }
    let refusal = files.verify(&base("base"), &open_policy()).expect_err(&change.to_string());
    assert_eq!(refusal.reason, reason, "{change}: {refusal}");
    assert!(refusal.message.contains(message), "{change}: {refusal}");
}

#[test]
fn modules_ranks_and_scales_are_those_of_peft() {
    let golden: Value = serde_json::from_str(include_str!("../goldens/peft_matching.json")).unwrap();
    let base = base("base");
    for entry in golden.as_array().unwrap() {
        let keys = entry["config"].as_str().unwrap().trim_start_matches('{');
        let config = format!(r#"{{"peft_type": "LORA", "r": 8, "lora_alpha": 16, {keys}"#);
        let expected = entry["modules"].as_object().unwrap();
        let tensors = expected.iter().flat_map(|(module, values)| pair(&base, module, values[0].as_u64().unwrap()));
        let weights = write(&tensors.collect::<Vec<_>>());
        let verified = support::verify(config.as_bytes(), &weights, Default::default(), &base, &open_policy(), 4096);
        let verified = verified.unwrap_or_else(|error| panic!("{config}: {error}"));
        assert_eq!(verified.fitted.modules.len(), expected.len());
        for fitted in &verified.fitted.modules {
            let scale = expected[&fitted.module.to_string()][1].as_f64().unwrap();
            assert_eq!(fitted.scale, scale as f32, "{} {}", entry["config"], fitted.module);
        }
    }
}

/// Numbers as a hand or a broken tool writes them: what PEFT refuses is refused, what it would turn into infinities too, and
/// the rest has its scale.
#[test]
fn odd_numbers_mean_what_they_mean_to_peft() {
    let golden: Value = serde_json::from_str(include_str!("../goldens/peft_numbers.json")).unwrap();
    let Files { config, weights } = Files::of_case("plain-r8-qv");
    for entry in golden.as_array().unwrap() {
        let change = entry["change"].as_str().unwrap();
        let mut rest = config.as_object().unwrap().clone();
        rest.retain(|key, _| !change.contains(&format!("\"{key}\":")));
        let config = format!("{{{change}, {}", serde_json::to_string(&rest).unwrap().trim_start_matches('{'));
        let judged =
            support::verify(config.as_bytes(), &weights, Default::default(), &base("base"), &open_policy(), 4096);
        let scales: Vec<f32> = entry["scales"]
            .as_object()
            .into_iter()
            .flat_map(|scales| scales.values())
            .map(|scale| scale.as_str().unwrap().parse().unwrap())
            .collect();
        let expected = match &scales[..] {
            [] => Err(Reason::Malformed),
            scales if scales.iter().any(|scale| !scale.is_finite()) => Err(Reason::Malformed),
            scales if scales.iter().all(|scale| *scale == 0.0) => Err(Reason::NoEffect),
            scales => Ok(scales.to_vec()),
        };
        let expected = if change.contains("unheard-of") { Err(Reason::UnsupportedFeature) } else { expected };
        let found = judged.map(|judged| {
            assert_eq!(judged.fitted.modules.len(), scales.len());
            let by_name = |module: &lorafleet_artifact::FittedModule| (module.module.to_string(), module.scale);
            let found: std::collections::BTreeMap<_, _> = judged.fitted.modules.iter().map(by_name).collect();
            found.into_values().collect()
        });
        assert_eq!(
            found.as_ref().map_err(|refusal| refusal.reason),
            expected.as_ref().map_err(|reason| *reason),
            "{change}"
        );
    }
}

#[test]
fn a_scale_beyond_single_precision_is_named_with_what_made_it() {
    let check = |change: Value, message: &str| check_config(change, Reason::Malformed, message);
    check(
        json!({"lora_alpha": 1e300}),
        "the alpha 1e300 over rank 8 gives 'model.layers.0.self_attn.q_proj' the scale 1.25e299, single precision ends at 3.4028235e38",
    );
    check(json!({"alpha_pattern": {"layers.1.self_attn.v_proj": -1e300}}), "'model.layers.1.self_attn.v_proj'");
    check(json!({"init_lora_weights": 3}), "init_lora_weights = 3");
}

#[test]
fn policy() {
    use lorafleet_artifact::Policy;
    fn check(policy: Policy, expected: Option<(Reason, &str)>) {
        let policy = Policy { require_base_digest: false, ..policy };
        let judged = Files::of_case("rank-pattern").verify(&base("base"), &policy);
        match expected {
            None => drop(judged.unwrap()),
            Some((reason, message)) => {
                let refusal = judged.unwrap_err();
                assert_eq!(refusal.reason, reason);
                assert!(refusal.message.contains(message), "{refusal}");
            }
        }
    }
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let open = Policy::default;
    check(Policy { max_rank: Some(16), ..open() }, None);
    check(Policy { max_rank: Some(15), ..open() }, Some((Reason::RankTooHigh, "rank 16, the limit is 15")));
    check(Policy { allowed_ranks: vec![4, 7, 16], ..open() }, None);
    check(Policy { allowed_ranks: vec![4, 8, 16], ..open() }, Some((Reason::RankNotAllowed, "rank 7")));
    check(
        Policy { allowed_target_modules: names(&["q_proj", "v_proj"]), ..open() },
        Some((Reason::ModuleNotAllowed, "k_proj")),
    );
    check(Policy { max_adapter_bytes: 47_016, ..open() }, None);
    check(Policy { max_adapter_bytes: 47_015, ..open() }, Some((Reason::TooLarge, "47016 bytes, the limit is 47015")));
    check(Policy { require_digest: true, ..open() }, Some((Reason::DigestMismatch, "requireDigest")));
}

#[test]
fn costs() {
    let base = base("base");
    // 2 layers x (q 64+64, k and v 64+32, o 64+64, gate and up 64+128, down 128+64), two bytes each.
    assert_eq!(base.adapter_bytes_per_rank(2), 2 * 2 * (128 + 2 * 96 + 128 + 3 * 192));
    assert_eq!(base.kv_bytes_per_token(2), 2 * 2 * 2 * 2 * 16);
    let fitted = Files::of_case("r1-all").verify(&base, &open_policy()).unwrap().fitted;
    assert_eq!(fitted.bytes(2), base.adapter_bytes_per_rank(2));
    // The sum over the file's own tensors.
    let weights = std::fs::read(support::cases().join("base/model.safetensors")).unwrap();
    let stored: u64 = tensors_of(&weights).iter().map(|tensor| tensor.2.iter().product::<u64>()).sum();
    assert_eq!(base.parameters, stored);
    assert!("s3://bucket/x".parse::<SourceUri>().is_ok());
}
