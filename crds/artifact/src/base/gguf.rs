//! A base as a GGUF file.

use super::{Architecture, BaseShape, ModuleId, ModuleKind};
use crate::gguf::Gguf;
use crate::reason::{Reason, Refusal, excerpt};

impl BaseShape {
    /// Reads the shape from the metadata and checks every tensor against it.
    ///
    /// # Errors
    /// UnsupportedFeature for another architecture, Malformed for a missing key or tensor, ShapeMismatch for a tensor
    /// of another shape than the metadata gives.
    pub fn from_gguf(header: &Gguf) -> Result<Self, Refusal> {
        let architecture = header.string("general.architecture");
        if architecture != Some("llama") {
            let shown = excerpt(architecture.unwrap_or_default(), 80);
            return Err(Refusal::unsupported(format!(
                "the base's general.architecture is '{shown}', supported is llama"
            )));
        }
        let number = |key: &str| {
            let key = format!("llama.{key}");
            header
                .u32(&key)
                .ok_or_else(|| Refusal::malformed(format!("the base has no integer '{key}' in its metadata")))
        };
        let embedding = header.tensor("token_embd.weight").map(|tensor| tensor.shape.as_slice());
        let Some([vocab, _]) = embedding else {
            return Err(Refusal::malformed("the base has no two-dimensional tensor 'token_embd.weight'"));
        };
        let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
        let shape = Self {
            architecture: Architecture::Llama,
            layers: number("block_count")?,
            hidden,
            heads,
            kv_heads: header.u32("llama.attention.head_count_kv").unwrap_or(heads),
            head_dim: header
                .u32("llama.attention.key_length")
                .unwrap_or_else(|| hidden.checked_div(heads).unwrap_or(0)),
            ffn: number("feed_forward_length")?,
            vocab: u32::try_from(*vocab).unwrap_or(u32::MAX),
            tied: header.tensor("output.weight").is_none(),
            parameters: 0,
        };
        let shape = shape.checked("the GGUF metadata")?;
        check_tensors(&shape, header)?;
        Ok(shape)
    }

    /// The name in a GGUF file of the tensor with this Hugging Face name. The head of a tied base is its embedding.
    pub fn gguf_name(&self, name: &str) -> Option<String> {
        let module = name.strip_suffix(".weight")?;
        match module {
            "model.embed_tokens" => return Some("token_embd.weight".to_owned()),
            "model.norm" => return Some("output_norm.weight".to_owned()),
            _ => {}
        }
        if let Some(ModuleId { layer, kind }) = self.module(module) {
            let part = match kind {
                ModuleKind::Q => "attn_q",
                ModuleKind::K => "attn_k",
                ModuleKind::V => "attn_v",
                ModuleKind::O => "attn_output",
                ModuleKind::Gate => "ffn_gate",
                ModuleKind::Up => "ffn_up",
                ModuleKind::Down => "ffn_down",
                ModuleKind::LmHead if self.tied => "token_embd",
                ModuleKind::LmHead => "output",
            };
            return Some(layer.map_or_else(|| format!("{part}.weight"), |layer| format!("blk.{layer}.{part}.weight")));
        }
        let (layer, path) = super::layer_and_path(module)?;
        let part = match path {
            "input_layernorm" => "attn_norm",
            "post_attention_layernorm" => "ffn_norm",
            _ => return None,
        };
        (layer < self.layers).then(|| format!("blk.{layer}.{part}.weight"))
    }
}

fn check_tensors(shape: &BaseShape, header: &Gguf) -> Result<(), Refusal> {
    let stored: std::collections::BTreeMap<&str, &[u64]> =
        header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    for name in shape.tensor_names() {
        let expected = shape.tensor_shape(&name).unwrap_or_default();
        let name = shape.gguf_name(&name).unwrap_or(name);
        match stored.get(name.as_str()) {
            None => return Err(Refusal::malformed(format!("the base has no tensor '{name}'"))),
            Some(found) if *found != expected => {
                return Err(Refusal::new(
                    Reason::ShapeMismatch,
                    format!("the base's tensor '{name}' has shape {found:?}, its metadata says {expected:?}"),
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}
