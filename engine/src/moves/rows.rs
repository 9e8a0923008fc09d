//! The adapters known, with the moves so far applied to them.

use lorafleet_artifact::Digest;

use super::{NOBODY, Row};

pub(super) struct Adapter {
    pub row: Row,
    /// In the queue of waiting sequences; the later, the sooner it may be let go. `NOBODY`: nobody waits.
    pub place: usize,
    /// Some of its pages come in the next step.
    pub written: bool,
}

/// Each at its index. Whoever looks at one asks here, so that a test can count the looks.
pub(super) struct Rows(Vec<Adapter>);

impl Rows {
    pub fn of(rows: &[Row]) -> Self {
        let adapter = |row: &Row| Adapter { row: row.clone(), place: NOBODY, written: false };
        count(rows.len());
        Self(rows.iter().map(adapter).collect())
    }

    pub fn get(&self, index: usize) -> Option<&Adapter> {
        count(1);
        self.0.get(index)
    }

    pub fn get_mut(&mut self, index: usize) -> Option<&mut Adapter> {
        count(1);
        self.0.get_mut(index)
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &Adapter)> {
        count(self.0.len());
        self.0.iter().enumerate()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Adapter> {
        count(self.0.len());
        self.0.iter_mut()
    }

    /// Gives those that are waited for their places. Returns the indices of those that are known, in the same order.
    pub fn queue(&mut self, demand: &[Digest]) -> Vec<usize> {
        if demand.is_empty() {
            return Vec::new();
        }
        let mut by_digest: Vec<(Digest, usize)> =
            self.iter().map(|(index, adapter)| (adapter.row.digest, index)).collect();
        by_digest.sort_unstable();
        let mut queue = Vec::with_capacity(demand.len());
        for (place, digest) in demand.iter().enumerate() {
            let found = by_digest.binary_search_by_key(digest, |(digest, _)| *digest).ok();
            let Some((_, index)) = found.and_then(|at| by_digest.get(at)) else { continue };
            if let Some(adapter) = self.get_mut(*index).filter(|adapter| adapter.place == NOBODY) {
                adapter.place = place;
                queue.push(*index);
            }
        }
        queue
    }
}

#[cfg(not(test))]
fn count(_looks: usize) {}

#[cfg(test)]
pub(super) use counting::{count, looks_of};

#[cfg(test)]
mod counting {
    use std::cell::Cell;

    thread_local! {
        static LOOKS: Cell<usize> = const { Cell::new(0) };
    }

    pub fn count(looks: usize) {
        LOOKS.set(LOOKS.get() + looks);
    }

    /// How many looks at adapters this takes.
    pub fn looks_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
        let before = LOOKS.get();
        let done = work();
        (done, LOOKS.get() - before)
    }
}
