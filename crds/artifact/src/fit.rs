//! Whether and how an adapter fits a base, from its configuration and the header of its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::base::{BaseShape, ModuleId, ModuleKind, Width};
use crate::config::AdapterConfig;
use crate::reason::{Reason, Refusal, excerpt};
use crate::safetensors::{Dtype, Safetensors, StoredTensor};

/// What PEFT puts before every name of the model.
const PREFIX: &str = "base_model.model.";

/// An adapter that fits: every tensor of the file has its place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fitted {
    /// Sorted by layer and kind, the head last; each once. `fit` gives at least one.
    pub modules: Vec<FittedModule>,
    /// Copies of the base's own tensors that the file carries. A header cannot tell whether they are unchanged: who
    /// serves the adapter compares them with the base and refuses it if one differs. They are never applied.
    pub base_copies: Vec<BaseCopy>,
}

/// The change of one linear module: y += scale * B (A x).
#[derive(Clone, Debug, PartialEq)]
pub struct FittedModule {
    pub module: ModuleId,
    pub rank: u32,
    /// alpha / rank, or alpha / sqrt(rank) if rank-stabilised: PEFT's `scaling`, in the precision in which it is applied.
    /// Finite.
    pub scale: f32,
    /// `[rank, input]`, rows contiguous.
    pub a: TensorRef,
    /// `[output, rank]`, rows contiguous.
    pub b: TensorRef,
}

/// A tensor in the data section of the adapter's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRef {
    /// As it stands in the file.
    pub name: String,
    /// As it is applied.
    pub dtype: FloatType,
    /// It is stored as F64: see [`Fitted::round_doubles`].
    pub double: bool,
    pub rows: u32,
    pub columns: u32,
    /// In the data section.
    pub range: Range<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseCopy {
    /// As it stands in the file.
    pub name: String,
    /// The base's Hugging Face name for it: `model.embed_tokens.weight`.
    pub base_name: String,
    pub dtype: FloatType,
    /// It is stored as F64: see [`Fitted::round_doubles`].
    pub double: bool,
    pub shape: Vec<u64>,
    /// In the data section.
    pub range: Range<u64>,
}

/// Element types that adapters are applied in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatType {
    F32,
    F16,
    Bf16,
}

impl FloatType {
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

impl Fitted {
    /// Rounds what is stored as F64 to F32 in place, as PEFT does when it copies the file's tensors into its own. `data` is the
    /// data section that was verified. Afterwards nothing is stored as F64, and half of the room of what was lies idle.
    pub fn round_doubles(&mut self, data: &mut [u8]) {
        let pairs = self.modules.iter_mut().flat_map(|module| [&mut module.a, &mut module.b]);
        let pairs = pairs.map(|tensor| (&mut tensor.double, &mut tensor.range));
        let copies = self.base_copies.iter_mut().map(|copy| (&mut copy.double, &mut copy.range));
        for (double, range) in pairs.chain(copies) {
            let place = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
            let stored = place.and_then(|(start, end)| data.get_mut(start..end));
            if let (true, Some(stored)) = (*double, stored) {
                round(stored);
                (*double, range.end) = (false, range.start + (range.end - range.start) / 2);
            }
        }
    }

    /// Largest rank of a module.
    pub fn rank_max(&self) -> u32 {
        self.modules.iter().map(|module| module.rank).max().unwrap_or(0)
    }

    /// Kinds of modules that the adapter changes in some layer, with the largest rank of each.
    pub fn kinds(&self) -> BTreeMap<ModuleKind, u32> {
        let mut kinds = BTreeMap::new();
        for module in &self.modules {
            let rank = kinds.entry(module.module.kind).or_insert(0);
            *rank = module.rank.max(*rank);
        }
        kinds
    }
}

/// Puts the F32 of each F64 into the first half of the bytes.
fn round(stored: &mut [u8]) {
    for at in 0..stored.len() / size_of::<f64>() {
        let double = stored.get(at * size_of::<f64>()..).and_then(|rest| rest.first_chunk()).copied();
        let place = stored.get_mut(at * size_of::<f32>()..).and_then(|rest| rest.first_chunk_mut());
        if let (Some(double), Some(place)) = (double, place) {
            *place = (f64::from_le_bytes(double) as f32).to_le_bytes();
        }
    }
}

/// Gives every tensor of the file its place, or says why not.
///
/// In this order: keys that the base does not know, pairs that are not whole, modules that configuration and tensors do
/// not agree on, element types and shapes.
///
/// # Errors
/// ModuleUnknown, UnsupportedFeature, Malformed or ShapeMismatch; the message names the tensor and both values.
pub fn fit(config: &AdapterConfig, header: &Safetensors, base: &BaseShape) -> Result<Fitted, Refusal> {
    let sorted = sort_keys(header, base)?;
    let targeted = targeted(config, base, &sorted)?;
    agree(config, &sorted, &targeted)?;
    let mut modules = Vec::new();
    for (module, pair) in &sorted.pairs {
        modules.push(pair.fit(config, *module, base.width(module.kind))?);
    }
    let base_copies = sorted.copies.iter().map(|copy| copy.fit(base)).collect::<Result<_, _>>()?;
    Ok(Fitted { modules, base_copies })
}

/// The file's tensors by what they are.
#[derive(Default)]
struct Sorted<'a> {
    pairs: BTreeMap<ModuleId, Pair<'a>>,
    copies: Vec<Copy<'a>>,
}

#[derive(Default)]
struct Pair<'a> {
    a: Option<&'a StoredTensor>,
    b: Option<&'a StoredTensor>,
}

struct Copy<'a> {
    tensor: &'a StoredTensor,
    base_name: String,
}

fn sort_keys<'a>(header: &'a Safetensors, base: &BaseShape) -> Result<Sorted<'a>, Refusal> {
    let mut sorted = Sorted::default();
    let mut unsupported = None;
    let mut copied = BTreeSet::new();
    for tensor in &header.tensors {
        match place(&tensor.name, base)? {
            Place::A(module) => sorted.pairs.entry(module).or_default().a = Some(tensor),
            Place::B(module) => sorted.pairs.entry(module).or_default().b = Some(tensor),
            Place::Copy(base_name) => {
                if !copied.insert(base_name.clone()) {
                    let name = excerpt(&tensor.name, 200);
                    return Err(Refusal::malformed(format!("tensor '{name}' is a second copy of '{base_name}'")));
                }
                sorted.copies.push(Copy { tensor, base_name });
            }
            Place::NotServed(what) => {
                let name = excerpt(&tensor.name, 200);
                let refusal = Refusal::unsupported(format!("tensor '{name}' is not supported: {what}"));
                unsupported.get_or_insert(refusal);
            }
        }
    }
    if let Some(refusal) = unsupported {
        return Err(refusal);
    }
    if sorted.pairs.is_empty() {
        let count = header.tensors.len();
        return Err(Refusal::new(
            Reason::ModuleUnknown,
            format!("none of the {count} tensors in the file is a lora_A or lora_B of a module of the base"),
        ));
    }
    Ok(sorted)
}

/// What a key of the file names.
enum Place {
    A(ModuleId),
    B(ModuleId),
    /// A tensor of the base, under its name there.
    Copy(String),
    /// Understood, with the reason why it is not served.
    NotServed(&'static str),
}

fn place(key: &str, base: &BaseShape) -> Result<Place, Refusal> {
    let shown = excerpt(key, 200);
    let unknown = |what: String| Refusal::new(Reason::ModuleUnknown, format!("tensor '{shown}' names {what}"));
    let Some(name) = key.strip_prefix(PREFIX) else {
        return Err(unknown(format!("no module: PEFT's keys start with '{PREFIX}'")));
    };
    let (module, part) = split_key(name);
    let known = base.module(module);
    let no_module = || {
        let layers = base.layers;
        unknown(format!("the module '{}', which the base ({layers} layers) does not have", excerpt(module, 200)))
    };
    match part {
        Part::A => known.map(Place::A).ok_or_else(no_module),
        Part::B => known.map(Place::B).ok_or_else(no_module),
        Part::NotServed(what) => {
            let exists = known.is_some() || base.tensor_shape(&format!("{module}.weight")).is_some();
            exists.then_some(Place::NotServed(what)).ok_or_else(no_module)
        }
        Part::Weight => {
            let name = format!("{module}.weight");
            base.tensor_shape(&name).map(|_| Place::Copy(name)).ok_or_else(no_module)
        }
        Part::Unknown => Err(unknown("nothing that the base or PEFT's LoRA has".to_owned())),
    }
}

enum Part {
    A,
    B,
    Weight,
    NotServed(&'static str),
    Unknown,
}

/// Module name and what of it the key holds.
fn split_key(name: &str) -> (&str, Part) {
    const PARTS: [(&str, Part); 12] = [
        (".lora_A.weight", Part::A),
        (".lora_B.weight", Part::B),
        (".lora_B.bias", Part::NotServed("a bias of B")),
        (".lora_A.bias", Part::NotServed("a bias of A")),
        (".lora_magnitude_vector.weight", Part::NotServed("a DoRA magnitude")),
        (".lora_magnitude_vector", Part::NotServed("a DoRA magnitude")),
        (".lora_embedding_A", Part::NotServed("LoRA on an embedding")),
        (".lora_embedding_B", Part::NotServed("LoRA on an embedding")),
        (".base_layer.bias", Part::NotServed("a bias of the base")),
        (".base_layer.weight", Part::Weight),
        (".weight", Part::Weight),
        (".bias", Part::NotServed("a bias of the base")),
    ];
    for (suffix, part) in PARTS {
        if let Some(module) = name.strip_suffix(suffix) {
            return (module, part);
        }
    }
    (name, Part::Unknown)
}

/// Modules of the base that the configuration means.
fn targeted(config: &AdapterConfig, base: &BaseShape, sorted: &Sorted<'_>) -> Result<BTreeSet<ModuleId>, Refusal> {
    if config.targets.contain("model.embed_tokens", false)? && !config.targets.is_all_linear() {
        return Err(Refusal::unsupported("target_modules holds 'embed_tokens': LoRA on an embedding is not supported"));
    }
    let mut targeted = BTreeSet::new();
    for module in base.modules() {
        if config.targets.contain(&module.to_string(), module.kind == ModuleKind::LmHead)? {
            targeted.insert(module);
        }
    }
    if targeted.is_empty() {
        let written = config.targets.as_written();
        return Err(Refusal::new(
            Reason::ModuleUnknown,
            format!("target_modules {written} matches no module of the base"),
        ));
    }
    let head = ModuleId::head();
    if config.weight_tying && base.tied && (targeted.contains(&head) || sorted.pairs.contains_key(&head)) {
        return Err(Refusal::unsupported(
            "ensure_weight_tying = true with an adapted lm_head is not supported: it would change the tied embedding too",
        ));
    }
    Ok(targeted)
}

/// Every targeted module has a whole pair, and no other module has one.
fn agree(config: &AdapterConfig, sorted: &Sorted<'_>, targeted: &BTreeSet<ModuleId>) -> Result<(), Refusal> {
    for (module, pair) in &sorted.pairs {
        let lonely = match (pair.a, pair.b) {
            (Some(a), None) => Some((a, "lora_B")),
            (None, Some(b)) => Some((b, "lora_A")),
            _ => None,
        };
        if let Some((tensor, absent)) = lonely {
            let name = excerpt(&tensor.name, 200);
            return Err(Refusal::malformed(format!(
                "tensor '{name}' has no partner: '{module}.{absent}.weight' is missing"
            )));
        }
        if !targeted.contains(module) {
            let written = config.targets.as_written();
            return Err(Refusal::malformed(format!(
                "the file holds tensors of '{module}', which target_modules {written} of the configuration does not target"
            )));
        }
    }
    match targeted.iter().find(|module| !sorted.pairs.contains_key(module)) {
        None => Ok(()),
        Some(module) => {
            let written = config.targets.as_written();
            let (have, want) = (sorted.pairs.len(), targeted.len());
            Err(Refusal::malformed(format!(
                "target_modules {written} targets '{module}', of which the file holds no tensors ({have} of {want} targeted modules are there)"
            )))
        }
    }
}

impl Pair<'_> {
    fn fit(&self, config: &AdapterConfig, module: ModuleId, width: Width) -> Result<FittedModule, Refusal> {
        let (Some(a), Some(b)) = (self.a, self.b) else {
            return Err(Refusal::malformed(format!("'{module}' has no whole pair of tensors")));
        };
        let name = module.to_string();
        let rank = config.rank_of(&name)?;
        let says = format!("the configuration gives '{name}' rank {rank}, the base's module is {width}");
        Ok(FittedModule {
            module,
            rank,
            scale: config.scale_of(&name, rank)?,
            a: matrix(a, rank, width.input, &says)?,
            b: matrix(b, width.output, rank, &says)?,
        })
    }
}

fn matrix(tensor: &StoredTensor, rows: u32, columns: u32, says: &str) -> Result<TensorRef, Refusal> {
    let (dtype, double) = float(tensor)?;
    if tensor.shape != [u64::from(rows), u64::from(columns)] {
        let (name, shape) = (excerpt(&tensor.name, 200), &tensor.shape);
        return Err(Refusal::new(
            Reason::ShapeMismatch,
            format!("tensor '{name}' has shape {shape:?}, expected [{rows}, {columns}]: {says}"),
        ));
    }
    Ok(TensorRef { name: tensor.name.clone(), dtype, double, rows, columns, range: tensor.range.clone() })
}

impl Copy<'_> {
    fn fit(&self, base: &BaseShape) -> Result<BaseCopy, Refusal> {
        let Self { tensor, base_name } = self;
        let (dtype, double) = float(tensor)?;
        let expected = base.tensor_shape(base_name).unwrap_or_default();
        if tensor.shape != expected {
            let (name, shape) = (excerpt(&tensor.name, 200), &tensor.shape);
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!(
                    "tensor '{name}' is a copy of the base's '{base_name}' with shape {shape:?}, the base has {expected:?}"
                ),
            ));
        }
        Ok(BaseCopy {
            name: tensor.name.clone(),
            base_name: base_name.clone(),
            dtype,
            double,
            shape: expected,
            range: tensor.range.clone(),
        })
    }
}

/// The type in which a tensor is applied, and whether it is stored as F64.
fn float(tensor: &StoredTensor) -> Result<(FloatType, bool), Refusal> {
    match tensor.dtype {
        Dtype::F64 => Ok((FloatType::F32, true)),
        Dtype::F32 => Ok((FloatType::F32, false)),
        Dtype::F16 => Ok((FloatType::F16, false)),
        Dtype::Bf16 => Ok((FloatType::Bf16, false)),
        other => {
            let name = excerpt(&tensor.name, 200);
            Err(Refusal::unsupported(format!(
                "tensor '{name}' is stored as {other}, supported are F64, F32, F16 and BF16"
            )))
        }
    }
}
