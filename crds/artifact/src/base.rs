//! The shape of a base model: which linear modules it has and how large they are.

mod files;
mod gguf;
mod hugging_face;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use files::{BaseFormat, base_files};
pub use hugging_face::HuggingFaceConfig;

/// Model families that are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    Llama,
}

/// A linear module that an adapter may change, in the order of a layer's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ModuleKind {
    #[serde(rename = "q_proj")]
    Q,
    #[serde(rename = "k_proj")]
    K,
    #[serde(rename = "v_proj")]
    V,
    #[serde(rename = "o_proj")]
    O,
    #[serde(rename = "gate_proj")]
    Gate,
    #[serde(rename = "up_proj")]
    Up,
    #[serde(rename = "down_proj")]
    Down,
    #[serde(rename = "lm_head")]
    LmHead,
}

impl ModuleKind {
    /// Those of every layer.
    pub const LAYER: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];
    pub const ALL: [Self; 8] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down, Self::LmHead];

    /// As PEFT's `target_modules` and `allowedTargetModules` name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
            Self::LmHead => "lm_head",
        }
    }

    /// Its path in the layer.
    const fn path(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
            Self::LmHead => "lm_head",
        }
    }
}

impl fmt::Display for ModuleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One linear module of one model. Ordered by layer, then kind; the head comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleId {
    /// `None` for the head.
    pub layer: Option<u32>,
    pub kind: ModuleKind,
}

impl ModuleId {
    pub const fn head() -> Self {
        Self { layer: None, kind: ModuleKind::LmHead }
    }

    pub const fn in_layer(layer: u32, kind: ModuleKind) -> Self {
        Self { layer: Some(layer), kind }
    }

    fn order(self) -> (u32, ModuleKind) {
        (self.layer.unwrap_or(u32::MAX), self.kind)
    }
}

impl PartialOrd for ModuleId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ModuleId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

/// Its name in `named_modules()` of the Hugging Face model.
impl fmt::Display for ModuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            None => f.write_str(self.kind.path()),
            Some(layer) => write!(f, "model.layers.{layer}.{}", self.kind.path()),
        }
    }
}

/// What fits this base, whatever it is quantised to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BaseShape {
    pub architecture: Architecture,
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub ffn: u32,
    pub vocab: u32,
    /// The head's weight is the embedding's.
    pub tied: bool,
    /// Weights of the whole model; a tied head counts once.
    pub parameters: u64,
}

/// Input and output width of a linear module: A is `[rank, input]`, B is `[output, rank]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    pub input: u32,
    pub output: u32,
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.input, self.output)
    }
}

impl BaseShape {
    pub fn width(&self, kind: ModuleKind) -> Width {
        let (hidden, ffn) = (self.hidden, self.ffn);
        let query = self.heads.saturating_mul(self.head_dim);
        let key = self.kv_heads.saturating_mul(self.head_dim);
        let (input, output) = match kind {
            ModuleKind::Q => (hidden, query),
            ModuleKind::K | ModuleKind::V => (hidden, key),
            ModuleKind::O => (query, hidden),
            ModuleKind::Gate | ModuleKind::Up => (hidden, ffn),
            ModuleKind::Down => (ffn, hidden),
            ModuleKind::LmHead => (hidden, self.vocab),
        };
        Width { input, output }
    }

    /// Every linear module, layers first.
    pub fn modules(&self) -> impl Iterator<Item = ModuleId> {
        let in_layers = (0..self.layers)
            .flat_map(|layer| ModuleKind::LAYER.into_iter().map(move |kind| ModuleId::in_layer(layer, kind)));
        in_layers.chain([ModuleId::head()])
    }

    /// Shape of the base's own tensor of this Hugging Face name (`model.norm.weight`), the head of a tied base
    /// included; `None` if the model has no such tensor.
    pub fn tensor_shape(&self, name: &str) -> Option<Vec<u64>> {
        let module = name.strip_suffix(".weight")?;
        let hidden = u64::from(self.hidden);
        match module {
            "model.embed_tokens" => return Some(vec![self.vocab.into(), hidden]),
            "model.norm" => return Some(vec![hidden]),
            _ => {}
        }
        if let Some(found) = self.module(module) {
            let Width { input, output } = self.width(found.kind);
            return Some(vec![output.into(), input.into()]);
        }
        let (layer, path) = layer_and_path(module)?;
        let norm = matches!(path, "input_layernorm" | "post_attention_layernorm");
        (norm && layer < self.layers).then(|| vec![hidden])
    }

    /// The linear module of this name; `None` if the model does not have it.
    pub fn module(&self, name: &str) -> Option<ModuleId> {
        if name == ModuleKind::LmHead.path() {
            return Some(ModuleId::head());
        }
        let (layer, path) = layer_and_path(name)?;
        let kind = ModuleKind::LAYER.into_iter().find(|kind| kind.path() == path)?;
        (layer < self.layers).then(|| ModuleId::in_layer(layer, kind))
    }

    /// Names of the base's own tensors as a Hugging Face checkpoint stores them, without the head of a tied base.
    pub fn tensor_names(&self) -> impl Iterator<Item = String> {
        let norms = (0..self.layers).flat_map(|layer| {
            ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("model.layers.{layer}.{norm}.weight"))
        });
        let linear = self.modules().filter(|module| !(self.tied && module.kind == ModuleKind::LmHead));
        let linear = linear.map(|module| format!("{module}.weight"));
        ["model.embed_tokens.weight", "model.norm.weight"].map(str::to_owned).into_iter().chain(norms).chain(linear)
    }

    /// Fills `parameters` from the other fields.
    fn counted(mut self) -> Self {
        let elements = |name: String| self.tensor_shape(&name).map_or(0, |shape| shape.iter().product::<u64>());
        self.parameters = self.tensor_names().map(elements).fold(0, u64::saturating_add);
        self
    }
}

/// `model.layers.12.mlp.up_proj` -> (12, `mlp.up_proj`). The number has one spelling: no sign, no leading zero.
fn layer_and_path(name: &str) -> Option<(u32, &str)> {
    let (number, path) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u32 = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, path))
}
