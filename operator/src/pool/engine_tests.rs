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
    Engines { port, ..Engines::new(&Limits::DEFAULT, room_bytes).unwrap() }
}

#[tokio::test]
async fn a_report_above_its_limit_is_refused_with_both_numbers() {
    let engines = pods(report(0), REPORT_BYTES_MAX, 1 << 30).await;
    let error = engines.report("a", "127.0.0.1", "key").await.unwrap_err().to_string();
    let (_, rest) = error.split_once("the answer has ").unwrap();
    let bytes: usize = rest.split(' ').next().unwrap().parse().unwrap();
    assert!(bytes > REPORT_BYTES_MAX, "{error}");
    assert!(error.ends_with(&format!(" bytes or more, the limit is {REPORT_BYTES_MAX}")), "{error}");
}

#[tokio::test]
async fn the_reports_of_all_pods_share_one_room() {
    const ROOM: u64 = 4 << 20;
    let engines = pods(report(2000), 0, ROOM).await;
    let mut held = Vec::new();
    let full = loop {
        match engines.report(&format!("pod-{}", held.len()), "127.0.0.1", "key").await {
            Ok(report) => held.push(report),
            Err(error) => break error,
        }
        assert!(held.len() < 100, "nothing stops it");
    };
    assert!(matches!(full, EngineError::NoRoom { bytes: ROOM }), "{full}");
    assert!(full.is_an_answer() && held.len() > 2, "{} fit", held.len());
    // What is known of a pod stands while there is no room for more, and a small report always has some.
    let again = engines.report("pod-0", "127.0.0.1", "key").await.unwrap();
    assert_eq!(again.adapters.len(), 2000);
    let small = pods(report(3), 0, ROOM).await;
    let small = Engines { room: engines.room.clone(), ..small };
    assert_eq!(small.report("small", "127.0.0.1", "key").await.unwrap().adapters.len(), 3);
    // It comes back when neither a pass nor the memory of the pods holds it.
    drop((held, again));
    engines.lock().clear();
    assert_eq!(engines.room.free_bytes(), ROOM);
}

#[tokio::test]
async fn holdings_that_have_not_changed_are_not_copied() {
    let engines = pods(report(2000), 0, 4 << 20).await;
    let first = engines.report("a", "127.0.0.1", "key").await.unwrap();
    let (rows, free) = (first.adapters.as_ptr(), engines.room.free_bytes());
    drop(first);
    let second = engines.report("a", "127.0.0.1", "key").await.unwrap();
    assert_eq!((second.adapters.as_ptr(), engines.room.free_bytes()), (rows, free));
    assert!(!second.unchanged && second.adapters.len() == 2000);
    // While a pass works with it, it is: both are counted.
    let third = engines.report("a", "127.0.0.1", "key").await.unwrap();
    assert_eq!(*third, *second);
    assert!(third.adapters.as_ptr() != rows && engines.room.free_bytes() < free);
}
