//! What an adapter is, as far as it says so itself: for people who have no base at hand.

use std::collections::{BTreeMap, BTreeSet};

use crate::safetensors::Safetensors;

/// Counted from the names and shapes of a header. Nothing in it was checked against a base.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// Modules with a `lora_A`.
    pub modules: u32,
    /// Ranks by the last segment of the modules' names.
    pub ranks: BTreeMap<String, BTreeSet<u64>>,
    /// Elements of all A and B.
    pub elements: u64,
    /// Tensors that are neither A nor B.
    pub others: u32,
    /// Element types of all tensors.
    pub types: BTreeSet<&'static str>,
}

impl Outline {
    pub fn of(header: &Safetensors) -> Self {
        let mut outline = Self::default();
        for tensor in &header.tensors {
            outline.types.insert(tensor.dtype.as_str());
            let elements = tensor.shape.iter().product::<u64>();
            if let Some(module) = tensor.name.strip_suffix(".lora_A.weight") {
                let kind = module.rsplit('.').next().unwrap_or(module).to_owned();
                outline.ranks.entry(kind).or_default().extend(tensor.shape.first());
                outline.modules += 1;
                outline.elements += elements;
            } else if tensor.name.ends_with(".lora_B.weight") {
                outline.elements += elements;
            } else {
                outline.others += 1;
            }
        }
        outline
    }

    pub fn rank_max(&self) -> u64 {
        self.ranks.values().flatten().copied().max().unwrap_or(0)
    }
}
