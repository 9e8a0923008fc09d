//! What has been computed for each adapter and the base lately: whose turn it is when requests of many compete.

use std::collections::{BTreeMap, BTreeSet};

use crate::pages::KvOwner;

/// A drawn token costs as much as so many tokens of a prompt: it takes a step of its own.
const DRAWN_TOKEN_COST: u64 = 2;

/// One account for each owner of open sequences. Only differences count: who comes starts level with the least served,
/// so that neither an idle past nor a late arrival gives anybody a claim to more than its share from now on.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    spent: BTreeMap<KvOwner, u64>,
}

impl Accounts {
    /// A new sequence of `owner` has come.
    pub fn open(&mut self, owner: KvOwner) {
        let least = self.spent.values().min().copied().unwrap_or(0);
        self.spent.entry(owner).or_insert(least);
    }

    /// A token was drawn for `owner`. The prompt is charged with its first token and not as it goes on: so the least
    /// served stays the least served until its prompt is through, instead of all prompts getting on a bit at a time.
    pub fn charge(&mut self, owner: KvOwner, first_of_prompt: Option<u32>) {
        if let Some(spent) = self.spent.get_mut(&owner) {
            *spent += DRAWN_TOKEN_COST + u64::from(first_of_prompt.unwrap_or(0));
        }
    }

    /// Closes the accounts of all but `open`.
    pub fn keep(&mut self, open: &BTreeSet<KvOwner>) {
        self.spent.retain(|owner, _| open.contains(owner));
    }

    pub fn spent(&self, owner: &KvOwner) -> u64 {
        self.spent.get(owner).copied().unwrap_or(0)
    }
}
