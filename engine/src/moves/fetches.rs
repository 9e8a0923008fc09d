//! Which adapters to fetch: those that somebody waits for, then those that a floor asks for.
//!
//! Fetches from this machine's disks have places of their own. The stores share the others as floods share the queue
//! ([`admits`]): however many adapters a slow store has, it leaves places to the others.

use std::collections::BTreeMap;

use lorafleet_artifact::Digest;

use super::{HostTier, Move, Plan, Reason, Row, Store};
use crate::queue::admits;

/// Places for fetches, and who has them.
struct Places {
    most: u32,
    held: BTreeMap<Store, u32>,
}

impl Places {
    fn held(&self, store: Store) -> u32 {
        self.held.get(&store).copied().unwrap_or(0)
    }

    /// Of all stores together.
    fn away(&self) -> u32 {
        self.held.iter().filter(|(store, _)| **store != Store::Here).map(|(_, held)| held).sum()
    }

    fn spare_one(&self, store: Store) -> bool {
        match store {
            Store::Here => self.held(store) < self.most,
            Store::Away(_) => admits(self.held(store), self.away(), self.most),
        }
    }

    fn are_taken(&self) -> bool {
        self.away() >= self.most && self.held(Store::Here) >= self.most
    }

    fn take(&mut self, store: Store) {
        *self.held.entry(store).or_default() += 1;
    }
}

impl Plan<'_> {
    pub(super) fn fetch(&mut self) {
        let mut places = Places { most: self.tiers.fetches_max, held: BTreeMap::new() };
        for row in self.rows.iter().filter(|row| row.host == HostTier::Fetching) {
            places.take(row.store);
        }
        for (digest, reason) in self.wanted() {
            if places.are_taken() {
                return;
            }
            let Some(index) = self.index.get(&digest).copied() else { continue };
            let Some(row) = self.rows.get(index) else { continue };
            let (bytes, store) = (row.bytes, row.store);
            if row.device || row.host != HostTier::Absent || !row.may_fetch || !places.spare_one(store) {
                continue;
            }
            if !self.make_host_room(bytes, &digest) {
                if reason == Reason::Demand && self.is_barred(&digest) {
                    self.moves.push(Move::RefuseDemand(digest));
                }
                continue;
            }
            if let Some(row) = self.rows.get_mut(index) {
                row.host = HostTier::Fetching;
            }
            places.take(store);
            self.moves.push(Move::Fetch(digest, reason));
        }
    }

    /// Pins alone leave it no room in host memory.
    fn is_barred(&self, digest: &Digest) -> bool {
        let held = |row: &Row| row.is_held_in_host() && row.host == HostTier::Present;
        let counts = |row: &&Row| row.digest == *digest || held(row);
        let bytes: u64 = self.rows.iter().filter(counts).map(|row| row.bytes).sum();
        bytes > self.tiers.host_bytes_total
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use lorafleet_crds::wire::Floor;

    use super::super::{Tiers, decide};
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
