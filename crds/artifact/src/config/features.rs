//! What a configuration asks for beyond plain LoRA, and whether that may be ignored.

use serde_json::Value;

use super::field::{Fields, wrong};
use crate::reason::{Refusal, excerpt};

/// Read elsewhere, or without influence on what the trained weights compute.
const READ_OR_INERT: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_class",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_dtype",
    "lora_ga_config",
    "lorap_emb_lr",
    "lorap_lr_ratio",
    "megatron_core",
    "parent_library",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Features by the key that turns them on, with what they would change.
const NOT_SERVED: &[(&str, &str)] = &[
    ("use_dora", "DoRA rescales every output by a learnt magnitude"),
    ("use_qalora", "QALoRA pools the input by groups"),
    ("lora_bias", "a bias is added to every B"),
    ("modules_to_save", "whole modules of the base are replaced"),
    ("trainable_token_indices", "rows of the embedding are replaced"),
    ("layer_replication", "layers of the base are repeated"),
    ("target_parameters", "parameters outside of linear modules are changed"),
    ("alora_invocation_tokens", "activated LoRA acts only behind its invocation tokens"),
    ("use_bdlora", "block-diagonal LoRA has other shapes"),
    ("arrow_config", "Arrow routes each token between adapters"),
    ("kasa_config", "KaSA scales by learnt singular values and changes the base"),
    ("monteclora_config", "MonteCLoRA samples its weights"),
    ("megatron_config", "Megatron's parallel modules are not modules of this base"),
    ("enable_lora", "merged projections are not modules of this base"),
];

/// Initialisations that leave the base changed: such an adapter only makes sense on that changed base.
const CHANGES_BASE: &[&str] = &["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Initialisations of A and B alone, which training has overwritten.
const LEAVES_BASE: &[&str] = &["", "gaussian", "eva", "orthogonal", "mica"];

pub(super) fn check(fields: &Fields<'_>) -> Result<(), Refusal> {
    match fields.text("peft_type")? {
        Some("LORA") => {}
        Some(other) => {
            let other = excerpt(other, 80);
            return Err(Refusal::unsupported(format!("peft_type is '{other}', supported is 'LORA'")));
        }
        None => return Err(Refusal::malformed("adapter_config.json has no 'peft_type'")),
    }
    if let Some(task) = fields.text("task_type")?
        && task != "CAUSAL_LM"
    {
        let task = excerpt(task, 80);
        return Err(Refusal::unsupported(format!("task_type is '{task}', supported is 'CAUSAL_LM'")));
    }
    for (key, what) in NOT_SERVED {
        if let Some(value) = fields.set(key).filter(|value| is_on(value)) {
            return Err(unsupported(key, value, what));
        }
    }
    // It says which biases were trained along, if the base has any. A file that holds one is refused by its key.
    if let Some(value) = fields.set("bias")
        && !matches!(fields.text("bias")?, Some("none" | "all" | "lora_only"))
    {
        return Err(unsupported("bias", value, "known are none, all and lora_only"));
    }
    // About layers that store their weights transposed. PEFT itself sets it back for linear ones, and there are no others.
    fields.flag("fan_in_fan_out")?;
    initialisation(fields)?;
    fields.0.0.iter().try_for_each(|(key, value)| unknown(fields, key, value))
}

fn unsupported(key: &str, value: &Value, what: &str) -> Refusal {
    let value = excerpt(&value.to_string(), 120);
    Refusal::unsupported(format!("{key} = {value} is not supported: {what}"))
}

/// Set to anything but a spelling of "off".
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => true,
    }
}

fn initialisation(fields: &Fields<'_>) -> Result<(), Refusal> {
    let value = match fields.set("init_lora_weights") {
        None | Some(Value::Bool(_)) => return Ok(()),
        Some(value) => value,
    };
    let name = value.as_str().ok_or_else(|| wrong("init_lora_weights", value, "text, true or false"))?;
    let name = name.to_lowercase();
    if CHANGES_BASE.iter().any(|changing| name.starts_with(changing)) {
        return Err(unsupported(
            "init_lora_weights",
            value,
            "it changes the base before training; save the adapter with path_initial_model_for_weight_conversion",
        ));
    }
    if !LEAVES_BASE.contains(&name.as_str()) {
        return Err(unsupported(
            "init_lora_weights",
            value,
            "it is not known here and may change the base before training",
        ));
    }
    Ok(())
}

fn unknown(fields: &Fields<'_>, key: &str, value: &Value) -> Result<(), Refusal> {
    let known = READ_OR_INERT.contains(&key) || NOT_SERVED.iter().any(|(feature, _)| *feature == key);
    // VeLoRA compresses what the backward pass remembers; the forward pass is plain LoRA.
    if known || key == "velora_config" || !is_on(value) || tunes_what_is_off(fields, key, value) {
        return Ok(());
    }
    Err(unsupported(
        &excerpt(key, 200),
        value,
        "the key is not known here and may change what the adapter computes; if it stands at its default, take it out",
    ))
}

/// A number or text that belongs to a feature whose own switch stands in the file and is off, as `qalora_group_size`
/// belongs to `use_qalora`.
fn tunes_what_is_off(fields: &Fields<'_>, key: &str, value: &Value) -> bool {
    if !matches!(value, Value::Number(_) | Value::String(_)) {
        return false;
    }
    fields.0.0.iter().any(|(switch, state)| {
        let feature = switch.strip_prefix("use_").or_else(|| switch.strip_suffix("_config"));
        let belongs = feature.and_then(|feature| key.strip_prefix(feature)).is_some_and(|rest| rest.starts_with('_'));
        belongs && !is_on(state)
    })
}
