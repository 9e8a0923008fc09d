//! Whatever is written, and in whatever pieces it comes.

use lorafleet_artifact::Reason;
use proptest::prelude::*;
use serde_json::json;

use crate::support::{self, Files, base, open_policy};

proptest! {
    /// Pieces of any size give the same judgement.
    #[test]
    fn pieces(size in 1_usize..20_000) {
        let files = Files::of_case("rank-pattern");
        let config = serde_json::to_vec(&files.config).unwrap();
        let base = base("base");
        let whole = support::verify(&config, &files.weights, Default::default(), &base, &open_policy(), usize::MAX).unwrap();
        let parts = support::verify(&config, &files.weights, Default::default(), &base, &open_policy(), size).unwrap();
        prop_assert_eq!(whole.digest, parts.digest);
    }

    #[test]
    fn a_nan_is_found_wherever_it_is(at in 0_usize..2048, size in 1_usize..50) {
        let mut files = Files::of_case("plain-r8-qv");
        let start = files.weights.len() - 4 * (at + 1);
        files.weights[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        let config = serde_json::to_vec(&files.config).unwrap();
        let judged = support::verify(&config, &files.weights, Default::default(), &base("base"), &open_policy(), size);
        let refusal = judged.unwrap_err();
        prop_assert_eq!(refusal.reason, Reason::Malformed);
        let expected = format!("holds a NaN or an infinity at byte {start} of the file");
        prop_assert!(refusal.message.ends_with(&expected), "{}", refusal);
    }

    #[test]
    fn arbitrary_expressions_never_panic(pattern in r"[a-z0-9(){}\[\]|?*+.^$\\:<>=!#&~, -]{0,24}") {
        for config in [json!({"target_modules": pattern}), json!({"target_modules": ["q_proj"], "rank_pattern": {pattern.clone(): 2}})] {
            let mut files = Files::of_case("plain-r8-qv");
            for (key, value) in config.as_object().unwrap() {
                files.config[key] = value.clone();
            }
            let _ = files.verify(&base("base"), &open_policy());
        }
    }

    #[test]
    fn arbitrary_configurations_never_panic(text in ".{0,200}", bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = lorafleet_artifact::AdapterConfig::parse(text.as_bytes());
        let _ = lorafleet_artifact::AdapterConfig::parse(&bytes);
        let mut files = Files::of_case("plain-r8-qv");
        files.config["target_modules"] = text.clone().into();
        let _ = files.verify(&base("base"), &open_policy());
        files.config["target_modules"] = json!(["q_proj", "v_proj"]);
        files.config["rank_pattern"] = json!({text: 4});
        let _ = files.verify(&base("base"), &open_policy());
    }
}
