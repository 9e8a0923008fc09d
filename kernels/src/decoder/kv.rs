//! Where keys and values lie in a page. `cuda/kv.cuh` says the same to the kernels.
//!
//! For each layer first all keys, then all values; for each head the page's tokens, one row of `head_dim` elements after
//! the other. A page holds `page_tokens` tokens of one sequence, all layers.

use crate::launch::DevicePtr;
use crate::plain::plain;

plain! {
    /// The KV side of the page pool, as a kernel of one layer sees it.
    pub struct Kv {
        pub base: DevicePtr,
        /// u32: page lists of all sequences.
        pub pages: DevicePtr,
        pub page_bytes: u64,
        pub page_tokens: u32,
        pub heads: u32,
        pub head_dim: u32,
        pub layer: u32,
    }
}

plain! {
    /// A row of the batch: its place in its sequence.
    pub struct Row {
        /// Below zero: padding, passed over.
        pub position: i32,
        /// Where the sequence's page list starts.
        pub list: u32,
    }
}

/// Bytes of the pool from `base` to the row of one token. `value`: its value, else its key. 16-bit elements.
pub fn row_offset(kv: &Kv, page: u32, value: bool, head: u32, token: u32) -> u64 {
    let row = (u64::from(kv.layer * 2 + u32::from(value)) * u64::from(kv.heads) + u64::from(head))
        * u64::from(kv.page_tokens)
        + u64::from(token);
    u64::from(page) * kv.page_bytes + row * u64::from(kv.head_dim) * 2
}

/// What a page of `page_tokens` takes.
pub fn page_bytes(layers: u32, heads: u32, head_dim: u32, page_tokens: u32) -> u64 {
    u64::from(layers) * 2 * u64::from(heads) * u64::from(head_dim) * u64::from(page_tokens) * 2
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rows_fill_the_page() {
        let bytes = page_bytes(3, 2, 8, 4);
        let mut seen = HashSet::new();
        for layer in 0..3 {
            let kv = Kv { page_bytes: bytes, page_tokens: 4, heads: 2, head_dim: 8, layer, ..Kv::default() };
            for (value, head, token) in (0..16).map(|i| (i & 1 == 1, i >> 1 & 1, i >> 2)) {
                let at = row_offset(&kv, 5, value, head, token);
                assert!((5 * bytes..6 * bytes).contains(&at) && at.is_multiple_of(16) && seen.insert(at));
            }
        }
        assert_eq!(seen.len() as u64 * 16, bytes);
    }
}
