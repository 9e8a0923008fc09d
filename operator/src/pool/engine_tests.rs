//! Pods that answer more than the operator can hold. Real sockets; what the pods say is made up.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::RawQuery;
use axum::routing::get;
use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterReport, AdapterState, BaseReport, Budgets, Load, Role, Tier};

use super::*;

/// A report of so many adapters.
fn report(adapters: usize) -> Report {
    let digest = Digest::from_bytes([7; 32]);
    let adapter = |index| AdapterReport {
        name: format!("adapter-{index}"),
        namespace: "demo".to_owned(),
        digest,
        state: AdapterState::Ready,
        tier: Tier::Host,
        pinned: true,
        rank: 8,
        bytes: 1000,
        leases: 0,
        waiting: 0,
        idle_ms: None,
        loads: 1,
        evictions: 0,
        last_error: None,
    };
    Report {
        boot_id: "boot".to_owned(),
        generation: 1,
        revision: String::new(),
        ready: true,
        draining: false,
        base: BaseReport { name: "base".to_owned(), digest, origin: None, max_model_tokens: 1 },
        role: Role::Shared,
        budgets: Budgets::default(),
        load: Load::default(),
        holdings: "h1".to_owned(),
        unchanged: false,
        adapters: (0..adapters).map(adapter).collect(),
        aliases: BTreeMap::new(),
    }
}

/// Pods on one port that say this, or only that it has not changed to those who know it.
async fn pods(said: Report, padding_bytes: usize, room_bytes: u64) -> Engines {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let unchanged = Report { unchanged: true, adapters: Vec::new(), aliases: BTreeMap::new(), ..said.clone() };
    let text = |report: &Report| serde_json::to_string(report).unwrap() + &" ".repeat(padding_bytes);
    let (whole, unchanged) = (text(&said), text(&unchanged));
    let answer = move |RawQuery(query): RawQuery| {
        let knows = query.is_some_and(|query| query == "known=h1");
        let body = if knows { unchanged.clone() } else { whole.clone() };
        async { body }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(get(answer))).await });
    // What these tests are about is what comes, not when.
    let hour = std::time::Duration::from_secs(3600);
    let limits = Limits { engine_timeout: hour, report_stands: hour, ..Limits::DEFAULT };
    Engines { port, ..Engines::new(&limits, room_bytes).unwrap() }
}

#[tokio::test]
async fn a_report_above_its_limit_is_refused_with_both_numbers() {
    let engines = pods(report(0), REPORT_BYTES_MAX, 1 << 30).await;
    let error = engines.report("pool", "a", "127.0.0.1", "key").await.unwrap_err().to_string();
    let (_, rest) = error.split_once("the answer has ").unwrap();
    let bytes: usize = rest.split(' ').next().unwrap().parse().unwrap();
    assert!(bytes > REPORT_BYTES_MAX, "{error}");
    assert!(error.ends_with(&format!(" bytes or more, the limit is {REPORT_BYTES_MAX}")), "{error}");
}

const ROOM: u64 = 8 << 20;

/// Asks pods of this pool until there is no room for one more.
async fn fill(engines: &Engines, pool: &str) -> (Vec<Held>, EngineError) {
    let mut held = Vec::new();
    loop {
        match engines.report(pool, &format!("{pool}-{}", held.len()), "127.0.0.1", "key").await {
            Ok(report) => held.push(report),
            Err(error) => return (held, error),
        }
        assert!(held.len() < 100, "nothing stops it");
    }
}

/// Whatever a pod says at length takes room: nothing of a report is forgotten.
#[tokio::test]
async fn long_texts_take_room_too() {
    let long = || "x".repeat(1 << 20);
    let base = BaseReport { name: long(), digest: Digest::from_bytes([7; 32]), origin: None, max_model_tokens: 1 };
    for said in [
        Report { boot_id: long(), ..report(0) },
        Report { revision: long(), ..report(0) },
        Report { base, ..report(0) },
    ] {
        let engines = pods(said, 0, ROOM).await;
        let (held, full) = fill(&engines, "pool").await;
        assert!((2..8).contains(&held.len()), "{} fit: {full}", held.len());
        assert!(engines.room.free_bytes() <= ROOM - (2 << 20));
    }
}

#[tokio::test]
async fn the_reports_of_all_pods_share_one_room() {
    let engines = pods(report(2000), 0, ROOM).await;
    let (held, full) = fill(&engines, "pool").await;
    assert!(matches!(full, EngineError::NoRoom { bytes: ROOM, .. }), "{full}");
    assert!(full.is_an_answer() && held.len() > 2, "{} fit", held.len());
    // What is known of a pod stands while there is no room for more, and a small report always has some.
    let again = engines.report("pool", "pool-0", "127.0.0.1", "key").await.unwrap();
    assert_eq!(again.adapters.len(), 2000);
    let small = pods(report(3), 0, ROOM).await;
    let small = Engines { room: engines.room.clone(), ..small };
    assert_eq!(small.report("pool", "small", "127.0.0.1", "key").await.unwrap().adapters.len(), 3);
    // It comes back when neither a pass nor the memory of the pods holds it.
    drop((held, again));
    engines.lock().clear();
    assert_eq!(engines.room.free_bytes(), ROOM);
}

#[tokio::test]
async fn a_pool_that_says_too_much_leaves_the_others_their_part() {
    let engines = pods(report(2000), 0, ROOM).await;
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>().into_iter();
    // It was alone at first, and took everything.
    engines.share_among(names(&["liar"]), "liar", names(&[]));
    let (all, _) = fill(&engines, "liar").await;
    let alone = all.len();
    drop(all);
    // What it has beyond its part is not kept, though it says that nothing has changed.
    engines.share_among(names(&["liar", "honest", "small"]), "honest", names(&["honest-0", "honest-1"]));
    let mut kept = 0;
    for pod in 0..alone {
        kept += usize::from(engines.report("liar", &format!("liar-{pod}"), "127.0.0.1", "key").await.is_ok());
    }
    assert!(kept > 0 && kept <= alone.div_ceil(2), "{kept} of {alone}");
    let (more, full) = fill(&engines, "liar").await;
    assert!(more.len() <= kept && full.to_string().contains("more than their part of the 8388608 bytes"), "{full}");
    let honest = engines.report("honest", "honest-0", "127.0.0.1", "key").await.unwrap();
    assert_eq!(honest.adapters.len(), 2000);
    // And when both have taken what they can get, one who needs little has it.
    let _filled = fill(&engines, "honest").await;
    let little = pods(report(150), 0, ROOM).await;
    let little = Engines { room: engines.room.clone(), parts: engines.parts, ..little };
    assert_eq!(little.report("small", "small-0", "127.0.0.1", "key").await.unwrap().adapters.len(), 150);
}

#[tokio::test]
async fn holdings_that_have_not_changed_are_not_copied() {
    let engines = pods(report(2000), 0, 4 << 20).await;
    let first = engines.report("pool", "a", "127.0.0.1", "key").await.unwrap();
    let (rows, free) = (first.adapters.as_ptr(), engines.room.free_bytes());
    drop(first);
    let second = engines.report("pool", "a", "127.0.0.1", "key").await.unwrap();
    assert_eq!((second.adapters.as_ptr(), engines.room.free_bytes()), (rows, free));
    assert!(!second.unchanged && second.adapters.len() == 2000);
    // While a pass works with it, it is: both are counted.
    let third = engines.report("pool", "a", "127.0.0.1", "key").await.unwrap();
    assert_eq!(*third, *second);
    assert!(third.adapters.as_ptr() != rows && engines.room.free_bytes() < free);
}
