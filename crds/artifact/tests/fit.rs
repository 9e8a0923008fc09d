//! What fits: PEFT's own matching as oracle, and each kind of fault in several places.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod support;

use lorafleet_artifact::{BaseShape, Reason, SourceUri};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::{Files, Tensor, base, floats, open_policy, tensors_of, write, write_with};

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

#[test]
fn modules_ranks_and_scales_are_those_of_peft() {
    let golden: Value = serde_json::from_str(include_str!("goldens/peft_matching.json")).unwrap();
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
    let golden: Value = serde_json::from_str(include_str!("goldens/peft_numbers.json")).unwrap();
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

/// The order of the file decides which of two matching patterns wins; the general JSON type would sort them.
#[test]
fn the_first_pattern_wins() {
    let base = base("base");
    for (patterns, rank) in [(r#"{"q_proj": 2, "_proj|q_proj": 3}"#, 2), (r#"{".*q_proj": 3, "q_proj": 2}"#, 3)] {
        let config = format!(
            r#"{{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": {patterns}}}"#
        );
        let tensors: Vec<Tensor> =
            (0..2).flat_map(|layer| pair(&base, &format!("model.layers.{layer}.self_attn.q_proj"), rank)).collect();
        let weights = write(&tensors);
        support::verify(config.as_bytes(), &weights, Default::default(), &base, &open_policy(), 100).unwrap();
    }
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

/// Nothing that Python would not compile is read as something else.
#[test]
fn expressions_that_are_none_of_pythons() {
    let patterns = [
        r"a)|(b",
        "(a",
        "[a",
        "[]",
        r"a\",
        r"\hq",
        r"\Kq",
        r"\p{L}",
        r"\Qq\E",
        r"\g<1>",
        r"\N{DIGIT ONE}",
        r"[\1]",
        r"[b-a]",
        r"[a-\w]",
        "*a",
        "a|+",
        "a**",
        "a{2}{3}",
        "a++?",
        "^*",
        r"\b+",
        "(?<n>a)",
        "(?P<1>a)",
        "(?P<n->a)",
        "(?|a|b)",
        "(?&n)",
        "(?L)a",
        "a(?i)b",
        "(?-i)a",
        "(?i",
        "(?",
        "(?#",
        "(?(1-)a)",
        r"\9",
        r"\x7",
        r"\ud800",
        r"\777",
    ];
    for pattern in patterns {
        check_config(json!({"target_modules": pattern}), Reason::Malformed, "is not a regular expression of Python's");
    }
    // In front of it stands what PEFT puts there.
    check_config(json!({"rank_pattern": {"(?i)q_proj": 8}}), Reason::Malformed, "elsewhere than at its start");
    check_config(json!({"layers_to_transform": 1, "layers_pattern": "(layers"}), Reason::Malformed, "')' is missing");
}

/// An expression that backtracks without end is cut off: it costs milliseconds, not the process.
#[test]
fn hostile_expressions_end() {
    for pattern in
        [r"(?:(?:a|[^.]|_)*?)*(?=x)(\w+\s?)*\1zzz", r"(([a-z._0-9])+)+(?=!)\1", r"(?:.*.*.*.*.*)*(?<=y)z\b(?=q)"]
    {
        let mut files = Files::of_case("plain-r8-qv");
        files.config["target_modules"] = pattern.into();
        let start = std::time::Instant::now();
        let refusal = files.verify(&base("base"), &open_policy()).unwrap_err();
        assert!(matches!(refusal.reason, Reason::Malformed | Reason::ModuleUnknown), "{refusal}");
        assert!(start.elapsed().as_secs() < 10, "{pattern} took {:?}", start.elapsed());
    }
}

/// As many expressions as there may be, each as slow as it may be, over the modules of a large model: a fraction of a second,
/// whatever comes out.
#[test]
fn many_slow_expressions_end_soon() {
    let base = BaseShape { layers: 80, ..base("base") };
    let modules: Vec<String> = base.modules().map(|module| module.to_string()).collect();
    let tensors: Vec<Tensor> = modules.iter().flat_map(|module| pair(&base, module, 1)).collect();
    let weights = write(&tensors);
    let slow = [
        (16, r"(.*)(.*)(.*)\1zz"),
        (16, r"(.*)(.*)\1zz"),
        (16, r"(?:.*)(?=z)(.*)\1x"),
        (16, r"(\w+\.)*(?<=q)z"),
        (128, r"(.{0,60}.{0,60}.{0,60})*z"),
        (128, r"(?:.*\.){0,40}z"),
        // One for each layer, as some tools write them.
        (128, r".*\.12\..*(q|k)_proj"),
    ];
    for (count, pattern) in slow {
        let patterns: serde_json::Map<_, _> = (0..count).map(|at| (format!("{pattern}{at}"), json!(1))).collect();
        let config = json!({
            "peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": modules,
            "rank_pattern": patterns, "alpha_pattern": patterns,
        });
        let start = std::time::Instant::now();
        let _ = support::verify(
            config.to_string().as_bytes(),
            &weights,
            Default::default(),
            &base,
            &open_policy(),
            1 << 20,
        );
        println!("{pattern} took {:?}", start.elapsed());
        assert!(start.elapsed().as_secs() < 20, "{pattern} took {:?}", start.elapsed());
    }
}

#[test]
fn expressions_are_counted() {
    let patterns = |count: usize, make: &dyn Fn(usize) -> String| json!({"rank_pattern": (0..count).map(|at| (make(at), json!(8))).collect::<serde_json::Map<_, _>>()});
    check_config(patterns(129, &|at| format!("x{at}|y")), Reason::Malformed, "128 regular expressions");
    check_config(patterns(17, &|at| format!("(?<!x){at}")), Reason::Malformed, "16 regular expressions that look");
    check_config(patterns(17, &|at| format!("(x)y\\1z{at}")), Reason::Malformed, "16 regular expressions that look");
    check_config(patterns(65_537, &|at| format!("layers.{at}.x")), Reason::Malformed, "65536");
    let mut files = Files::of_case("plain-r8-qv");
    files.config["rank_pattern"] =
        patterns(60_000, &|at| format!(r"layers\.{at}\.self_attn.o_proj"))["rank_pattern"].clone();
    files.verify(&base("base"), &open_policy()).unwrap();
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

fn check_tensors(change: impl FnOnce(&mut Vec<Tensor>), reason: Reason, message: &str) {
    let mut files = Files::of_case("plain-r8-qv");
    let mut tensors = tensors_of(&files.weights);
    change(&mut tensors);
    files.weights = write(&tensors);
    let refusal = files.verify(&base("base"), &open_policy()).expect_err(message);
    assert_eq!(refusal.reason, reason, "{message}: {refusal}");
    assert!(refusal.message.contains(message), "'{message}' is not in {refusal}");
}

#[test]
fn tensors_that_do_not_fit() {
    use Reason::{Malformed, ModuleUnknown, NoEffect, ShapeMismatch, UnsupportedFeature};
    fn extra(key: &'static str, shape: &'static [u64]) -> impl FnOnce(&mut Vec<Tensor>) {
        move |tensors| {
            let bytes = floats(shape.iter().product::<u64>() as usize, 1.0);
            tensors.push((format!("base_model.model.{key}"), "F32", shape.to_vec(), bytes));
        }
    }
    check_tensors(extra("model.layers.2.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.2");
    check_tensors(extra("model.layers.00.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.00");
    check_tensors(extra("model.layers.-1.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.-1");
    check_tensors(extra("model.layers.0.mlp.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "mlp.q_proj");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_C.weight", &[8, 64]), ModuleUnknown, "lora_C");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_A.default.weight", &[8, 64]), ModuleUnknown, "default");
    check_tensors(extra("score.weight", &[2, 64]), ModuleUnknown, "score");
    check_tensors(extra("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]), ModuleUnknown, "inv_freq");
    check_tensors(extra("model.layers.0.mlp.up_proj.lora_A.weight", &[8, 64]), Malformed, "no partner");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_B.bias", &[64]), UnsupportedFeature, "bias");
    check_tensors(extra("model.layers.0.self_attn.q_proj.bias", &[64]), UnsupportedFeature, "bias");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_magnitude_vector", &[64]), UnsupportedFeature, "DoRA");
    check_tensors(extra("model.embed_tokens.lora_embedding_A", &[8, 258]), UnsupportedFeature, "embedding");
    check_tensors(extra("model.embed_tokens.weight", &[259, 64]), ShapeMismatch, "[258, 64]");
    check_tensors(extra("lm_head.base_layer.weight", &[258, 65]), ShapeMismatch, "[258, 65]");
    check_tensors(extra("model.norm.weight", &[63]), ShapeMismatch, "[63]");
    check_tensors(
        |tensors| {
            extra("model.norm.weight", &[64])(tensors);
            extra("model.norm.base_layer.weight", &[64])(tensors);
        },
        Malformed,
        "second copy",
    );
    check_tensors(|tensors| tensors[0].0 = tensors[0].0.replace("base_model.model.", ""), ModuleUnknown, "start with");
    check_tensors(Vec::clear, ModuleUnknown, "none of the 0 tensors");
    check_tensors(|tensors| tensors.retain(|tensor| !tensor.0.contains("layers.1")), Malformed, "layers.1");
    for at in 0..8 {
        check_tensors(|tensors| drop(tensors.remove(at)), Malformed, "no partner");
        check_tensors(|tensors| tensors[at].2.reverse(), ShapeMismatch, "expected");
        check_tensors(|tensors| tensors[at].2.push(1), ShapeMismatch, "expected");
        check_tensors(|tensors| tensors[at].1 = "I32", UnsupportedFeature, "I32");
        check_tensors(|tensors| tensors[at].1 = "F8_E9", UnsupportedFeature, "F8_E9");
        let not_numbers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fa0_0001)];
        for value in not_numbers {
            let put =
                |tensors: &mut Vec<Tensor>| tensors[at].3[4 * (7 + at)..][..4].copy_from_slice(&value.to_le_bytes());
            check_tensors(put, Malformed, "NaN or an infinity");
        }
    }
    let zero = |part: &'static str| {
        move |tensors: &mut Vec<Tensor>| {
            tensors.iter_mut().filter(|tensor| tensor.0.contains(part)).for_each(|tensor| tensor.3.fill(0));
        }
    };
    check_tensors(zero("lora_B"), NoEffect, "4 modules");
    check_tensors(zero("lora_A"), NoEffect, "4 modules");
    // Negative zeros are zeros.
    let negative = |tensors: &mut Vec<Tensor>| {
        tensors
            .iter_mut()
            .filter(|tensor| tensor.0.contains("lora_B"))
            .for_each(|tensor| tensor.3 = floats(tensor.3.len() / 4, -0.0));
    };
    check_tensors(negative, NoEffect, "4 modules");
}

#[test]
fn one_module_with_effect_is_enough() {
    let mut files = Files::of_case("plain-r8-qv");
    let mut tensors = tensors_of(&files.weights);
    tensors
        .iter_mut()
        .filter(|tensor| !tensor.0.contains("layers.1.self_attn.v_proj"))
        .for_each(|tensor| tensor.3.fill(0));
    files.weights = write(&tensors);
    files.verify(&base("base"), &open_policy()).unwrap();
}

#[test]
fn halves_are_scanned_too() {
    for (dtype, infinity) in [("F16", 0x7c00_u16), ("BF16", 0x7f80)] {
        let mut files = Files::of_case("plain-r8-qv");
        let mut tensors = tensors_of(&files.weights);
        for tensor in &mut tensors {
            (tensor.1, tensor.3) = (dtype, [0x00, 0x3c].repeat(tensor.3.len() / 4));
        }
        files.weights = write(&tensors);
        files.verify(&base("base"), &open_policy()).unwrap();
        tensors[3].3[10..12].copy_from_slice(&(infinity | 0x8001).to_le_bytes());
        files.weights = write(&tensors);
        let refusal = files.verify(&base("base"), &open_policy()).unwrap_err();
        assert_eq!(refusal.reason, Reason::Malformed);
        let header =
            lorafleet_artifact::Safetensors::parse(&files.weights, files.weights.len() as u64, &Default::default());
        let header = header.unwrap();
        let at = header.data_start + header.tensor(&tensors[3].0).unwrap().range.start + 10;
        assert!(refusal.message.ends_with(&format!(" at byte {at} of the file")), "{refusal}");
    }
}

#[test]
fn a_copy_of_each_of_the_bases_tensors_has_its_place() {
    let base = base("base");
    for name in base.tensor_names() {
        let shape = base.tensor_shape(&name).unwrap();
        let spellings = [name.clone(), name.replace(".weight", ".base_layer.weight")];
        for spelling in spellings {
            let mut files = Files::of_case("plain-r8-qv");
            let mut tensors = tensors_of(&files.weights);
            let bytes = floats(shape.iter().product::<u64>() as usize, 1.0);
            tensors.push((format!("base_model.model.{spelling}"), "F32", shape.clone(), bytes));
            files.weights = write(&tensors);
            let verified = files.verify(&base, &open_policy()).unwrap();
            assert_eq!(verified.fitted.base_copies[0].base_name, name);
        }
    }
}

#[test]
fn weight_tying_is_refused_only_where_it_matters() {
    let mut files = Files::of_case("lm-head-tied");
    files.config["ensure_weight_tying"] = true.into();
    let refusal = files.verify(&base("base-tied"), &open_policy()).unwrap_err();
    assert_eq!(refusal.reason, Reason::UnsupportedFeature);
    files.verify(&base("base"), &open_policy()).unwrap();
}

#[test]
fn metadata_may_name_the_base() {
    let digest = "sha256:".to_owned() + &"ab".repeat(32);
    let mut files = Files::of_case("plain-r8-qv");
    let tensors = tensors_of(&files.weights);
    let mut policy = lorafleet_artifact::Policy { identities: vec![digest.parse().unwrap()], ..Default::default() };
    let check =
        |files: &Files, policy: &_| files.verify(&base("base"), policy).map(drop).map_err(|refusal| refusal.reason);
    assert_eq!(check(&files, &policy), Err(Reason::BaseUnknown));
    files.weights = write_with(&tensors, json!({"lorafleet.base_digest": digest}));
    assert_eq!(check(&files, &policy), Ok(()));
    policy.identities = vec![lorafleet_artifact::Digest::from_bytes([1; 32])];
    assert_eq!(check(&files, &policy), Err(Reason::BaseMismatch));
    files.weights = write_with(&tensors, json!({"lorafleet.base_digest": "abc"}));
    assert_eq!(check(&files, &policy), Err(Reason::Malformed));
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
