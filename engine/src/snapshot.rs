//! What the step thread shows of its state: plain data, published when it has changed.

use std::collections::BTreeMap;

use lorafleet_artifact::Digest;

use crate::pages::KvOwner;
use crate::pages::PageCounts;
use crate::residency::Facts;
use crate::state::State;

#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub page_bytes: u64,
    pub page_tokens: u32,
    pub pages: PageCounts,
    /// Pages of adapters that nobody uses and no floor holds: as good as free.
    pub idle_adapter_pages: u32,
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens that wait for their prefill.
    pub waiting_tokens: u64,
    pub running_adapters: BTreeMap<Digest, u32>,
    pub waiting_adapters: BTreeMap<Digest, u32>,
    pub host_bytes_total: u64,
    pub host_bytes_used: u64,
    pub adapters: Vec<Facts>,
}

impl Snapshot {
    pub fn of(state: &State) -> Self {
        let per_adapter = |sequences: &[crate::sequence::Sequence]| {
            let mut counts = BTreeMap::new();
            for sequence in sequences {
                if let KvOwner::Adapter(digest) = sequence.owner {
                    *counts.entry(digest).or_insert(0) += 1;
                }
            }
            counts
        };
        Self {
            page_bytes: state.budget.page_bytes,
            page_tokens: state.budget.page_tokens,
            pages: state.pages.counts(),
            idle_adapter_pages: state.residency.idle_pages(),
            running: state.running.len() as u32,
            waiting: state.waiting.len() as u32,
            waiting_tokens: state.waiting.iter().map(|sequence| u64::from(sequence.known())).sum(),
            running_adapters: per_adapter(&state.running),
            waiting_adapters: per_adapter(&state.waiting),
            host_bytes_total: state.limits.host_cache_bytes,
            host_bytes_used: state.residency.host_bytes(),
            adapters: state.residency.facts(),
        }
    }

    pub fn facts(&self, digest: &Digest) -> Option<&Facts> {
        let index = self.adapters.binary_search_by_key(digest, |facts| facts.digest).ok()?;
        self.adapters.get(index)
    }

    pub fn idle(&self) -> bool {
        self.running == 0 && self.waiting == 0
    }
}
