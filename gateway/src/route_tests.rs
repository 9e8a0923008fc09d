use std::sync::Arc;

use lorafleet_crds::wire::Load;
use proptest::prelude::*;

use super::*;
use crate::view::Holding;

const A: Digest = Digest::from_bytes([0xaa; 32]);
const B: Digest = Digest::from_bytes([0xbb; 32]);
const MB: u64 = 1_000_000;

/// A pod in one line: `ready waiting=3 running=2 tokens=100 age=6000 then=1 out=4 merged=a a:Device b:Loading c`.
/// `down` has no report, `unready` fails its readiness probe.
fn pod(line: &str, now_ms: u64) -> (PodView, u32) {
    let mut report = PodReport {
        received_ms: now_ms,
        outstanding_then: 0,
        boot_id: "boot".to_owned(),
        draining: false,
        role: Role::Shared,
        load: Load::default(),
        base_digest: Digest::from_bytes([0; 32]),
        holdings: Arc::default(),
    };
    let (mut ready, mut down, mut outstanding) = (true, false, 0);
    for word in line.split_whitespace() {
        let (key, value) = word.split_once(['=', ':']).unwrap_or((word, ""));
        let number = || value.parse::<u64>().unwrap_or_else(|_| panic!("{word}"));
        match key {
            "unready" => ready = false,
            "down" => down = true,
            "draining" => report.draining = true,
            "otherbase" => report.base_digest = B,
            "waiting" => report.load.waiting = number() as u32,
            "running" => report.load.running = number() as u32,
            "tokens" => report.load.waiting_tokens = number(),
            "age" => report.received_ms = now_ms - number(),
            "then" => report.outstanding_then = number() as u32,
            "out" => outstanding = number() as u32,
            "merged" => report.role = Role::Merged(if value == "a" { A } else { B }),
            "a" | "b" => {
                let (state, tier, last_error) = match value {
                    "Device" => (AdapterState::Ready, Tier::Device, None),
                    "Host" => (AdapterState::Ready, Tier::Host, None),
                    "Disk" => (AdapterState::Ready, Tier::Disk, None),
                    "Source" => (AdapterState::Ready, Tier::Source, None),
                    "Loading" => (AdapterState::Loading, Tier::Source, None),
                    "Retiring" => (AdapterState::Draining, Tier::Device, None),
                    "Failed" => (AdapterState::Failed, Tier::Source, Some("SourceChanged: it changed".to_owned())),
                    other => panic!("{other}"),
                };
                let digest = if key == "a" { A } else { B };
                Arc::make_mut(&mut report.holdings).adapters.entry(key.to_owned()).or_default().push(Holding {
                    digest,
                    state,
                    tier,
                    bytes: 100 * MB,
                    last_error,
                });
            }
            other => panic!("{other}"),
        }
    }
    let poll_error = down.then(|| "connection refused".to_owned());
    let report = (!down).then(|| Arc::new(report));
    (PodView { address: SocketAddr::from(([10, 0, 0, 1], 8000)), ready, report, poll_error }, outstanding)
}

fn target(name: &str) -> Target {
    match name {
        "a" => Target::Adapter { name: "a".to_owned(), digest: A },
        "b" => Target::Adapter { name: "b".to_owned(), digest: B },
        base => Target::Base { name: base.to_owned() },
    }
}

fn decide(wanted: &str, excluded: &[&str], draw: u64, pods: &[(&str, &str)]) -> String {
    let now_ms = 100_000;
    let mut view = FleetView { base_digest: Some(Digest::from_bytes([0; 32])), ..FleetView::default() };
    let mut outstanding = BTreeMap::new();
    for (name, line) in pods {
        let (pod, count) = pod(line, now_ms);
        view.pods.insert((*name).to_owned(), pod);
        outstanding.insert((*name).to_owned(), count);
    }
    let excluded = excluded.iter().map(|name| (*name).to_owned()).collect();
    let target = target(wanted);
    let request =
        RouteRequest { target: &target, prompt_tokens: 10, excluded: &excluded, outstanding: &outstanding, draw };
    match route(&view, &request, now_ms) {
        Ok(choice) => choice.reasons.iter().map(Reason::to_string).collect::<Vec<_>>().join(" | "),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn check(wanted: &str, pods: &[(&str, &str)], expected: &str) {
    assert_eq!(decide(wanted, &[], 0, pods), expected);
}

#[test]
fn the_nearest_copy_wins_at_equal_load() {
    check(
        "a",
        &[("p0", "a:Source"), ("p1", "a:Host"), ("p2", "a:Device")],
        "p2 2.0 ms = queue 2.0 + load 0.0 from Device, holder | p0 522.0 ms = queue 2.0 + load 520.0 from Source",
    );
    check(
        "a",
        &[("p0", "a:Disk"), ("p1", "a:Host")],
        "p1 12.1 ms = queue 2.0 + load 10.1 from Host, holder | p0 103.0 ms = queue 2.0 + load 101.0 from Disk",
    );
}

#[test]
fn a_loaded_holder_gives_way() {
    check(
        "a",
        &[("p0", "a:Host"), ("p1", "a:Device waiting=20 running=8")],
        "p0 12.1 ms = queue 2.0 + load 10.1 from Host | p1 110.0 ms = queue 110.0 + load 0.0 from Device, holder",
    );
}

#[test]
fn requests_sent_since_the_report_count_as_waiting() {
    check(
        "a",
        &[("p0", "a:Device then=1 out=4"), ("p1", "a:Device waiting=2")],
        "p1 12.0 ms = queue 12.0 + load 0.0 from Device, holder | p0 17.0 ms = queue 17.0 + load 0.0 from Device",
    );
}

#[test]
fn a_dedicated_pod_answers_for_its_adapter_alone() {
    let pods = [("p0", "merged=a a:Device"), ("p1", "b:Device")];
    check("a", &pods, "p0 2.0 ms = queue 2.0 + load 0.0 from Device, holder");
    check("b", &pods, "p1 2.0 ms = queue 2.0 + load 0.0 from Device, holder");
    check("base", &pods, "p1 2.0 ms = queue 2.0 + load 0.0, holder");
    check("base", &pods[..1], "base 'base' is ready on no pod (p0: dedicated to aaaaaaaaaaaa)");
}

#[test]
fn a_pod_with_a_stale_report_is_the_last_resort() {
    let pods = [("p0", "a:Device age=5001"), ("p1", "a:Source tokens=9000")];
    check("a", &pods, "p1 2322.0 ms = queue 1802.0 + load 520.0 from Source, holder");
    check("a", &pods[..1], "p0 2.0 ms = queue 2.0 + load 0.0 from Device, holder, stale report");
}

#[test]
fn a_pod_with_another_base_gives_way_to_any_with_the_right_one() {
    let pods = [("p0", "a:Device otherbase"), ("p1", "a:Source tokens=9000 age=9000")];
    check("a", &pods, "p1 2322.0 ms = queue 1802.0 + load 520.0 from Source, holder, stale report");
    check("a", &pods[..1], "p0 2.0 ms = queue 2.0 + load 0.0 from Device, holder, other base");
}

#[test]
fn nowhere_ready_says_what_stands_in_the_way() {
    let adapter = "adapter 'a@aaaaaaaaaaaa' is ready on no pod";
    check("a", &[], &format!("{adapter}: the pool has no pods"));
    check(
        "a",
        &[("p0", "a:Loading"), ("p1", "unready a:Loading"), ("p2", "a:Failed"), ("p3", "b:Device"), ("p4", "down")],
        &format!(
            "{adapter} (p0: still loading; p1: still loading; p2: failed to load: SourceChanged: it changed; and 2 more)"
        ),
    );
    check(
        "a",
        &[("p0", "unready a:Device"), ("p1", "down"), ("p2", "draining a:Device")],
        &format!("{adapter} (p0: the pod is not ready; p1: no report: connection refused; p2: the pod is draining)"),
    );
    check("a", &[("p0", "a:Retiring")], &format!("{adapter} (p0: being unloaded)"));
    check("a", &[("p0", "b:Device")], &format!("{adapter} (p0: not placed there)"));
}

#[test]
fn a_pod_that_failed_this_request_is_not_asked_again() {
    let pods = [("p0", "a:Device"), ("p1", "a:Source")];
    assert!(decide("a", &["p0"], 0, &pods).starts_with("p1 "));
    assert_eq!(
        decide("a", &["p0", "p1"], 0, &pods),
        "adapter 'a@aaaaaaaaaaaa' is ready on no pod (p0: failed this request; p1: failed this request)"
    );
}

#[test]
fn at_most_three_pods_are_compared() {
    let names: Vec<String> = (0..50).map(|index| format!("p{index:02}")).collect();
    let pods: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "a:Device")).collect();
    let compared = decide("a", &[], (7 << 32) | 3, &pods);
    assert_eq!(compared.matches(" | ").count(), 2, "{compared}");
    assert_eq!(compared.matches("holder").count(), 1, "{compared}");
    assert!(compared.contains("p03 ") && compared.contains("p07 "), "{compared}");
}

fn any_pod() -> impl Strategy<Value = String> {
    let flag = prop_oneof![6 => Just(""), 1 => Just("unready"), 1 => Just("down"), 1 => Just("draining"), 1 => Just("merged=a")];
    let held = prop_oneof![
        Just(""),
        Just("a:Device"),
        Just("a:Host"),
        Just("a:Source"),
        Just("a:Loading"),
        Just("a:Failed"),
        Just("b:Device"),
        Just("a:Disk b:Host")
    ];
    (flag, held, 0..50_u32, 0..50_u32, 0..9_000_u32).prop_map(|(flag, held, waiting, running, age)| {
        format!("{flag} {held} waiting={waiting} running={running} age={age}")
    })
}

proptest! {
    /// Against the definition, read off the pods' lines: the chosen pod may answer, a pod is chosen whenever one may,
    /// and no compared pod is cheaper than the chosen one.
    #[test]
    fn a_choice_is_allowed_and_the_cheapest(lines in prop::collection::vec(any_pod(), 0..8), draw in any::<u64>(), wanted in "[ab]|base") {
        let may = |line: &str| {
            let up = !["unready", "down", "draining"].iter().any(|word| line.contains(word));
            let merged = line.contains("merged");
            up && match wanted.as_str() {
                "a" => ["Device", "Host", "Disk", "Source"].iter().any(|tier| line.contains(&format!("a:{tier}"))),
                "b" => !merged && line.contains("b:"),
                _ => !merged,
            }
        };
        let now_ms = 100_000;
        let mut view = FleetView::default();
        for (index, line) in lines.iter().enumerate() {
            view.pods.insert(index.to_string(), pod(line, now_ms).0);
        }
        let target = target(&wanted);
        let request = RouteRequest { target: &target, prompt_tokens: 1, excluded: &BTreeSet::new(), outstanding: &BTreeMap::new(), draw };
        match route(&view, &request, now_ms) {
            Ok(choice) => {
                let index: usize = choice.pod.parse().unwrap();
                prop_assert!(may(&lines[index]), "chose {} of {:?}", index, lines);
                prop_assert!(choice.reasons.iter().all(|reason| reason.score >= choice.score));
                prop_assert!(choice.reasons.len() <= 3 && choice.reasons[0].pod == choice.pod);
            }
            Err(error) => {
                prop_assert!(!lines.iter().any(|line| may(line)), "{} of {:?}", error, lines);
                prop_assert_eq!(error.pods.len(), lines.len());
            }
        }
    }
}
