//! Which adapters to bring nearer and which to let go: `Tiers -> Moves`, without clock or IO.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::Floor;

mod fetches;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostTier {
    Absent,
    Fetching,
    Present,
}

/// Where an adapter's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Store {
    /// On this machine's disks.
    Here,
    /// In a store, which has a number.
    Away(u64),
}

/// One adapter's place.
#[derive(Clone, Debug)]
pub struct Row {
    pub digest: Digest,
    pub host: HostTier,
    /// Where a fetch would read it.
    pub store: Store,
    /// It holds its pages on the device.
    pub device: bool,
    /// So many of them are still to be written; nobody can use it before.
    pub pages_left: u32,
    /// In host memory; 0 while unknown.
    pub bytes: u64,
    /// On the device; 0 while unknown.
    pub pages: u32,
    pub leases: u32,
    pub floor: Floor,
    /// Since when it is never to be dropped from the tier that `floor` names.
    pub pinned: Option<Instant>,
    /// It has been fetched once, so its floor `Disk` is met.
    pub verified: bool,
    /// Orders eviction: the longest untouched goes first.
    pub touched: Instant,
    /// False while a failed fetch's pause lasts.
    pub may_fetch: bool,
}

impl Row {
    fn on_device(&self) -> bool {
        self.device && self.pages_left == 0
    }

    fn is_uploading(&self) -> bool {
        self.device && self.pages_left > 0
    }

    fn is_held_in_host(&self) -> bool {
        self.pinned.is_some() && self.floor == Floor::Host
    }

    fn is_held_on_device(&self) -> bool {
        self.pinned.is_some() && self.floor == Floor::Device
    }
}

/// What `decide` looks at.
#[derive(Clone, Debug)]
pub struct Tiers {
    pub rows: Vec<Row>,
    /// Adapters that sequences wait for, the first to be served first, each once.
    pub demand: Vec<Digest>,
    /// Free pages and those of the prefix cache.
    pub pages_available: u32,
    pub pages_total: u32,
    pub page_bytes: u64,
    pub host_bytes_total: u64,
    /// At once from all stores, and as many from this machine's disks.
    pub fetches_max: u32,
    /// For the next step.
    pub upload_bytes_max: u64,
    /// The first in the queue comes in one step if it lacks no more than this.
    pub upload_bytes_whole: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A sequence waits for it.
    Demand,
    /// A floor asks for it.
    Floor,
    /// The host tier is over its budget.
    HostFull,
    /// Another adapter needs its device pages.
    DeviceFull,
    /// Nobody waits any more for what is half uploaded.
    Unwanted,
}

/// In the order in which to do them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    DropHost(Digest, Reason),
    Fetch(Digest, Reason),
    DropDevice(Digest, Reason),
    /// Take its device pages.
    Upload(Digest, Reason),
    /// Write so many more of them in the next step.
    Write(Digest, u32),
    /// Its floor cannot be kept: the pinned adapters would take more than half of all pages.
    RefuseFloor(Digest),
    /// The same for those pinned in host memory and half of that.
    RefuseHostFloor(Digest),
    /// Who waits for it waits in vain: beside what is pinned in host memory, it never has room there.
    RefuseDemand(Digest),
}

pub fn decide(tiers: &Tiers) -> Vec<Move> {
    let mut plan = Plan::new(tiers);
    plan.refuse_pins();
    plan.shrink_host();
    plan.fetch();
    plan.upload();
    plan.moves
}

/// Rows with the moves so far applied to them.
struct Plan<'a> {
    tiers: &'a Tiers,
    rows: Vec<Row>,
    index: HashMap<Digest, usize>,
    places: HashMap<Digest, usize>,
    pages_available: u32,
    moves: Vec<Move>,
}

impl<'a> Plan<'a> {
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

    /// Place in the queue of waiting sequences; the later, the sooner it may be let go. `usize::MAX`: nobody waits.
    fn place(&self, digest: &Digest) -> usize {
        self.places.get(digest).copied().unwrap_or(usize::MAX)
    }

    /// Pinned adapters may take half of all pages, and half of the host memory, or nobody else is served. Who was pinned
    /// first keeps its floor, whether it is there already or not yet.
    fn refuse_pins(&mut self) {
        let mut pinned: Vec<&mut Row> = self.rows.iter_mut().filter(|row| row.pinned.is_some()).collect();
        pinned.sort_by_key(|row| (row.pinned, row.digest));
        let (mut pages, mut bytes) = (self.tiers.pages_total / 2, self.tiers.host_bytes_total / 2);
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
            self.moves.extend(refused);
        }
    }

    fn host_used(&self) -> u64 {
        self.rows.iter().filter(|row| row.host == HostTier::Present).map(|row| row.bytes).sum()
    }

    /// Lets go of host copies until the budget holds. The first in the queue keeps its copy until it is on the device.
    fn shrink_host(&mut self) {
        while self.host_used() > self.tiers.host_bytes_total {
            let Some(victim) = self.host_victim(0) else { return };
            self.drop_host(victim);
        }
    }

    /// The host copy to let go first among those wanted later than `place`.
    fn host_victim(&self, place: usize) -> Option<usize> {
        let candidates = self.rows.iter().enumerate().filter(|(_, row)| {
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

    /// Each once.
    fn wanted(&self) -> Vec<(Digest, Reason)> {
        let demanded = self.tiers.demand.iter().map(|digest| (*digest, Reason::Demand));
        let floors = self.rows.iter().filter(|row| floor_wants_fetch(row)).map(|row| (row.digest, Reason::Floor));
        let mut seen = HashSet::new();
        demanded.chain(floors).filter(|(digest, _)| seen.insert(*digest)).collect()
    }

    /// Whether `bytes` more fit, letting go of what is wanted later than `digest`.
    fn make_host_room(&mut self, bytes: u64, digest: &Digest) -> bool {
        let place = self.place(digest);
        while self.host_used().saturating_add(bytes) > self.tiers.host_bytes_total {
            let Some(victim) = self.host_victim(place) else { return false };
            self.drop_host(victim);
        }
        true
    }

    /// Goes on with what is half uploaded and begins what is wanted, in the order of the queue, as far as the step has room
    /// for bytes. Who does not get on to its end leaves up to half of the step to those behind it that do: it is never
    /// kept from getting on, and never keeps small ones waiting for long.
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

    /// One page for each that has begun and got nothing, so that no stream of others keeps it from its end.
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

    /// Pages that an adapter lacks on the device and could be given; `None` if there is nothing to do.
    fn missing(&self, digest: &Digest, reason: Reason) -> Option<u32> {
        let row = self.rows.get(*self.index.get(digest)?)?;
        let for_host_only = reason == Reason::Floor && row.floor < Floor::Device;
        let pages = if row.device { row.pages_left } else { row.pages };
        (pages > 0 && row.host == HostTier::Present && !for_host_only).then_some(pages)
    }

    /// Whether an adapter has its pages on the device, from now on or since before.
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

    /// Whether `pages` are available, letting go of idle adapters that are wanted later than `digest`. Nothing is let
    /// go if it would not be enough.
    fn make_device_room(&mut self, pages: u32, digest: &Digest) -> bool {
        let place = self.place(digest);
        let mut victims: Vec<usize> = (0..self.rows.len())
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

/// A floor that is not met and is not on its way by demand.
fn floor_wants_fetch(row: &Row) -> bool {
    match row.floor {
        Floor::None => false,
        Floor::Disk => !row.verified,
        // Without a pin the floor is a start condition only; keeping it would undo each eviction at once.
        Floor::Host => row.host == HostTier::Absent && !row.device && (row.pinned.is_some() || !row.verified),
        Floor::Device => !row.on_device() && (row.pinned.is_some() || !row.verified || row.host == HostTier::Present),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Reason::{Demand, DeviceFull, HostFull};
    use super::*;

    fn digest(number: u8) -> Digest {
        Digest::from_bytes([number; 32])
    }

    /// `letters` per row: H host, D device, U half of it, L leased, P pinned to its floor, F fetching; the number is the
    /// age order.
    fn row(number: u8, letters: &str, floor: Floor) -> Row {
        Row {
            digest: digest(number),
            host: match letters {
                letters if letters.contains('F') => HostTier::Fetching,
                letters if letters.contains('H') => HostTier::Present,
                _ => HostTier::Absent,
            },
            store: Store::Here,
            device: letters.contains(['D', 'U']),
            pages_left: u32::from(letters.contains('U')),
            bytes: 10,
            pages: 2,
            leases: u32::from(letters.contains('L')),
            floor,
            pinned: letters.contains('P').then(|| *BORN + Duration::from_secs(number.into())),
            verified: letters.contains('H'),
            touched: *BORN + Duration::from_secs(number.into()),
            may_fetch: true,
        }
    }

    static BORN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

    fn check(rows: Vec<Row>, demand: &[u8], pages_available: u32, host_bytes_total: u64, expected: &[Move]) {
        let tiers = Tiers {
            rows,
            demand: demand.iter().map(|number| digest(*number)).collect(),
            pages_available,
            pages_total: 16,
            page_bytes: 1,
            host_bytes_total,
            fetches_max: 2,
            upload_bytes_max: 4,
            upload_bytes_whole: 6,
        };
        assert_eq!(decide(&tiers), expected);
    }

    #[test]
    fn demand_is_fetched_and_uploaded_in_order() {
        let none = Floor::None;
        check(
            vec![row(1, "", none), row(2, "H", none)],
            &[1, 2],
            9,
            99,
            &[Move::Fetch(digest(1), Demand), Move::Upload(digest(2), Demand), Move::Write(digest(2), 2)],
        );
        // At most two fetches at once; one is on its way already.
        let rows = vec![row(1, "F", none), row(2, "", none), row(3, "", none)];
        check(rows, &[1, 2, 3], 9, 99, &[Move::Fetch(digest(2), Demand)]);
        // Bytes per step are limited.
        let rows = vec![row(1, "H", none), row(2, "H", none), row(3, "H", none)];
        let (third, second) = (digest(3), digest(2));
        let written = |digest| [Move::Upload(digest, Demand), Move::Write(digest, 2)];
        check(rows, &[3, 2, 1], 9, 99, &[written(third), written(second)].concat());
    }

    #[test]
    fn room_is_made_by_the_longest_idle_and_never_by_the_leased_or_pinned() {
        let none = Floor::None;
        let rows = vec![row(1, "HDL", none), row(2, "HDP", Floor::Device), row(3, "HD", none), row(4, "H", none)];
        check(
            rows,
            &[4],
            0,
            99,
            &[Move::DropDevice(digest(3), DeviceFull), Move::Upload(digest(4), Demand), Move::Write(digest(4), 2)],
        );
        check(vec![row(1, "HDL", none), row(4, "H", none)], &[4], 1, 99, &[]);
        // Who is wanted sooner keeps its place.
        check(vec![row(1, "HD", none), row(4, "H", none)], &[1, 4], 0, 99, &[]);
    }

    #[test]
    fn the_host_budget_holds_and_the_first_in_the_queue_keeps_its_copy() {
        let none = Floor::None;
        let rows = vec![row(1, "H", none), row(2, "HP", Floor::Host), row(3, "H", none)];
        check(rows, &[], 9, 20, &[Move::DropHost(digest(1), HostFull)]);
        // Pins may have half of it; who was pinned later has to do without, and so has who finds no room beside them.
        let pins = vec![row(2, "HP", Floor::Host), row(1, "HP", Floor::Host)];
        check(pins.clone(), &[], 9, 39, &[Move::RefuseHostFloor(digest(2))]);
        check(pins.clone(), &[], 9, 40, &[]);
        let wide = Row { bytes: 25, ..row(3, "", none) };
        let refused = [Move::RefuseDemand(digest(3))];
        check(vec![pins[0].clone(), pins[1].clone(), wide.clone()], &[3], 9, 40, &refused);
        let drops = [Move::DropHost(digest(4), HostFull), Move::Fetch(digest(3), Demand)];
        check(vec![wide, pins[1].clone(), row(4, "H", none)], &[3], 9, 40, &drops);
        let rows = vec![row(1, "H", none), row(2, "H", none)];
        check(rows, &[1, 2], 0, 10, &[Move::DropHost(digest(2), HostFull)]);
    }

    #[test]
    fn floors_are_met_and_a_pin_may_not_take_more_than_half_the_device() {
        check(
            vec![row(1, "", Floor::Host), row(2, "", Floor::Disk)],
            &[],
            9,
            99,
            &[Move::Fetch(digest(1), Reason::Floor), Move::Fetch(digest(2), Reason::Floor)],
        );
        let uploaded = [Move::Upload(digest(1), Reason::Floor), Move::Write(digest(1), 2)];
        check(vec![row(1, "HP", Floor::Device)], &[], 9, 99, &uploaded);
        let mut big = row(1, "HP", Floor::Device);
        big.pages = 9;
        check(vec![big], &[], 16, 99, &[Move::RefuseFloor(digest(1))]);
        // Wherever they are, and whoever waits for them: the first that were pinned stay.
        let wide = |number: u8, letters: &str| Row { pages: 3, ..row(number, letters, Floor::Device) };
        let rows = vec![wide(4, "HDLP"), wide(2, "HDP"), wide(3, "HP"), wide(1, "HDP")];
        let all = [Move::RefuseFloor(digest(3)), Move::RefuseFloor(digest(4))];
        check(rows.clone(), &[], 0, 99, &all);
        let demanded = [&all[..], &[Move::Upload(digest(3), Demand), Move::Write(digest(3), 3)]].concat();
        check(rows, &[3], 3, 99, &demanded);
    }

    #[test]
    fn a_large_one_is_written_in_pieces_and_lets_small_ones_pass() {
        let none = Floor::None;
        let large = |left: u32| {
            let (pages, pages_left) = (40, left);
            Row { pages, pages_left, device: left < pages, ..row(1, "H", none) }
        };
        let begun = [Move::Upload(digest(1), Demand), Move::Write(digest(1), 4)];
        check(vec![large(40)], &[1], 40, 99, &begun);
        check(vec![large(36)], &[1], 0, 99, &[Move::Write(digest(1), 4)]);
        check(vec![large(3)], &[1], 0, 99, &[Move::Write(digest(1), 3)]);
        // One that lacks little is not cut.
        let little = Row { pages: 6, ..row(1, "H", none) };
        check(vec![little], &[1], 40, 99, &[Move::Upload(digest(1), Demand), Move::Write(digest(1), 6)]);
        // Half of the step is for one behind it that gets whole by it; who does not has to wait.
        let small = || row(2, "H", none);
        let passed = [Move::Write(digest(1), 2), Move::Upload(digest(2), Demand), Move::Write(digest(2), 2)];
        check(vec![large(36), small()], &[1, 2], 9, 99, &passed);
        let medium = Row { pages: 3, ..small() };
        check(vec![large(36), medium], &[1, 2], 9, 99, &[Move::Write(digest(1), 4)]);
        // Before its turn, one that has begun gets on by a page.
        let late = Row { floor: Floor::Device, pinned: Some(*BORN), pages: 8, ..large(8) };
        let first = [Move::Upload(digest(2), Demand), Move::Write(digest(2), 2)];
        let both = [&first[..], &[Move::Upload(digest(3), Demand), Move::Write(digest(3), 2)]].concat();
        let slow = [&both[..], &[Move::Write(digest(1), 1)]].concat();
        check(vec![late, small(), row(3, "H", none)], &[2, 3], 9, 99, &slow);
    }

    #[test]
    fn half_an_adapter_keeps_its_host_copy_and_goes_when_nobody_waits_for_it() {
        let none = Floor::None;
        check(vec![row(1, "HU", none)], &[], 9, 99, &[Move::DropDevice(digest(1), Reason::Unwanted)]);
        check(vec![row(1, "HU", none)], &[1], 9, 5, &[Move::Write(digest(1), 1)]);
        check(vec![row(1, "HUP", Floor::Device)], &[], 9, 99, &[Move::Write(digest(1), 1)]);
        // Its pages go to who is served sooner.
        let rows = vec![row(1, "HU", none), row(2, "H", none)];
        let moves =
            [Move::DropDevice(digest(1), DeviceFull), Move::Upload(digest(2), Demand), Move::Write(digest(2), 2)];
        check(rows, &[2, 1], 0, 99, &moves);
    }
}
