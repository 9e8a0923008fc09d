//! Which adapters to bring nearer and which to let go: `Tiers -> Moves`, without clock or IO.

use std::collections::HashMap;
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::Floor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostTier {
    Absent,
    Fetching,
    Present,
}

/// One adapter's place.
#[derive(Clone, Debug)]
pub struct Row {
    pub digest: Digest,
    pub host: HostTier,
    pub device: bool,
    /// In host memory; 0 while unknown.
    pub bytes: u64,
    /// On the device; 0 while unknown.
    pub pages: u32,
    pub leases: u32,
    pub floor: Floor,
    /// Never dropped from the tier that `floor` names.
    pub pinned: bool,
    /// It has been fetched once, so its floor `Disk` is met.
    pub verified: bool,
    /// Orders eviction: the longest untouched goes first.
    pub touched: Instant,
    /// False while a failed fetch's pause lasts.
    pub may_fetch: bool,
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
    pub fetches_max: u32,
    pub upload_bytes_max: u64,
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
}

/// In the order in which to do them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    DropHost(Digest, Reason),
    Fetch(Digest, Reason),
    DropDevice(Digest, Reason),
    Upload(Digest, Reason),
    /// Its floor cannot be kept: the pinned adapters would take more than half of all pages.
    RefuseFloor(Digest),
}

pub fn decide(tiers: &Tiers) -> Vec<Move> {
    let mut plan = Plan::new(tiers);
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
            let needed = !row.device && self.place(&row.digest) <= place;
            row.host == HostTier::Present && !(row.pinned && row.floor >= Floor::Host) && !needed
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
        let floors = self.rows.iter().filter(|row| floor_wants_fetch(row)).map(|row| (row.digest, Reason::Floor));
        demanded.chain(floors).collect()
    }

    fn fetch(&mut self) {
        let mut fetching = self.rows.iter().filter(|row| row.host == HostTier::Fetching).count() as u32;
        for (digest, reason) in self.wanted() {
            if fetching >= self.tiers.fetches_max {
                return;
            }
            let Some(index) = self.index.get(&digest).copied() else { continue };
            let Some(row) = self.rows.get(index) else { continue };
            if row.device || row.host != HostTier::Absent || !row.may_fetch || !self.make_host_room(row.bytes, &digest)
            {
                continue;
            }
            if let Some(row) = self.rows.get_mut(index) {
                row.host = HostTier::Fetching;
            }
            fetching += 1;
            self.moves.push(Move::Fetch(digest, reason));
        }
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

    fn upload(&mut self) {
        let mut written = 0;
        for (digest, reason) in self.wanted() {
            let Some(index) = self.index.get(&digest).copied() else { continue };
            let Some(row) = self.rows.get(index).cloned() else { continue };
            let for_floor = reason == Reason::Floor;
            if row.device || row.host != HostTier::Present || (for_floor && row.floor < Floor::Device) {
                continue;
            }
            if for_floor && row.pinned && self.pinned_pages() + row.pages > self.tiers.pages_total / 2 {
                self.moves.push(Move::RefuseFloor(digest));
                continue;
            }
            let bytes = u64::from(row.pages) * self.tiers.page_bytes;
            if written > 0 && written + bytes > self.tiers.upload_bytes_max {
                return;
            }
            if !self.make_device_room(row.pages, &digest) {
                continue;
            }
            written += bytes;
            self.pages_available -= row.pages;
            if let Some(row) = self.rows.get_mut(index) {
                row.device = true;
            }
            self.moves.push(Move::Upload(digest, reason));
        }
    }

    fn pinned_pages(&self) -> u32 {
        let held = |row: &&Row| row.device && row.pinned && row.floor == Floor::Device;
        self.rows.iter().filter(held).map(|row| row.pages).sum()
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
        let held = row.pinned && row.floor == Floor::Device;
        let own_place = self.place(&row.digest);
        let for_a_floor = place == usize::MAX && own_place == usize::MAX;
        let wanted_later = own_place > place || (for_a_floor && row.floor < Floor::Device);
        row.device && row.leases == 0 && !held && wanted_later
    }
}

/// A floor that is not met and is not on its way by demand.
fn floor_wants_fetch(row: &Row) -> bool {
    match row.floor {
        Floor::None => false,
        Floor::Disk => !row.verified,
        // Without a pin the floor is a start condition only; keeping it would undo each eviction at once.
        Floor::Host => row.host == HostTier::Absent && !row.device && (row.pinned || !row.verified),
        Floor::Device => !row.device && (row.pinned || !row.verified || row.host == HostTier::Present),
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

    /// `letters` per row: H host, D device, L leased, P pinned to its floor, F fetching; the number is the age order.
    fn row(number: u8, letters: &str, floor: Floor) -> Row {
        Row {
            digest: digest(number),
            host: match letters {
                letters if letters.contains('F') => HostTier::Fetching,
                letters if letters.contains('H') => HostTier::Present,
                _ => HostTier::Absent,
            },
            device: letters.contains('D'),
            bytes: 10,
            pages: 2,
            leases: u32::from(letters.contains('L')),
            floor,
            pinned: letters.contains('P'),
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
            &[Move::Fetch(digest(1), Demand), Move::Upload(digest(2), Demand)],
        );
        // At most two fetches at once; one is on its way already.
        let rows = vec![row(1, "F", none), row(2, "", none), row(3, "", none)];
        check(rows, &[1, 2, 3], 9, 99, &[Move::Fetch(digest(2), Demand)]);
        // Bytes per step are limited.
        let rows = vec![row(1, "H", none), row(2, "H", none), row(3, "H", none)];
        check(rows, &[3, 2, 1], 9, 99, &[Move::Upload(digest(3), Demand), Move::Upload(digest(2), Demand)]);
    }

    #[test]
    fn room_is_made_by_the_longest_idle_and_never_by_the_leased_or_pinned() {
        let none = Floor::None;
        let rows = vec![row(1, "HDL", none), row(2, "HDP", Floor::Device), row(3, "HD", none), row(4, "H", none)];
        check(rows, &[4], 0, 99, &[Move::DropDevice(digest(3), DeviceFull), Move::Upload(digest(4), Demand)]);
        check(vec![row(1, "HDL", none), row(4, "H", none)], &[4], 1, 99, &[]);
        // Who is wanted sooner keeps its place.
        check(vec![row(1, "HD", none), row(4, "H", none)], &[1, 4], 0, 99, &[]);
    }

    #[test]
    fn the_host_budget_holds_and_the_first_in_the_queue_keeps_its_copy() {
        let none = Floor::None;
        let rows = vec![row(1, "H", none), row(2, "HP", Floor::Host), row(3, "H", none)];
        check(rows, &[], 9, 20, &[Move::DropHost(digest(1), HostFull)]);
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
        check(vec![row(1, "HP", Floor::Device)], &[], 9, 99, &[Move::Upload(digest(1), Reason::Floor)]);
        let mut big = row(1, "HP", Floor::Device);
        big.pages = 9;
        check(vec![big], &[], 16, 99, &[Move::RefuseFloor(digest(1))]);
    }
}
