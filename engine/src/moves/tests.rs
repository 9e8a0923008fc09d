//! What is decided, case by case.

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
    let moves = [Move::DropDevice(digest(1), DeviceFull), Move::Upload(digest(2), Demand), Move::Write(digest(2), 2)];
    check(rows, &[2, 1], 0, 99, &moves);
}
