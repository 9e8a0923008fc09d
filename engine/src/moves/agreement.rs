//! The decisions are those of the simple way, and cost less.

use std::sync::LazyLock;
use std::time::Duration;

use super::rows::looks_of;
use super::*;
use crate::simulation::random::Random;

static BORN: LazyLock<Instant> = LazyLock::new(Instant::now);

fn digest(number: usize) -> Digest {
    let mut bytes = [0; 32];
    // Not in the order of the numbers.
    bytes[..8].copy_from_slice(&(number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Digest::from_bytes(bytes)
}

fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for at in (1..items.len()).rev() {
        items.swap(at, random.index(at + 1));
    }
}

/// Any adapter, of few sizes and ages, so that there are ties.
fn any_row(number: usize, random: &mut Random) -> Row {
    let chance = |random: &mut Random, one_in: u64| random.below(one_in) == 0;
    let host =
        random.pick(&[HostTier::Absent, HostTier::Absent, HostTier::Present, HostTier::Present, HostTier::Fetching]);
    let pages = random.pick(&[0, 1, 2, 2, 3, 9]);
    let device = pages > 0 && host != HostTier::Fetching && chance(random, 2);
    // What is on its way to the device has its host copy.
    let on_its_way = device && host == HostTier::Present && chance(random, 3);
    let floor = random.pick(&[Floor::None, Floor::None, Floor::Disk, Floor::Host, Floor::Device]);
    let later = |random: &mut Random| *BORN + Duration::from_secs(random.below(6));
    Row {
        digest: digest(number),
        host,
        store: random.pick(&[Store::Here, Store::Here, Store::Away(1), Store::Away(2)]),
        device,
        pages_left: if on_its_way { 1 + random.below(pages.into()) as u32 } else { 0 },
        bytes: random.pick(&[0, 5, 10, 10, 10, 30]),
        pages,
        leases: u32::from(device && !on_its_way && chance(random, 4)),
        floor,
        pinned: chance(random, 3).then(|| later(random)),
        verified: host == HostTier::Present || device || chance(random, 2),
        touched: later(random),
        may_fetch: !chance(random, 8),
    }
}

fn any_tiers(seed: u64) -> Tiers {
    let random = &mut Random::new(seed);
    let count = random.index(16);
    let mut rows: Vec<Row> = (0..count).map(|number| any_row(number, random)).collect();
    shuffle(&mut rows, random);
    // One that nobody knows may be waited for as well.
    let mut demand: Vec<Digest> = (0..=count).map(digest).collect();
    shuffle(&mut demand, random);
    demand.truncate(random.index(count + 1));
    Tiers {
        rows,
        demand,
        pages_available: random.below(12) as u32,
        pages_total: random.pick(&[6, 20, 60]),
        page_bytes: 1,
        host_bytes_total: random.below(140),
        fetches_max: random.pick(&[1, 2, 16]),
        upload_bytes_max: random.pick(&[1, 2, 4, 20]),
        upload_bytes_whole: random.pick(&[0, 3, 12]),
    }
}

#[test]
fn the_moves_are_those_of_the_simple_way() {
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for seed in 0..30_000 {
        let tiers = any_tiers(seed);
        let moves = decide(&tiers);
        assert_eq!(moves, simple::decide(&tiers), "seed {seed}: {tiers:#?}");
        for step in moves {
            let kind = match step {
                Move::DropHost(_, reason) => format!("DropHost {reason:?}"),
                Move::Fetch(_, reason) => format!("Fetch {reason:?}"),
                Move::DropDevice(_, reason) => format!("DropDevice {reason:?}"),
                Move::Upload(_, reason) => format!("Upload {reason:?}"),
                Move::Write(..) => "Write".to_owned(),
                Move::RefuseFloor(_) => "RefuseFloor".to_owned(),
                Move::RefuseHostFloor(_) => "RefuseHostFloor".to_owned(),
                Move::RefuseDemand(_) => "RefuseDemand".to_owned(),
            };
            *seen.entry(kind).or_default() += 1;
        }
    }
    assert_eq!(seen.len(), 11, "a kind of move never came: {seen:?}");
    assert!(seen.values().all(|times| *times > 200), "a kind of move hardly came: {seen:?}");
}

/// Thousands of adapters of which only few fit, and a quarter of them waited for.
fn crowd(count: usize, host_is_full_of: Full) -> Tiers {
    let random = &mut Random::new(count as u64);
    let mut numbers: Vec<usize> = (0..count).collect();
    shuffle(&mut numbers, random);
    let demand: Vec<Digest> = numbers.iter().take(count / 4).copied().map(digest).collect();
    let half = demand.len() / 2;
    let row = |(at, number): (usize, &usize)| {
        let (present, device) = match host_is_full_of {
            Full::CopiesOfTheFirst => (at < half, false),
            Full::CopiesOfOthers => (at >= demand.len(), false),
            Full::Placed => (true, at >= demand.len()),
        };
        Row {
            digest: digest(*number),
            host: if present { HostTier::Present } else { HostTier::Absent },
            store: if number.is_multiple_of(2) { Store::Here } else { Store::Away(1) },
            device,
            pages_left: 0,
            // For one of those that wait, all others would have to go.
            bytes: if present { 10 } else { 10 * count as u64 },
            // Nobody's pages are enough for those that wait.
            pages: if device { 1 } else { 2 * count as u32 },
            leases: 0,
            floor: Floor::Host,
            pinned: None,
            verified: present,
            touched: *BORN + Duration::from_millis(random.below(1_000_000)),
            may_fetch: true,
        }
    };
    let rows: Vec<Row> = numbers.iter().enumerate().map(row).collect();
    let present = rows.iter().filter(|row| row.host == HostTier::Present).count();
    Tiers {
        rows,
        demand,
        pages_available: 0,
        pages_total: count as u32,
        page_bytes: 1,
        host_bytes_total: 10 * present as u64,
        fetches_max: u32::MAX,
        upload_bytes_max: 1 << 20,
        upload_bytes_whole: 0,
    }
}

#[derive(Clone, Copy, Debug)]
enum Full {
    CopiesOfTheFirst,
    CopiesOfOthers,
    Placed,
}

#[test]
fn a_look_costs_little_more_than_looking_at_each_once() {
    for full in [Full::CopiesOfTheFirst, Full::CopiesOfOthers, Full::Placed] {
        let small = crowd(1_000, full);
        let (moves, few) = looks_of(|| decide(&small));
        let (simple, many) = looks_of(|| simple::decide(&small));
        assert_eq!(moves, simple, "{full:?}");
        assert!(many > 10 * few, "{full:?}: {many} looks the simple way, {few} here: the test tests nothing");
        for count in [1_000, 10_000] {
            let (_, looks) = looks_of(|| decide(&crowd(count, full)));
            assert!(looks <= 20 * count, "{full:?}: {looks} looks at {count} adapters");
        }
    }
}
