//! Which adapters to fetch: those that somebody waits for, then those that a floor asks for.
//!
//! Fetches from this machine's disks have places of their own. The stores share the others as floods share the queue
//! ([`admits`]): however many adapters a slow store has, it leaves places to the others.

use std::collections::BTreeMap;

use super::plan::{Plan, host_bytes};
use super::rows::Adapter;
use super::{HostTier, Move, Reason, Store};
use crate::queue::admits;

/// Places for fetches, and who has them.
pub(super) struct Places {
    most: u32,
    held: BTreeMap<Store, u32>,
}

impl Places {
    pub fn new(most: u32) -> Self {
        Self { most, held: BTreeMap::new() }
    }

    fn held(&self, store: Store) -> u32 {
        self.held.get(&store).copied().unwrap_or(0)
    }

    /// Of all stores together.
    fn away(&self) -> u32 {
        self.held.iter().filter(|(store, _)| **store != Store::Here).map(|(_, held)| held).sum()
    }

    pub fn spare_one(&self, store: Store) -> bool {
        match store {
            Store::Here => self.held(store) < self.most,
            Store::Away(_) => admits(self.held(store), self.away(), self.most),
        }
    }

    pub fn are_taken(&self) -> bool {
        self.away() >= self.most && self.held(Store::Here) >= self.most
    }

    pub fn take(&mut self, store: Store) {
        *self.held.entry(store).or_default() += 1;
    }
}

impl Plan<'_> {
    pub fn fetch(&mut self) {
        let mut places = Places::new(self.tiers.fetches_max);
        for (_, Adapter { row, .. }) in self.rows.iter().filter(|(_, other)| other.row.host == HostTier::Fetching) {
            places.take(row.store);
        }
        let pinned = host_bytes(&self.rows, |adapter| adapter.row.is_held_in_host());
        for (index, reason) in self.wanted() {
            if places.are_taken() {
                return;
            }
            let Some(Adapter { row, place, .. }) = self.rows.get(index) else { continue };
            let (digest, bytes, store, place) = (row.digest, row.bytes, row.store, *place);
            if row.device || row.host != HostTier::Absent || !row.may_fetch || !places.spare_one(store) {
                continue;
            }
            if !self.make_host_room(bytes, place) {
                // Pins alone leave it no room in host memory.
                let barred = pinned.saturating_add(bytes) > self.tiers.host_bytes_total;
                if reason == Reason::Demand && barred {
                    self.moves.push(Move::RefuseDemand(digest));
                }
                continue;
            }
            if let Some(Adapter { row, .. }) = self.rows.get_mut(index) {
                row.host = HostTier::Fetching;
            }
            places.take(store);
            self.moves.push(Move::Fetch(digest, reason));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use lorafleet_artifact::Digest;
    use lorafleet_crds::wire::Floor;

    use super::super::{Row, Tiers, decide};
    use super::*;

    fn digest(number: u8) -> Digest {
        Digest::from_bytes([number; 32])
    }

    /// Of adapters that somebody waits for, in this order, which are fetched? Each stands as its store's letter, a large one
    /// while it is on its way, or as `.` for this machine.
    fn check(stores: &str, expected: &str) {
        let born = Instant::now();
        let row = |(number, letter): (usize, char)| Row {
            digest: digest(number as u8),
            host: if letter.is_ascii_uppercase() { HostTier::Fetching } else { HostTier::Absent },
            store: if letter == '.' { Store::Here } else { Store::Away(letter.to_ascii_lowercase().into()) },
            device: false,
            pages_left: 0,
            bytes: 0,
            pages: 0,
            leases: 0,
            floor: Floor::None,
            pinned: None,
            verified: false,
            touched: born,
            may_fetch: true,
        };
        let rows: Vec<Row> = stores.chars().enumerate().map(row).collect();
        let tiers = Tiers {
            demand: rows.iter().map(|row| row.digest).collect(),
            rows,
            pages_available: 9,
            pages_total: 9,
            page_bytes: 1,
            host_bytes_total: 99,
            fetches_max: 16,
            upload_bytes_max: 1,
            upload_bytes_whole: 1,
        };
        let fetched = |step: Move| if let Move::Fetch(digest, Reason::Demand) = step { Some(digest) } else { None };
        let fetched: Vec<Digest> = decide(&tiers).into_iter().filter_map(fetched).collect();
        let named = stores.chars().enumerate().filter(|(number, _)| fetched.contains(&digest(*number as u8)));
        assert_eq!(named.map(|(_, letter)| letter).collect::<String>(), expected, "{stores}");
    }

    #[test]
    fn a_slow_store_leaves_places_to_others_and_to_this_machine() {
        check("abc.", "abc.");
        // Twelve of sixteen at most, then three of what is left, then the last one.
        check(&("a".repeat(20) + "b."), &("a".repeat(12) + "b."));
        check(&("A".repeat(12) + "aaabbbbb.."), "bbb..");
        check(&("A".repeat(12) + "BBBabcc."), "c.");
        // All that stores may have is taken, and still this machine has its own.
        check(&("A".repeat(12) + "BBBCabcd" + &".".repeat(20)), &".".repeat(16));
    }
}
