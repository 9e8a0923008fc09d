//! An adapter that may not or cannot be served says why, names both values, and never reaches an engine.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::install::demo_adapter;
use lorafleet_e2e::world::World;

/// Name, source, condition that is False, its reason, and words of its message.
const CASES: [(&str, &str, &str, &str, &[&str]); 4] = [
    ("stranger", "s3://adapters/team/stranger", "Verified", "BaseMismatch", &["sha256:26b9187c", "sha256:327d685a"]),
    ("high", "s3://adapters/team/pirate", "Verified", "RankTooHigh", &["16", "8"]),
    (
        "forbidden",
        "s3://adapters/private/pirate",
        "SourceAllowed",
        "SourceForbidden",
        &["s3://adapters/private/pirate"],
    ),
    ("corrupt", "s3://adapters/team/corrupt", "Verified", "Malformed", &["lora_A.weight", "457728", "452964"]),
];

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_refused_adapters_say_why() {
    let world = World::shared().unwrap();
    let folder = std::env::temp_dir().join(format!("lorafleet-corrupt-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(demo_adapter("tickets").join("adapter_config.json"), folder.join("adapter_config.json")).unwrap();
    let whole = std::fs::read(demo_adapter("tickets").join("adapter_model.safetensors")).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), &whole[..whole.len() / 2]).unwrap();
    world.store.put_folder(&folder, "adapters/team/corrupt").unwrap();
    std::fs::remove_dir_all(folder).unwrap();

    let space = world.namespace("refusals").unwrap();
    // The same base with a lower limit, so that one of the demo's own adapters is beyond it.
    let base = space.demo("base").unwrap().replace("maxRank: 32", "maxRank: 8");
    space.apply(&base).unwrap();
    for (name, uri, ..) in CASES {
        space.apply(&adapter(name, uri)).unwrap();
    }
    let client = space.serve(&["tickets"]).unwrap();

    for (name, _, condition, reason, words) in CASES {
        let found = space.condition("loraadapter", name, condition, "False").unwrap();
        assert_eq!(found["reason"], reason, "{name}: {found}");
        let message = found["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "{name}: `{word}` is not in `{message}`");
        }
        let ready = space.condition("loraadapter", name, "Ready", "False").unwrap();
        assert_eq!(ready["reason"], reason, "{name}: {ready}");
        space.condition("loraadapter", name, "Stalled", "True").unwrap();
        let answer = client.chat(name, "Hello", 1).unwrap();
        assert_eq!(answer.status, 404, "{name}: {}", answer.body);
    }
    let report = space.engine().unwrap().get("/v1/lora_adapters").unwrap().body;
    let held: Vec<&str> = report["adapters"].as_array().unwrap().iter().filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(held, ["tickets"]);
    assert_eq!(client.chat("tickets", "Hello", 1).unwrap().status, 200);
}

fn adapter(name: &str, uri: &str) -> String {
    format!(
        "apiVersion: lorafleet.dev/v1alpha1
kind: LoraAdapter
metadata: {{name: {name}}}
spec:
  baseModelRef: {{name: smollm2}}
  source: {{uri: {uri}}}
"
    )
}
