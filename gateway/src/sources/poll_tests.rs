use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::routing::get;
use clap::Parser as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::super::Sources;
use super::super::assemble::Endpoint;
use super::{Patience, Reports, round};
use crate::fleet::Fleet;
use crate::limits::Limits;
use crate::load::InFlight;
use crate::metrics::Metrics;
use crate::upstream::Upstream;
use crate::vital::Vital;

/// Sources that reach pods, and no API server.
fn sources() -> Sources {
    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        limits: Limits,
    }
    let limits = Flags::parse_from(["test"]).limits;
    let client = kube::Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
    Sources {
        client,
        namespace: "demo".to_owned(),
        pool: "chat".to_owned(),
        upstream: Upstream::new(&limits),
        engine_key: tokio::sync::watch::channel(None).1,
        in_flight: InFlight::new(&limits),
        metrics: Arc::new(Metrics::new(10).unwrap()),
        fleet: Fleet::new(Duration::ZERO),
        vital: Vital::default(),
    }
}

/// What a pod reports, and what it was told is known.
#[derive(Default)]
struct Pod {
    holdings: Mutex<String>,
    asked: Mutex<Vec<String>>,
}

async fn report(State(pod): State<Arc<Pod>>, Query(query): Query<BTreeMap<String, String>>) -> axum::Json<Value> {
    let holdings = pod.holdings.lock().unwrap().clone();
    pod.asked.lock().unwrap().push(query["known"].clone());
    let unchanged = query["known"] == holdings;
    let digest = format!("sha256:{}", "a".repeat(64));
    let row = json!({
        "name": holdings, "digest": digest, "state": "Ready", "tier": "Host", "pinned": true, "rank": 8,
        "bytes": 1, "leases": 0, "waiting": 0, "loads": 1, "evictions": 0,
    });
    axum::Json(json!({
        "bootId": "boot", "generation": 1, "revision": "r", "ready": true, "draining": false,
        "base": { "name": "base", "digest": digest, "maxModelTokens": 10 }, "role": "shared",
        "budgets": serde_json::to_value(lorafleet_crds::wire::Budgets::default()).unwrap(),
        "load": { "running": 1, "waiting": 2, "waitingTokens": 3 },
        "holdings": holdings, "unchanged": unchanged,
        "adapters": if unchanged { json!([]) } else { json!([row]) },
        "aliases": if unchanged { json!({}) } else { json!({ holdings: digest }) },
    }))
}

async fn listening(pod: &Arc<Pod>) -> SocketAddr {
    let routes = Router::new().route("/v1/lora_adapters", get(report)).with_state(Arc::clone(pod));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

fn names(reports: &Reports, pod: &str) -> Vec<String> {
    reports[pod].report.iter().flat_map(|report| report.holdings.adapters.keys().cloned()).collect()
}

#[tokio::test]
async fn holdings_that_are_known_are_not_sent_again() {
    let (sources, pod) = (sources(), Arc::new(Pod::default()));
    let endpoints = BTreeMap::from([("p0".to_owned(), Endpoint { address: listening(&pod).await, ready: true })]);
    let mut reports = Reports::new();
    let patience = Patience { early: Duration::ZERO, answer: Duration::from_secs(60) };
    for (holdings, asked) in [("a", ""), ("a", "a"), ("b", "a"), ("b", "b"), ("not plain", "b"), ("not plain", "")] {
        *pod.holdings.lock().unwrap() = holdings.to_owned();
        reports = round(&sources, endpoints.clone(), &reports, patience, |_| ()).await;
        assert_eq!(reports["p0"].error, None);
        assert_eq!(names(&reports, "p0"), [holdings]);
        assert_eq!(reports["p0"].report.as_ref().unwrap().load.waiting, 2);
        assert_eq!(pod.asked.lock().unwrap().last().unwrap(), asked);
    }
}

#[tokio::test]
async fn a_silent_pod_does_not_hold_back_what_the_others_say() {
    let (sources, pod) = (sources(), Arc::new(Pod::default()));
    *pod.holdings.lock().unwrap() = "a".to_owned();
    // It takes connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = |address| Endpoint { address, ready: true };
    let endpoints = BTreeMap::from([
        ("p0".to_owned(), endpoint(listening(&pod).await)),
        ("p1".to_owned(), endpoint(silent.local_addr().unwrap())),
    ]);
    // The slower the machine, the longer the one that speaks may take.
    for early_ms in [50, 200, 1_000, 5_000, 25_000] {
        let patience = Patience { early: Duration::from_millis(early_ms), answer: Duration::from_millis(2 * early_ms) };
        let early = Mutex::new(None);
        let before = Reports::new();
        let reports = round(&sources, endpoints.clone(), &before, patience, |reports| {
            *early.lock().unwrap() = Some((reports.contains_key("p0"), reports.contains_key("p1")));
        });
        let reports = reports.await;
        let silence = format!("no answer within {} ms", 2 * early_ms);
        assert_eq!(reports["p1"].error, Some(silence));
        let (heard, silent_is_known) = early.into_inner().unwrap().unwrap_or_default();
        if heard && !silent_is_known {
            assert_eq!(names(&reports, "p0"), ["a"]);
            return;
        }
    }
    panic!("the one that speaks is not heard before the silent one is given up");
}
