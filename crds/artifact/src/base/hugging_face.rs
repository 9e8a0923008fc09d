//! A base as a Hugging Face folder: `config.json` and the headers of its safetensors files.

use serde::Deserialize;

use super::{Architecture, BaseShape};
use crate::reason::{Reason, Refusal, excerpt};
use crate::safetensors::Safetensors;

/// The fields of `config.json` that decide shapes. Others are the engine's matter.
#[derive(Clone, Debug, Deserialize)]
pub struct HuggingFaceConfig {
    #[serde(default)]
    pub architectures: Option<Vec<String>>,
    #[serde(default)]
    pub model_type: Option<String>,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u32,
    #[serde(default)]
    pub num_key_value_heads: Option<u32>,
    #[serde(default)]
    pub head_dim: Option<u32>,
    pub vocab_size: u32,
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

impl HuggingFaceConfig {
    /// # Errors
    /// Malformed if it is no JSON object with the shapes of a language model.
    pub fn parse(json: &[u8]) -> Result<Self, Refusal> {
        serde_json::from_slice(json)
            .map_err(|error| Refusal::malformed(format!("config.json is not a model configuration: {error}")))
    }
}

impl BaseShape {
    /// The shape that `config.json` promises.
    ///
    /// # Errors
    /// UnsupportedFeature for another architecture, Malformed for numbers that make no model.
    pub fn from_config(config: &HuggingFaceConfig) -> Result<Self, Refusal> {
        let architecture = config.architectures.iter().flatten().next().map(String::as_str);
        let model_type = config.model_type.as_deref();
        if architecture.is_some_and(|name| name != "LlamaForCausalLM") || model_type.is_some_and(|name| name != "llama")
        {
            let shown = excerpt(architecture.or(model_type).unwrap_or_default(), 80);
            return Err(Refusal::unsupported(format!(
                "the base's architecture is '{shown}', supported is LlamaForCausalLM"
            )));
        }
        let heads = config.num_attention_heads;
        let shape = Self {
            architecture: Architecture::Llama,
            layers: config.num_hidden_layers,
            hidden: config.hidden_size,
            heads,
            kv_heads: config.num_key_value_heads.unwrap_or(heads),
            head_dim: config.head_dim.unwrap_or_else(|| config.hidden_size.checked_div(heads).unwrap_or(0)),
            ffn: config.intermediate_size,
            vocab: config.vocab_size,
            tied: config.tie_word_embeddings,
            parameters: 0,
        };
        shape.checked("config.json")
    }

    /// Checks that the checkpoint holds every tensor that the shape promises, as `config.json` says it. A tensor that
    /// is stored packed by a quantiser has another name and shape and is the engine's matter: such a folder is refused
    /// here.
    ///
    /// # Errors
    /// Malformed for a missing tensor, ShapeMismatch for another shape.
    pub fn check_tensors<'a>(&self, files: impl IntoIterator<Item = &'a Safetensors>) -> Result<(), Refusal> {
        let stored: std::collections::BTreeMap<&str, &[u64]> = files
            .into_iter()
            .flat_map(|file| file.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())))
            .collect();
        for name in self.tensor_names() {
            let expected = self.tensor_shape(&name).unwrap_or_default();
            match stored.get(name.as_str()) {
                None => return Err(Refusal::malformed(format!("the base has no tensor '{name}'"))),
                Some(shape) if *shape != expected => {
                    return Err(Refusal::new(
                        Reason::ShapeMismatch,
                        format!("the base's tensor '{name}' has shape {shape:?}, config.json says {expected:?}"),
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Bounds that keep every product of sizes inside 64 bits, and sizes that make a model.
    pub(super) fn checked(self, source: &str) -> Result<Self, Refusal> {
        let bounds = [
            ("layers", self.layers, 4096),
            ("hidden size", self.hidden, 1 << 20),
            ("attention heads", self.heads, 1 << 14),
            ("key/value heads", self.kv_heads, 1 << 14),
            ("head dimension", self.head_dim, 1 << 14),
            ("feed-forward size", self.ffn, 1 << 22),
            ("vocabulary", self.vocab, 1 << 24),
        ];
        for (what, value, limit) in bounds {
            if value == 0 || value > limit {
                return Err(Refusal::malformed(format!("{source} gives {value} as {what}, expected 1 to {limit}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            return Err(Refusal::malformed(format!(
                "{source} gives {heads} attention heads, which is no multiple of {kv_heads} key/value heads"
            )));
        }
        Ok(self.counted())
    }
}
