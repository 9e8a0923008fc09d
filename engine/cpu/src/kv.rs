//! Keys and values in pages.
//!
//! A page holds groups of sixteen tokens; a group holds, for each layer and KV head, the keys as `[head_dim][16]` (a
//! vector of sixteen tokens for each dimension) and then the values as `[16][head_dim]`, all f32.

use lorafleet_artifact::FloatType;
use lorafleet_backend::batch::PageBudget;
use lorafleet_backend::layout::row_stride;
use lorafleet_backend::model::Shape;

use super::kernels::simd::LANES;

/// Where a token's key and value lie, in floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub head_dim: usize,
    pub kv_heads: usize,
    pub group_floats: usize,
    pub groups_per_page: usize,
    pub page_floats: usize,
}

impl KvLayout {
    pub fn of(shape: &Shape, budget: PageBudget) -> Self {
        Self {
            head_dim: shape.head_dim,
            kv_heads: shape.kv_heads,
            group_floats: group_floats(shape),
            groups_per_page: budget.page_tokens as usize / LANES,
            page_floats: (budget.page_bytes / 4) as usize,
        }
    }

    /// Floats of the keys of a head in a group; its values follow.
    pub fn keys(&self) -> usize {
        self.head_dim * LANES
    }

    /// From the start of a group to a layer's and head's keys.
    pub fn head_offset(&self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * 2 * self.keys()
    }

    /// Index into the page table, and floats from the page's start, of the group that holds a position.
    pub fn group_of(&self, position: usize) -> (usize, usize) {
        let group = position / LANES;
        (group / self.groups_per_page, group % self.groups_per_page * self.group_floats)
    }
}

fn group_floats(shape: &Shape) -> usize {
    shape.layers * shape.kv_heads * 2 * shape.head_dim * LANES
}

/// Page size and count for a budget in bytes: a page is as large as sixteen tokens of KV or the largest adapter row in
/// f32, whichever is larger, and holds as many groups of sixteen tokens as fit.
///
/// # Errors
/// If not even two pages fit: the message names both values.
pub fn page_budget(shape: &Shape, bytes: u64) -> Result<PageBudget, String> {
    let group_bytes = 4 * group_floats(shape) as u64;
    let widest = [shape.hidden, shape.query_width(), shape.ffn, shape.vocabulary].into_iter().max().unwrap_or(0);
    let widest = u32::try_from(widest).map_err(|_| format!("a row of {widest} is too wide"))?;
    let page_bytes = group_bytes.max(row_stride(FloatType::F32, widest)).next_multiple_of(64);
    let page_tokens = u32::try_from(page_bytes / group_bytes * LANES as u64).unwrap_or(u32::MAX);
    let pages = u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX);
    if pages < 2 {
        return Err(format!("a page budget of {bytes} bytes holds no two pages of {page_bytes} bytes"));
    }
    Ok(PageBudget { page_bytes, pages, page_tokens })
}
