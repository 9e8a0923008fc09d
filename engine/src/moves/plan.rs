//! The moves, one kind after the other, each on what the ones before it have left.

use lorafleet_crds::wire::Floor;

use super::rows::{Adapter, Rows};
use super::victims::{Victim, Victims};
use super::{HostTier, Move, NOBODY, Reason, Row, Tiers};

/// What is known by now, and the moves so far.
pub(super) struct Plan<'a> {
    pub(super) tiers: &'a Tiers,
    pub(super) rows: Rows,
    /// Indices of those that sequences wait for, the first to be served first.
    demand: Vec<usize>,
    host_used: u64,
    pages_available: u32,
    /// Host copies and device pages that may be let go. Sorted when the first of them must.
    copies: Option<Victims>,
    placed: Option<Victims>,
    pub moves: Vec<Move>,
}

impl<'a> Plan<'a> {
    pub fn new(tiers: &'a Tiers) -> Self {
        let mut rows = Rows::of(&tiers.rows);
        Self {
            tiers,
            demand: rows.queue(&tiers.demand),
            host_used: host_bytes(&rows, |_| true),
            rows,
            pages_available: tiers.pages_available,
            copies: None,
            placed: None,
            moves: Vec::new(),
        }
    }

    pub fn refuse_pins(&mut self) {
        let rows = self.rows.iter_mut().map(|adapter| &mut adapter.row);
        self.moves.extend(refused_pins(rows, self.tiers));
    }

    /// Lets go of host copies until the budget holds. The first in the queue keeps its copy until it is on the device.
    pub fn shrink_host(&mut self) {
        self.make_host_room(0, 0);
    }

    /// Whether `bytes` more fit, letting go of what is wanted later than `place`.
    pub(super) fn make_host_room(&mut self, bytes: u64, place: usize) -> bool {
        while self.host_used.saturating_add(bytes) > self.tiers.host_bytes_total {
            let copies = self.copies.get_or_insert_with(|| copies(&self.rows));
            let Some(victim) = copies.pop(place) else { return false };
            self.host_used -= victim.size;
            if let Some(Adapter { row, .. }) = self.rows.get_mut(victim.index) {
                row.host = HostTier::Absent;
                self.moves.push(Move::DropHost(row.digest, Reason::HostFull));
            }
        }
        true
    }

    /// Each once.
    pub(super) fn wanted(&self) -> Vec<(usize, Reason)> {
        let demanded = self.demand.iter().map(|index| (*index, Reason::Demand));
        let for_floor = |adapter: &Adapter| adapter.place == NOBODY && adapter.row.floor_wants_it();
        let floors = self.rows.iter().filter(|(_, adapter)| for_floor(adapter));
        demanded.chain(floors.map(|(index, _)| (index, Reason::Floor))).collect()
    }

    /// Goes on with what is half uploaded and begins what is wanted, in the order of the queue, as far as the step has room
    /// for bytes. Who does not get on to its end leaves up to half of the step to those behind it that do: it is never
    /// kept from getting on, and never keeps small ones waiting for long.
    pub fn upload(&mut self) {
        let wanted = self.wanted();
        self.drop_unwanted();
        let page_bytes = self.tiers.page_bytes.max(1);
        let mut left = u32::try_from(self.tiers.upload_bytes_max / page_bytes).unwrap_or(u32::MAX).max(1);
        let first = wanted.iter().find_map(|wanted| self.missing(*wanted)).unwrap_or(0);
        if u64::from(first).saturating_mul(page_bytes) <= self.tiers.upload_bytes_whole {
            left = left.max(first);
        }
        let half = left.div_ceil(2);
        let mut cut = false;
        for (at, (index, reason)) in wanted.iter().copied().enumerate() {
            if left == 0 {
                break;
            }
            let fits = |missing: &u32| !cut || *missing <= left;
            let Some(missing) = self.missing((index, reason)).filter(fits) else { continue };
            if !self.take_pages(index, reason) {
                continue;
            }
            let spare = left.saturating_sub(half);
            // Once in a look at most: whoever comes after one that was cut is whole.
            let others = wanted.get(at + 1..).unwrap_or_default().iter().filter_map(|other| self.missing(*other));
            let whole = others.filter(|missing| *missing <= spare);
            let kept = if missing <= left { 0 } else { whole.fold(0, u32::saturating_add) };
            let pages = missing.min(left - spare.min(kept));
            cut |= pages < missing;
            left -= pages;
            self.write(index, pages);
        }
        self.move_on(&wanted);
    }

    fn write(&mut self, index: usize, pages: u32) {
        if let Some(Adapter { row, written, .. }) = self.rows.get_mut(index) {
            row.pages_left -= pages;
            *written = true;
            self.moves.push(Move::Write(row.digest, pages));
        }
    }

    /// One page for each that has begun and got nothing, so that no stream of others keeps it from its end.
    fn move_on(&mut self, wanted: &[(usize, Reason)]) {
        for (index, reason) in wanted.iter().copied() {
            let Some(Adapter { row, written, .. }) = self.rows.get(index) else { continue };
            if !written && row.is_uploading() && self.missing((index, reason)).is_some() {
                self.write(index, 1);
            }
        }
    }

    /// Pages that an adapter lacks on the device and could be given; `None` if there is nothing to do.
    fn missing(&self, (index, reason): (usize, Reason)) -> Option<u32> {
        let Adapter { row, .. } = self.rows.get(index)?;
        let for_host_only = reason == Reason::Floor && row.floor < Floor::Device;
        let pages = if row.device { row.pages_left } else { row.pages };
        (pages > 0 && row.host == HostTier::Present && !for_host_only).then_some(pages)
    }

    /// Whether an adapter has its pages on the device, from now on or since before.
    fn take_pages(&mut self, index: usize, reason: Reason) -> bool {
        let Some(Adapter { row, place, .. }) = self.rows.get(index) else { return false };
        if row.device {
            return true;
        }
        let (pages, place) = (row.pages, *place);
        if !self.make_device_room(pages, place) {
            return false;
        }
        self.pages_available -= pages;
        if let Some(Adapter { row, .. }) = self.rows.get_mut(index) {
            (row.device, row.pages_left) = (true, pages);
            self.moves.push(Move::Upload(row.digest, reason));
        }
        true
    }

    fn drop_unwanted(&mut self) {
        for Adapter { row, place, .. } in self.rows.iter_mut() {
            if row.is_uploading() && *place == NOBODY && !row.floor_wants_it() {
                (row.device, row.pages_left) = (false, 0);
                self.pages_available += row.pages;
                self.moves.push(Move::DropDevice(row.digest, Reason::Unwanted));
            }
        }
    }

    /// Whether `pages` are available, letting go of idle adapters that are wanted later than `place`. Nothing is let go if
    /// it would not be enough.
    fn make_device_room(&mut self, pages: u32, place: usize) -> bool {
        if self.pages_available >= pages {
            return true;
        }
        let placed = self.placed.get_or_insert_with(|| placed(&self.rows));
        if u64::from(self.pages_available).saturating_add(placed.size(place)) < u64::from(pages) {
            return false;
        }
        while self.pages_available < pages {
            let Some(victim) = placed.pop(place) else { return false };
            if let Some(Adapter { row, .. }) = self.rows.get_mut(victim.index) {
                row.device = false;
                self.pages_available += row.pages;
                self.moves.push(Move::DropDevice(row.digest, Reason::DeviceFull));
            }
        }
        true
    }
}

/// Pinned adapters may take half of all pages, and half of the host memory, or nobody else is served. Who was pinned
/// first keeps its floor, whether it is there already or not yet; the others lose theirs.
pub(super) fn refused_pins<'a>(rows: impl Iterator<Item = &'a mut Row>, tiers: &Tiers) -> Vec<Move> {
    let mut pinned: Vec<_> = rows.filter(|row| row.pinned.is_some()).collect();
    pinned.sort_by_key(|row| (row.pinned, row.digest));
    let (mut pages, mut bytes) = (tiers.pages_total / 2, tiers.host_bytes_total / 2);
    let mut moves = Vec::new();
    for row in pinned {
        let refused = if row.is_held_on_device() {
            let less = pages.checked_sub(row.pages);
            pages = less.unwrap_or(pages);
            less.is_none().then_some(Move::RefuseFloor(row.digest))
        } else if row.is_held_in_host() {
            let less = bytes.checked_sub(row.bytes);
            bytes = less.unwrap_or(bytes);
            less.is_none().then_some(Move::RefuseHostFloor(row.digest))
        } else {
            None
        };
        if refused.is_some() {
            (row.pinned, row.floor) = (None, Floor::None);
        }
        moves.extend(refused);
    }
    moves
}

/// Of the host copies of some.
pub(super) fn host_bytes(rows: &Rows, counts: impl Fn(&Adapter) -> bool) -> u64 {
    let present = rows.iter().filter(|(_, adapter)| adapter.row.host == HostTier::Present && counts(adapter));
    present.map(|(_, adapter)| adapter.row.bytes).sum()
}

/// Host copies that may go. One that is whole on the device is needed by nobody for now.
fn copies(rows: &Rows) -> Victims {
    let may_go = |(_, Adapter { row, .. }): &(usize, &Adapter)| {
        row.host == HostTier::Present && !row.is_held_in_host() && !row.is_uploading()
    };
    let victim = |(index, Adapter { row, place, .. }): (usize, &Adapter)| Victim {
        index,
        place: if row.device { NOBODY } else { *place },
        for_floors: row.device,
        touched: row.touched,
        size: row.bytes,
    };
    Victims::new(rows.iter().filter(may_go).map(victim).collect())
}

/// Device pages that may go.
fn placed(rows: &Rows) -> Victims {
    let may_go =
        |(_, Adapter { row, .. }): &(usize, &Adapter)| row.device && row.leases == 0 && !row.is_held_on_device();
    let victim = |(index, Adapter { row, place, .. }): (usize, &Adapter)| Victim {
        index,
        place: *place,
        for_floors: *place == NOBODY && row.floor < Floor::Device,
        touched: row.touched,
        size: row.pages.into(),
    };
    Victims::new(rows.iter().filter(may_go).map(victim).collect())
}
