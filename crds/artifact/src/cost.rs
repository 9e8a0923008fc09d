//! What adapters and sequences cost in memory.

use crate::base::{BaseShape, ModuleKind, Width};
use crate::fit::Fitted;

/// Bytes of one element where adapters and KV are computed with: 16-bit floats.
pub const HALF_BYTES: u64 = 2;

impl BaseShape {
    /// Bytes that one rank on every linear module of every layer costs: element bytes x layers x sum of (input +
    /// output). The head does not count, as in PEFT's `all-linear`.
    pub fn adapter_bytes_per_rank(&self, element_bytes: u64) -> u64 {
        let per_layer: u64 = ModuleKind::LAYER.iter().map(|kind| sides(self.width(*kind))).sum();
        element_bytes * u64::from(self.layers) * per_layer
    }

    /// Bytes of keys and values that one token leaves behind in all layers.
    pub fn kv_bytes_per_token(&self, element_bytes: u64) -> u64 {
        2 * element_bytes * u64::from(self.layers) * u64::from(self.kv_heads) * u64::from(self.head_dim)
    }
}

impl Fitted {
    /// Bytes of all A and B at the given element size: sum over modules of rank x (input + output).
    pub fn bytes(&self, element_bytes: u64) -> u64 {
        let elements = self
            .modules
            .iter()
            .map(|module| u64::from(module.rank) * (u64::from(module.a.columns) + u64::from(module.b.rows)));
        elements.sum::<u64>() * element_bytes
    }
}

fn sides(width: Width) -> u64 {
    u64::from(width.input) + u64::from(width.output)
}
