//! Configurations: what is read, what is refused by name, and what is passed over.

use lorafleet_artifact::Reason;
use serde_json::{Value, json};

use crate::check_config;
use crate::support::{Files, base, open_policy};

#[test]
fn features_that_change_the_mathematics_are_refused_by_name() {
    let check = |change: Value, message| check_config(change, Reason::UnsupportedFeature, message);
    check(json!({"use_dora": true}), "use_dora");
    check(json!({"use_qalora": true}), "use_qalora");
    check(json!({"lora_bias": true}), "lora_bias");
    check(json!({"bias": "some"}), "bias = \"some\"");
    check(json!({"modules_to_save": ["embed_tokens"]}), "embed_tokens");
    check(json!({"modules_to_save": ["score"]}), "score");
    check(json!({"trainable_token_indices": [1, 2]}), "trainable_token_indices");
    check(json!({"trainable_token_indices": {"embed_tokens": [1]}}), "trainable_token_indices");
    check(json!({"layer_replication": [[0, 1], [0, 2]]}), "layer_replication");
    check(json!({"target_parameters": ["mlp.experts.gate_up_proj"]}), "target_parameters");
    check(json!({"alora_invocation_tokens": [5, 6]}), "alora_invocation_tokens");
    check(json!({"arrow_config": {"top_k": 3}}), "arrow_config");
    check(json!({"use_bdlora": {"nblocks": 2}}), "use_bdlora");
    check(json!({"kasa_config": {"beta": 1}}), "kasa_config");
    check(json!({"monteclora_config": {"n": 1}}), "monteclora_config");
    check(json!({"megatron_config": {"tp": 2}}), "megatron_config");
    check(json!({"init_lora_weights": "pissa"}), "pissa");
    check(json!({"init_lora_weights": "pissa_niter_16"}), "pissa_niter_16");
    check(json!({"init_lora_weights": "OLoRA"}), "OLoRA");
    check(json!({"init_lora_weights": "loftq"}), "loftq");
    check(json!({"init_lora_weights": "corda"}), "corda");
    check(json!({"init_lora_weights": "lora_ga"}), "lora_ga");
    check(json!({"init_lora_weights": "future_svd"}), "future_svd");
    check(json!({"peft_type": "LOHA"}), "LOHA");
    check(json!({"peft_type": "ADALORA"}), "ADALORA");
    check(json!({"peft_type": "PROMPT_TUNING"}), "PROMPT_TUNING");
    check(json!({"task_type": "SEQ_CLS"}), "SEQ_CLS");
    check(json!({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}), "embed_tokens");
    check(json!({"use_future": true}), "use_future");
    check(json!({"future_config": {"x": 1}}), "future_config");
    check(json!({"future_mode": "new"}), "future_mode");
    check(json!({"init_lora_weights": "unheard-of"}), "unheard-of");
}

#[test]
fn configurations_that_are_none() {
    let check = |change: Value, message| check_config(change, Reason::Malformed, message);
    check(json!({"r": 0}), "r = 0");
    check(json!({"r": -8}), "r = -8");
    check(json!({"r": 8.5}), "r = 8.5");
    check(json!({"r": "8"}), "r = ");
    check(json!({"r": null}), "'r'");
    check(json!({"r": true}), "r = true");
    check(json!({"r": 1_000_000}), "1000000");
    check(json!({"lora_alpha": null}), "lora_alpha");
    check(json!({"lora_alpha": "16"}), "lora_alpha");
    check(json!({"peft_type": null}), "peft_type");
    check(json!({"target_modules": null}), "target_modules");
    check(json!({"target_modules": 3}), "target_modules = 3");
    check(json!({"target_modules": ["q_proj", 3]}), "target_modules = 3");
    check(json!({"target_modules": "(q_proj"}), "regular expression");
    check(json!({"target_modules": ".*\\.(q|v)_proj", "layers_to_transform": [0]}), "layers_to_transform");
    check(json!({"layers_pattern": "layers"}), "layers_pattern");
    check(json!({"rank_pattern": {"q_proj": 0}}), "rank_pattern['q_proj'] = 0");
    check(json!({"rank_pattern": {"q_proj": "x"}}), "rank_pattern['q_proj']");
    check(json!({"rank_pattern": [1]}), "rank_pattern");
    check(json!({"alpha_pattern": {"q_proj": "x"}}), "alpha_pattern['q_proj']");
    check(json!({"alpha_pattern": {"[": 2}}), "regular expression");
    check(json!({"use_rslora": "yes"}), "use_rslora");
    check(json!({"target_modules": ["q_proj", "k_proj", "v_proj"]}), "k_proj");
    check(json!({"target_modules": ["q_proj"]}), "v_proj");
    check(json!({"layers_to_transform": [0]}), "model.layers.1.self_attn.q_proj");
    check(json!({"exclude_modules": ["v_proj"]}), "v_proj");
}

#[test]
fn configurations_whose_targets_are_elsewhere() {
    check_config(json!({"target_modules": ["c_attn"]}), Reason::ModuleUnknown, "c_attn");
    check_config(json!({"target_modules": []}), Reason::ModuleUnknown, "[]");
    check_config(json!({"target_modules": "transformer\\.h\\..*"}), Reason::ModuleUnknown, "transformer");
    check_config(json!({"layers_to_transform": [5]}), Reason::ModuleUnknown, "");
}

#[test]
fn ranks_that_tensors_do_not_have() {
    check_config(json!({"r": 4}), Reason::ShapeMismatch, "[4, 64]");
    check_config(json!({"rank_pattern": {"layers.1.self_attn.v_proj": 4}}), Reason::ShapeMismatch, "v_proj");
}

#[test]
fn inert_keys_pass() {
    let changes = [
        json!({"future_config": null, "use_future": false, "future_list": [], "future_map": {}}),
        json!({"use_future": false, "future_group_size": 16}),
        json!({"future_config": null, "future_init": "default"}),
        json!({"peft_version": "0.99.0", "revision": "main", "inference_mode": false, "lora_dropout": 0.3}),
        json!({"init_lora_weights": "gaussian", "bias": "all", "fan_in_fan_out": true}),
        json!({"init_lora_weights": "Orthogonal", "bias": "lora_only"}),
        json!({"init_lora_weights": "mica", "bias": "none"}),
        json!({"init_lora_weights": true, "loftq_config": {"loftq_bits": 4}}),
        json!({"eva_config": {"rho": 2.0}, "corda_config": {"x": 1}, "runtime_config": {"ephemeral_gpu_offload": true}}),
        json!({"velora_config": {"num_groups": 2}}),
        json!({"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "x"}, "task_type": null}),
        json!({"ensure_weight_tying": true}),
        json!({"rank_pattern": null, "alpha_pattern": null}),
        json!({"target_modules": ["q_proj", "v_proj", "Wqkv"]}),
        json!({"layers_to_transform": [0, 1, 99], "layers_pattern": null}),
        json!({"modules_to_save": [], "trainable_token_indices": null, "bias": null}),
    ];
    for change in changes {
        let mut files = Files::of_case("plain-r8-qv");
        for (key, value) in change.as_object().unwrap() {
            files.config[key] = value.clone();
        }
        files.verify(&base("base"), &open_policy()).unwrap_or_else(|error| panic!("{change}: {error}"));
    }
}

/// Whatever the present PEFT writes of its own accord is served.
#[test]
fn defaults_of_peft_pass() {
    let golden: Value = serde_json::from_str(include_str!("../goldens/peft_defaults.json")).unwrap();
    let mut files = Files::of_case("plain-r8-qv");
    files.config = golden["config"].clone();
    files.verify(&base("base"), &open_policy()).unwrap();
}

#[test]
fn weight_tying_is_refused_only_where_it_matters() {
    let mut files = Files::of_case("lm-head-tied");
    files.config["ensure_weight_tying"] = true.into();
    let refusal = files.verify(&base("base-tied"), &open_policy()).unwrap_err();
    assert_eq!(refusal.reason, Reason::UnsupportedFeature);
    files.verify(&base("base"), &open_policy()).unwrap();
}
