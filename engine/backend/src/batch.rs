//! What one step asks of a backend, as plain data. Ids, never pointers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::HostAdapter;

/// Index of a page in the one pool that holds both KV and adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// A device copy of an adapter. Never reused for other content within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResidentId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// One step: pages to write first, then rows to compute.
///
/// The backend does, in this order: forget `drops`, write `uploads`, run `segments`.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Strictly increasing.
    pub step: u64,
    pub drops: Vec<ResidentId>,
    pub uploads: Vec<Upload>,
    /// Segments of one adapter stand side by side; the base comes first.
    pub segments: Vec<Segment>,
}

impl Batch {
    /// Nothing to write and nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.drops.is_empty() && self.uploads.is_empty() && self.segments.is_empty()
    }
}

/// The last hop, host to device pages, whole or one piece of several steps. Only `Backend::submit` writes device memory.
///
/// The pieces of a resident follow each other without a gap and without another adapter's bytes: the first begins at 0,
/// and the one that ends at `pages.len()` makes it usable, for the segments of the same batch too. All its pages are its
/// own from the first piece on, and `drops` may name it after any of them.
#[derive(Clone, Debug)]
pub struct Upload {
    pub resident: ResidentId,
    /// Never mutated: scale and layout are applied to the copy.
    pub adapter: Arc<HostAdapter>,
    /// As many as `Layout::of(adapter, page_bytes).pages`, in that order. The same in each piece.
    pub pages: Vec<PageId>,
    /// What to write in this step, as indexes into `pages`. Not empty.
    pub part: Range<u32>,
}

/// Consecutive new tokens of one sequence: a prefill chunk, or one decode token.
#[derive(Clone, Debug)]
pub struct Segment {
    pub sequence: SequenceId,
    /// `None` is the base.
    pub adapter: Option<ResidentId>,
    /// At least one.
    pub tokens: Vec<u32>,
    /// Position of `tokens[0]` in the sequence.
    pub position: u32,
    /// The sequence's KV page table, long enough for `position + tokens.len()`.
    pub pages: Vec<PageId>,
    /// Given on the segment that ends the known tokens: sample one token from the last row.
    pub sample: Option<SampleSpec>,
}

/// How to draw one token. Everything that the draw depends on is here, so the same spec and logits give the same token.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// 0 is greedy; ties go to the lowest token id.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    pub seed: u64,
    /// Number of tokens this sequence has drawn: with `seed` it fixes the random number.
    pub draw: u64,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Occurrences of each token: in the prompt, and in the output. Empty where no penalty asks for them.
    pub seen: Arc<BTreeMap<u32, Seen>>,
    pub logit_bias: Arc<BTreeMap<u32, f32>>,
    /// Never drawn in this step (end tokens under `ignore_eos` stay drawable: PEFT's answers hold them).
    pub banned: Arc<[u32]>,
    /// How many alternatives to report beside the drawn token; `None` reports no log-probability at all.
    pub logprobs: Option<u8>,
}

impl SampleSpec {
    /// The most probable token, and nothing but it: what other specs are made from.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            draw: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seen: Arc::default(),
            logit_bias: Arc::default(),
            banned: Arc::new([]),
            logprobs: None,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub prompt: u32,
    pub output: u32,
}

/// Results in the order of the segments that asked for a sample.
#[derive(Clone, Debug, Default)]
pub struct Sampled {
    pub rows: Vec<SampledRow>,
    /// Sequences that have no row because their logits are not all finite, as where an adapter's products overflow. Others
    /// of the same step are as they would be without them.
    pub not_finite: Vec<SequenceId>,
    /// How much longer the step took because of its uploads.
    pub upload_time: Duration,
}

#[derive(Clone, Debug)]
pub struct SampledRow {
    pub sequence: SequenceId,
    pub token: u32,
    /// Natural logarithm, of the raw distribution: before temperature, penalties and truncation, as OpenAI and vLLM report it.
    pub logprob: f32,
    /// Best first, `SampleSpec::logprobs` long.
    pub alternatives: Vec<(u32, f32)>,
}

/// What the one pool holds and how KV lies in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageBudget {
    pub page_bytes: u64,
    pub pages: u32,
    /// Tokens whose keys and values of all layers fit one page.
    pub page_tokens: u32,
}
