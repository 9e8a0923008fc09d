//! The same decisions as [`super::decide`] makes, found anew for each adapter by looking at all of them: too slow to serve
//! with, and simple enough to hold the other against.

use std::collections::{HashMap, HashSet};

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::Floor;

use super::fetches::Places;
use super::plan::refused_pins;
use super::rows::count;
use super::{HostTier, Move, Reason, Row, Tiers};

pub fn decide(tiers: &Tiers) -> Vec<Move> {
    let mut plan = Simple::new(tiers);
    // Not looked for adapter by adapter: the same in both.
    plan.moves.extend(refused_pins(plan.rows.iter_mut(), tiers));
    plan.shrink_host();
    plan.fetch();
    plan.upload();
    plan.moves
}

struct Simple<'a> {
    tiers: &'a Tiers,
    rows: Vec<Row>,
    index: HashMap<Digest, usize>,
    places: HashMap<Digest, usize>,
    pages_available: u32,
    moves: Vec<Move>,
}

impl<'a> Simple<'a> {
    fn new(tiers: &'a Tiers) -> Self {
        Self {
            tiers,
            rows: tiers.rows.clone(),
            index: tiers.rows.iter().enumerate().map(|(index, row)| (row.digest, index)).collect(),
            places: tiers.demand.iter().enumerate().map(|(place, digest)| (*digest, place)).collect(),
            pages_available: tiers.pages_available,
            moves: Vec::new(),
        }
    }

    fn place(&self, digest: &Digest) -> usize {
        self.places.get(digest).copied().unwrap_or(usize::MAX)
    }

    fn all(&self) -> std::slice::Iter<'_, Row> {
        count(self.rows.len());
        self.rows.iter()
    }

    fn host_used(&self) -> u64 {
        self.all().filter(|row| row.host == HostTier::Present).map(|row| row.bytes).sum()
    }

    fn shrink_host(&mut self) {
        while self.host_used() > self.tiers.host_bytes_total {
            let Some(victim) = self.host_victim(0) else { return };
            self.drop_host(victim);
        }
    }

    fn host_victim(&self, place: usize) -> Option<usize> {
        let candidates = self.all().enumerate().filter(|(_, row)| {
            let needed = row.is_uploading() || (!row.device && self.place(&row.digest) <= place);
            row.host == HostTier::Present && !row.is_held_in_host() && !needed
        });
        let urgency = |row: &Row| if row.device { usize::MAX } else { self.place(&row.digest) };
        let first = candidates.min_by_key(|(_, row)| (std::cmp::Reverse(urgency(row)), row.touched));
        first.map(|(index, _)| index)
    }

    fn drop_host(&mut self, index: usize) {
        let Some(row) = self.rows.get_mut(index) else { return };
        row.host = HostTier::Absent;
        self.moves.push(Move::DropHost(row.digest, Reason::HostFull));
    }

    fn wanted(&self) -> Vec<(Digest, Reason)> {
        let demanded = self.tiers.demand.iter().map(|digest| (*digest, Reason::Demand));
        let floors = self.all().filter(|row| row.floor_wants_it()).map(|row| (row.digest, Reason::Floor));
        let mut seen = HashSet::new();
        demanded.chain(floors).filter(|(digest, _)| seen.insert(*digest)).collect()
    }

    fn fetch(&mut self) {
        let mut places = Places::new(self.tiers.fetches_max);
        self.all().filter(|row| row.host == HostTier::Fetching).for_each(|row| places.take(row.store));
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

    fn is_barred(&self, digest: &Digest) -> bool {
        let counts = |row: &&Row| row.digest == *digest || (row.is_held_in_host() && row.host == HostTier::Present);
        let bytes: u64 = self.all().filter(counts).map(|row| row.bytes).sum();
        bytes > self.tiers.host_bytes_total
    }

    fn make_host_room(&mut self, bytes: u64, digest: &Digest) -> bool {
        let place = self.place(digest);
        while self.host_used().saturating_add(bytes) > self.tiers.host_bytes_total {
            let Some(victim) = self.host_victim(place) else { return false };
            self.drop_host(victim);
        }
        true
    }

    fn upload(&mut self) {
        let wanted = self.wanted();
        self.drop_unwanted(&wanted);
        let page_bytes = self.tiers.page_bytes.max(1);
        let mut left = u32::try_from(self.tiers.upload_bytes_max / page_bytes).unwrap_or(u32::MAX).max(1);
        let first = wanted.iter().find_map(|(digest, reason)| self.missing(digest, *reason)).unwrap_or(0);
        if u64::from(first).saturating_mul(page_bytes) <= self.tiers.upload_bytes_whole {
            left = left.max(first);
        }
        let half = left.div_ceil(2);
        let mut cut = false;
        for (at, (digest, reason)) in wanted.iter().enumerate() {
            if left == 0 {
                break;
            }
            let fits = |missing: &u32| !cut || *missing <= left;
            let Some(missing) = self.missing(digest, *reason).filter(fits) else { continue };
            if !self.take_pages(digest, *reason) {
                continue;
            }
            let spare = left.saturating_sub(half);
            let others = wanted.get(at + 1..).unwrap_or_default().iter();
            let others = others.filter_map(|(digest, reason)| self.missing(digest, *reason));
            let kept = if missing <= left { 0 } else { others.filter(|missing| *missing <= spare).sum() };
            let pages = missing.min(left - spare.min(kept));
            cut |= pages < missing;
            left -= pages;
            self.write(digest, pages);
        }
        self.move_on(&wanted);
    }

    fn write(&mut self, digest: &Digest, pages: u32) {
        if let Some(row) = self.index.get(digest).and_then(|index| self.rows.get_mut(*index)) {
            row.pages_left -= pages;
            self.moves.push(Move::Write(*digest, pages));
        }
    }

    fn move_on(&mut self, wanted: &[(Digest, Reason)]) {
        let written = |step: &Move| if let Move::Write(digest, _) = step { Some(*digest) } else { None };
        let written: HashSet<Digest> = self.moves.iter().filter_map(written).collect();
        for (digest, reason) in wanted.iter().filter(|(digest, _)| !written.contains(digest)) {
            let begun = self.index.get(digest).and_then(|index| self.rows.get(*index)).is_some_and(Row::is_uploading);
            if begun && self.missing(digest, *reason).is_some() {
                self.write(digest, 1);
            }
        }
    }

    fn missing(&self, digest: &Digest, reason: Reason) -> Option<u32> {
        let row = self.rows.get(*self.index.get(digest)?)?;
        let for_host_only = reason == Reason::Floor && row.floor < Floor::Device;
        let pages = if row.device { row.pages_left } else { row.pages };
        (pages > 0 && row.host == HostTier::Present && !for_host_only).then_some(pages)
    }

    fn take_pages(&mut self, digest: &Digest, reason: Reason) -> bool {
        let Some(index) = self.index.get(digest).copied() else { return false };
        let Some(row) = self.rows.get(index).cloned() else { return false };
        if row.device {
            return true;
        }
        if !self.make_device_room(row.pages, digest) {
            return false;
        }
        self.pages_available -= row.pages;
        if let Some(row) = self.rows.get_mut(index) {
            (row.device, row.pages_left) = (true, row.pages);
        }
        self.moves.push(Move::Upload(*digest, reason));
        true
    }

    fn drop_unwanted(&mut self, wanted: &[(Digest, Reason)]) {
        let wanted: HashSet<Digest> = wanted.iter().map(|(digest, _)| *digest).collect();
        for row in self.rows.iter_mut().filter(|row| row.is_uploading() && !wanted.contains(&row.digest)) {
            (row.device, row.pages_left) = (false, 0);
            self.pages_available += row.pages;
            self.moves.push(Move::DropDevice(row.digest, Reason::Unwanted));
        }
    }

    fn make_device_room(&mut self, pages: u32, digest: &Digest) -> bool {
        let place = self.place(digest);
        let mut victims: Vec<usize> = (0..self.all().len())
            .filter(|index| self.rows.get(*index).is_some_and(|row| self.may_leave_device(row, place)))
            .collect();
        victims.sort_by_key(|index| {
            self.rows.get(*index).map(|row| (std::cmp::Reverse(self.place(&row.digest)), row.touched))
        });
        let mut room = self.pages_available;
        let mut chosen = Vec::new();
        for index in victims {
            if room >= pages {
                break;
            }
            room += self.rows.get(index).map_or(0, |row| row.pages);
            chosen.push(index);
        }
        if room < pages {
            return false;
        }
        for index in chosen {
            if let Some(row) = self.rows.get_mut(index) {
                row.device = false;
                self.moves.push(Move::DropDevice(row.digest, Reason::DeviceFull));
            }
        }
        self.pages_available = room;
        true
    }

    fn may_leave_device(&self, row: &Row, place: usize) -> bool {
        let own_place = self.place(&row.digest);
        let for_a_floor = place == usize::MAX && own_place == usize::MAX;
        let wanted_later = own_place > place || (for_a_floor && row.floor < Floor::Device);
        row.device && row.leases == 0 && !row.is_held_on_device() && wanted_later
    }
}
