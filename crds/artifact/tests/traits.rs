//! A policy says the same of an adapter's traits as of its bytes.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod support;

use lorafleet_artifact::{BASE_DIGEST_KEY, Claims, Digest, Policy, Verified};
use proptest::prelude::*;
use serde_json::json;
use support::{Tensor, base, floats, open_policy, verify, write_with};

/// Ranks of `q_proj` and `v_proj` in the two layers (0: left alone), and what owner and file say of the base.
#[derive(Clone, Debug)]
struct Adapter {
    ranks: [u64; 4],
    claimed: Option<Digest>,
    stamped: Option<Digest>,
}

impl Adapter {
    fn verify(&self, policy: &Policy) -> Result<Verified, lorafleet_artifact::Refusal> {
        let base = base("base");
        let names = ["0.self_attn.q_proj", "1.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.v_proj"];
        let modules = names.iter().zip(self.ranks).filter(|(_, rank)| *rank > 0);
        let modules: Vec<(String, u64)> = modules.map(|(name, rank)| (format!("model.layers.{name}"), rank)).collect();
        let tensors = modules.iter().flat_map(|(module, rank)| {
            let width = base.width(base.module(module).unwrap().kind);
            let shapes = [("A", [*rank, u64::from(width.input)]), ("B", [u64::from(width.output), *rank])];
            shapes.map(|(part, shape)| {
                let bytes = floats(shape.iter().product::<u64>() as usize, 0.5);
                (format!("base_model.model.{module}.lora_{part}.weight"), "F32", shape.to_vec(), bytes)
            })
        });
        let tensors: Vec<Tensor> = tensors.collect();
        let metadata = self.stamped.map_or(json!({}), |digest| json!({ BASE_DIGEST_KEY: digest }));
        let targets: Vec<&str> = modules.iter().map(|(name, _)| name.as_str()).collect();
        let pattern: serde_json::Map<_, _> = modules.iter().map(|(name, rank)| (name.clone(), json!(rank))).collect();
        let config = json!({
            "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "rank_pattern": pattern,
        });
        let claims = Claims { digest: None, base_digest: self.claimed };
        verify(config.to_string().as_bytes(), &write_with(&tensors, metadata), claims, &base, policy, 4096)
    }
}

fn digest() -> impl Strategy<Value = Digest> {
    (0..3_u8).prop_map(|byte| Digest::from_bytes([byte; 32]))
}

fn adapter() -> impl Strategy<Value = Adapter> {
    let rank = || prop::sample::select(vec![0_u64, 4, 8, 16]);
    ([rank(), rank(), rank(), rank()], prop::option::of(digest()), prop::option::of(digest()))
        .prop_filter("it changes something", |(ranks, ..)| ranks.iter().any(|rank| *rank > 0))
        .prop_map(|(ranks, claimed, stamped)| Adapter { ranks, claimed, stamped })
}

fn policy() -> impl Strategy<Value = Policy> {
    let subset = |all: Vec<&'static str>| {
        let most = all.len();
        prop::sample::subsequence(all, 0..=most).prop_map(|names| names.iter().map(|name| (*name).to_owned()).collect())
    };
    (
        prop::option::of(prop::sample::select(vec![4_u32, 8, 16])),
        prop::sample::subsequence(vec![4_u32, 8, 16], 0..=3),
        subset(vec!["q_proj", "v_proj", "o_proj"]),
        prop::sample::select(vec![2_000_u64, 6_000, 1 << 20]),
        any::<bool>(),
        prop::collection::vec(digest(), 0..3),
    )
        .prop_map(|(max_rank, allowed_ranks, modules, bytes, require_base_digest, identities)| Policy {
            max_rank,
            allowed_ranks,
            allowed_target_modules: modules,
            max_adapter_bytes: bytes,
            require_digest: false,
            require_base_digest,
            identities,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn traits_are_judged_as_bytes_are(adapter in adapter(), policy in policy()) {
        let traits = adapter.verify(&open_policy()).unwrap().traits();
        let (of_bytes, of_traits) = (adapter.verify(&policy), policy.check_traits(&traits));
        prop_assert_eq!(of_bytes.is_ok(), of_traits.is_ok(), "{:?} {:?}", of_bytes.err(), of_traits);
    }
}
