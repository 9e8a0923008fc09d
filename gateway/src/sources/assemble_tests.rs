use std::fmt::Write as _;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{Load, Role};
use serde_json::{Value, json};

use super::*;

fn digest(byte: u8) -> Digest {
    Digest::from_bytes([byte; 32])
}

fn adapter_object(name: &str, created: &str, spec: Value, status: Value) -> LoraAdapter {
    let mut object = json!({
        "apiVersion": "lorafleet.dev/v1alpha1", "kind": "LoraAdapter",
        "metadata": {"name": name, "namespace": "demo", "creationTimestamp": created, "labels": {"team": "a"}},
        "spec": {"baseModelRef": {"name": "smollm2"}, "source": {"uri": "s3://adapters/x"}},
    });
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    if !status.is_null() {
        object["status"] = status;
    }
    serde_json::from_value(object).unwrap()
}

fn pool(spec: Value) -> Pool {
    let mut object = json!({
        "apiVersion": "lorafleet.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": "chat", "namespace": "demo", "creationTimestamp": "2026-01-01T00:00:10Z"},
        "spec": {"baseModelRef": {"name": "smollm2"}},
    });
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn condition_json(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// The view's adapters, one line each.
fn shown(pool: Pool, adapters: Vec<LoraAdapter>) -> String {
    let objects = Objects { namespace: "demo".to_owned(), pool: Some(pool), adapters, ..Objects::default() };
    let view = assemble(&objects, &BTreeMap::new());
    let mut text = String::new();
    for (name, adapter) in view.adapters.iter() {
        let short = |digests: &[Digest]| digests.iter().map(Digest::short).collect::<Vec<_>>().join("+");
        let current = adapter.current.map(|current| current.short());
        write!(text, "{name} current={current:?} others={} rank={}", short(&adapter.others), adapter.rank).unwrap();
        if let Some(obstacle) = &adapter.obstacle {
            write!(text, " refused={} {}: {}", obstacle.refused, obstacle.reason, obstacle.message).unwrap();
        }
        text.push('\n');
    }
    text
}

#[test]
fn adapters_of_the_pool_are_seen_as_their_objects_say() {
    // `rank` is that of what the spec asks for now; what answers has another.
    let known =
        json!({"digest": digest(0xa1), "ranks": {"q_proj": [4, 8], "v_proj": [2]}, "weightsBytes": 1, "sizeBytes": 1});
    let ready = json!({"currentRevision": digest(0xa1), "candidateRevision": digest(0xa2), "rank": 16, "servedName": "support", "revisions": [known],
        "pools": [{"name": "chat", "mode": "Shared", "reason": "x", "held": [digest(0xa3)]},
                  {"name": "else", "mode": "Shared", "reason": "x", "held": [digest(0xa4)]}],
        "conditions": [condition_json("Ready", "True", "Succeeded", "served")]});
    let refused = json!({"conditions": [condition_json("Ready", "False", "RankTooHigh", "rank 64 is above 16"),
        condition_json("Stalled", "True", "RankTooHigh", "x")]});
    let working = json!({"conditions": [condition_json("Ready", "False", "InProgress", "3 of 9 MB"),
        condition_json("Stalled", "False", "InProgress", "x")]});
    let adapters = vec![
        adapter_object("one", "2026-01-01T00:00:00Z", json!({"servedName": "support"}), ready),
        adapter_object("bad", "2026-01-01T00:00:00Z", json!({}), refused),
        adapter_object("busy", "2026-01-01T00:00:00Z", json!({}), working),
        adapter_object("new", "2026-01-01T00:00:00Z", json!({}), Value::Null),
        adapter_object("foreign", "2026-01-01T00:00:00Z", json!({"baseModelRef": {"name": "other"}}), Value::Null),
    ];
    assert_eq!(
        shown(pool(json!({})), adapters),
        "\
bad current=None others= rank=0 refused=true RankTooHigh: rank 64 is above 16
busy current=None others= rank=0 refused=false InProgress: 3 of 9 MB
new current=None others= rank=0
support current=Some(\"a1a1a1a1a1a1\") others=a2a2a2a2a2a2+a3a3a3a3a3a3 rank=8
"
    );
}

#[test]
fn the_older_object_has_the_name() {
    let status = |byte: u8| json!({"currentRevision": digest(byte), "servedName": "support"});
    let adapters = vec![
        adapter_object("young", "2026-01-01T00:00:02Z", json!({"servedName": "support"}), status(2)),
        adapter_object("support", "2026-01-01T00:00:01Z", json!({}), status(1)),
    ];
    assert_eq!(shown(pool(json!({})), adapters), "support current=Some(\"010101010101\") others= rank=0\n");
    let same_second = vec![
        adapter_object("a-new", "2026-01-01T00:00:01Z", json!({"servedName": "support"}), json!({})),
        adapter_object("support", "2026-01-01T00:00:01Z", json!({}), status(1)),
    ];
    assert_eq!(shown(pool(json!({})), same_second), "support current=Some(\"010101010101\") others= rank=0\n");
}

#[test]
fn the_pools_selector_counts() {
    let adapters = || vec![adapter_object("one", "2026-01-01T00:00:00Z", json!({}), Value::Null)];
    let select = |labels: Value| pool(json!({"adapterSelector": labels}));
    assert_eq!(shown(select(json!({"matchLabels": {"team": "b"}})), adapters()), "");
    let seen = "one current=None others= rank=0\n";
    assert_eq!(shown(select(json!({"matchLabels": {"team": "a"}})), adapters()), seen);
    let either = json!({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]});
    assert_eq!(shown(select(either), adapters()), seen);
}

/// A gateway may be older than the pool that it serves.
#[test]
fn what_is_new_in_a_pool_hides_nothing() {
    let adapters = vec![adapter_object("one", "2026-01-01T00:00:00Z", json!({}), Value::Null)];
    let newer = json!({"engine": {"backend": "of tomorrow"}, "gateway": {"serviceType": 7}, "replicas": "many"});
    assert_eq!(shown(pool(newer), adapters), "one current=None others= rank=0\n");
}

#[test]
fn what_is_being_deleted_is_gone() {
    let mut adapter = adapter_object("one", "2026-01-01T00:00:00Z", json!({}), json!({"currentRevision": digest(1)}));
    adapter.metadata.deletion_timestamp = adapter.metadata.creation_timestamp.clone();
    assert_eq!(shown(pool(json!({})), vec![adapter]), "");
    let mut pool = pool(json!({}));
    pool.metadata.deletion_timestamp = pool.metadata.creation_timestamp.clone();
    let objects = Objects { namespace: "demo".to_owned(), pool: Some(pool), ..Objects::default() };
    assert_eq!(assemble(&objects, &BTreeMap::new()).base, "");
}

#[test]
fn the_base_is_what_its_object_has_pinned() {
    let base = |name: &str, byte: u8| {
        let object = json!({
            "apiVersion": "lorafleet.dev/v1alpha1", "kind": "BaseModel", "metadata": {"name": name, "namespace": "demo"},
            "spec": {"source": {"uri": "s3://models/x"}}, "status": {"digest": digest(byte)},
        });
        serde_json::from_value(object).unwrap()
    };
    let bases = vec![base("other", 1), base("smollm2", 2)];
    let objects = Objects { pool: Some(pool(json!({}))), bases, ..Objects::default() };
    assert_eq!(assemble(&objects, &BTreeMap::new()).base_digest, Some(digest(2)));
    let objects = Objects { pool: Some(pool(json!({}))), ..Objects::default() };
    assert_eq!(assemble(&objects, &BTreeMap::new()).base_digest, None);
}

fn slice(endpoints: Value) -> Arc<EndpointSlice> {
    Arc::new(
        serde_json::from_value(json!({
            "addressType": "IPv4", "metadata": {"name": "chat-engine-x"}, "endpoints": endpoints,
            "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
        }))
        .unwrap(),
    )
}

fn endpoint(pod: &str, address: &str, conditions: Value) -> Value {
    json!({"addresses": [address], "targetRef": {"kind": "Pod", "name": pod}, "conditions": conditions})
}

#[test]
fn pods_come_from_all_slices_with_their_readiness() {
    let slices = [
        slice(json!([
            endpoint("p0", "10.88.0.2", json!({"ready": true})),
            endpoint("p1", "10.88.0.3", json!({"ready": false, "serving": false})),
            endpoint("p2", "10.88.0.4", json!({"ready": true, "terminating": true})),
            endpoint("p3", "10.88.0.5", json!({})),
            endpoint("p4", "10.88.0.6", json!({"ready": false})),
            endpoint("p5", "not an address", json!({"ready": true})),
        ])),
        slice(json!([
            endpoint("p4", "10.88.0.7", json!({"ready": true})),
            endpoint("p0", "10.88.0.9", json!({"ready": false}))
        ])),
    ];
    let text: Vec<String> = endpoints(&slices)
        .iter()
        .map(|(name, endpoint)| format!("{name} {} {}", endpoint.address, endpoint.ready))
        .collect();
    assert_eq!(
        text,
        [
            "p0 10.88.0.2:8000 true",
            "p1 10.88.0.3:8000 false",
            "p2 10.88.0.4:8000 false",
            "p3 10.88.0.5:8000 true",
            "p4 10.88.0.7:8000 true"
        ]
    );
}

#[test]
fn a_report_belongs_to_one_address() {
    let report = Arc::new(PodReport {
        received_ms: 1,
        outstanding_then: 0,
        boot_id: "boot".to_owned(),
        draining: false,
        role: Role::Shared,
        load: Load::default(),
        base_digest: digest(0),
        holdings: Arc::default(),
    });
    let polled = |address: [u8; 4]| Polled {
        address: SocketAddr::from((address, 8000)),
        report: Some(Arc::clone(&report)),
        error: Some("late".to_owned()),
    };
    let objects = Objects {
        namespace: "demo".to_owned(),
        pool: Some(pool(json!({}))),
        slices: vec![slice(json!([endpoint("p0", "10.88.0.2", json!({})), endpoint("p1", "10.88.0.3", json!({}))]))],
        ..Objects::default()
    };
    let polled = BTreeMap::from([
        ("p0".to_owned(), polled([10, 88, 0, 2])),
        ("p1".to_owned(), polled([10, 88, 0, 99])),
        ("gone".to_owned(), polled([10, 88, 0, 4])),
    ]);
    let view = assemble(&objects, &polled);
    let known: Vec<_> =
        view.pods.iter().map(|(name, pod)| (name.as_str(), pod.report.is_some(), pod.poll_error.is_some())).collect();
    assert_eq!(known, [("p0", true, true), ("p1", false, false)]);
    assert_eq!((view.base.as_str(), view.base_created_unix_s), ("smollm2", 1_767_225_610));
}
