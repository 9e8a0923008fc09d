//! An engine cannot load what intake has verified: the adapter is never Ready, says why and on which pod, and is served once the
//! reason is gone.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::install::{self, demo_adapter};
use lorafleet_e2e::world::{World, adapter};

const FOLDER: &str = "adapters/team/vanishing";

/// An operator that does not look for changed sources, as long as this lives: it would refuse the adapter before an engine does.
struct Unhurried<'a>(&'a World);

impl<'a> Unhurried<'a> {
    fn start(world: &'a World) -> Self {
        install::set(&Cache::open().unwrap(), world.kubectl(), &["operator.sourceCheckSeconds=3600"]).unwrap();
        Self(world)
    }
}

impl Drop for Unhurried<'_> {
    fn drop(&mut self) {
        let again = install::set(&Cache::open().unwrap(), self.0.kubectl(), &[install::SOURCE_CHECKS]);
        // A second panic would end the whole program of tests.
        assert!(again.is_ok() || std::thread::panicking(), "{again:?}");
    }
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_failed_load_names_its_pod() {
    let world = crate::world();
    let unhurried = Unhurried::start(world);
    world.store.put_folder(&demo_adapter("pirate"), FOLDER).unwrap();
    let space = world.namespace("vanishing").unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    let pool = space.demo("pool").unwrap() + "  adapterSelector: {matchLabels: {tier: gold}}\n";
    space.apply(&pool).unwrap();
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    let client = space.gateway("chat").unwrap();
    space.answer(&client, &["smollm2"]).unwrap();
    space.apply(&adapter("vanishing", "smollm2", &format!("source: {{uri: 's3://{FOLDER}'}}"))).unwrap();
    space.says("loraadapter", "vanishing", "Placed=False NoPool", &[]).unwrap();
    space.condition("loraadapter", "vanishing", "Verified", "True").unwrap();

    world.store.delete(&format!("{FOLDER}/adapter_model.safetensors")).unwrap();
    space.kubectl.output(["label", "loraadapter", "vanishing", "tier=gold"]).unwrap();
    let pod = space.engine_pods().unwrap().remove(0);
    let words = [pod.as_str(), "holds no adapter_model.safetensors"];
    for condition in ["RolledOut", "Ready"] {
        space.says("loraadapter", "vanishing", &format!("{condition}=False LoadFailed"), &words).unwrap();
    }
    let status = space.get("loraadapter", "vanishing").unwrap()["status"].clone();
    let placement = &status["pools"][0]["placements"][0];
    assert!(placement["pod"] == pod.as_str() && placement["ready"] == false, "{status}");
    let answer = client.chat("vanishing", "Hello", 1).unwrap();
    assert!([404, 503].contains(&answer.status), "{}", answer.body);
    assert_eq!(client.chat("smollm2", "Hello", 1).unwrap().status, 200);

    world.store.put_folder(&demo_adapter("pirate"), FOLDER).unwrap();
    space.condition("loraadapter", "vanishing", "Ready", "True").unwrap();
    space.answer(&client, &["vanishing"]).unwrap();
    drop(unhurried);
}
