//! Engine pods and processes go; the pool says so, heals, and what was served is served again with the same words.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE, World};

const PROMPT: &str = "How do I cook rice?";

fn boot_id(space: &Namespace<'_>) -> Option<String> {
    let report = space.engine().ok()?.get("/v1/lora_adapters").ok()?;
    report.body["bootId"].as_str().map(str::to_owned)
}

/// Waits until another engine process than `before` runs, the pool is Ready again, and the adapter answers as it did.
fn heals(space: &Namespace<'_>, before: &str, answer: &str) {
    wait::until("another engine process runs", PATIENCE, || Ok(boot_id(space).filter(|id| id != before))).unwrap();
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    space.condition("loraadapter", "pirate", "Ready", "True").unwrap();
    let client = space.gateway("chat").unwrap();
    let again =
        wait::until("the adapter answers again", Duration::from_secs(30), || Ok(client.say("pirate", PROMPT, 24).ok()));
    assert_eq!(again.unwrap(), answer);
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_an_engine_that_dies_comes_back_whole() {
    let world = World::shared().unwrap();
    let space = world.namespace("restarts").unwrap();
    let client = space.serve(&["pirate"]).unwrap();
    let answer = client.say("pirate", PROMPT, 24).unwrap();

    // The pod is deleted: another takes its place.
    let first = boot_id(&space).unwrap();
    let pod = space.engine_pods().unwrap().remove(0);
    space.kubectl.output(["delete", "pod", &pod, "--wait=false"]).unwrap();
    space.condition("servingpool", "chat", "Ready", "False").unwrap();
    heals(&space, &first, &answer);

    // The process is killed in place: the same pod starts it again, with what it was told last. From outside nobody reaches a
    // process in somebody else's cluster.
    let Some(cluster) = world.target.own() else {
        println!("left out in a cluster that is not the harness's own: an engine process killed in place");
        return;
    };
    let second = boot_id(&space).unwrap();
    let pod = space.engine_pods().unwrap().remove(0);
    let described = space.get("pod", &pod).unwrap();
    let container = described["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
    let container = container.trim_start_matches("containerd://").to_owned();
    let ready_since = || space.condition("servingpool", "chat", "Ready", "True").unwrap()["lastTransitionTime"].clone();
    let before = ready_since();
    cluster.containerd(&["tasks", "kill", "--signal", "SIGKILL", &container]).run().unwrap();
    heals(&space, &second, &answer);
    // It is back within a second or two, too short to be seen by looking now and then.
    assert_ne!(ready_since(), before, "the pool has said meanwhile that it was not Ready");
    assert_eq!(space.engine_pods().unwrap(), [pod], "the pod stayed");
}
