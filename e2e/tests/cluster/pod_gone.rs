//! An adapter is deleted whose pods are gone: the deletion ends at once, and pods that come later never hear of it.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_deletion_waits_for_no_pod() {
    let world = crate::world();
    let space = world.namespace("podless").unwrap();
    space.serve(&["tickets", "pirate"]).unwrap();
    space.kubectl.output(["scale", "servingpool", "chat", "--replicas=0"]).unwrap();
    wait::until("no engine pod is left", PATIENCE, || {
        let pods = space.engine_pods()?;
        if pods.is_empty() { Ok(Some(())) } else { anyhow::bail!("left: {pods:?}") }
    })
    .unwrap();
    space.says("loraadapter", "pirate", "Available=False NoReadyPod", &[]).unwrap();

    // kubectl waits until the object is gone.
    space.kubectl.output(["delete", "loraadapter", "pirate", "--timeout=300s"]).unwrap();
    assert!(space.get("loraadapter", "pirate").is_err());
    space.kubectl.output(["scale", "servingpool", "chat", "--replicas=1"]).unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    assert_eq!(client.chat("pirate", "Hello", 1).unwrap().status, 404);
    let held = space.held().unwrap();
    assert!(held.len() == 1 && held[0].starts_with("tickets@"), "{held:?}");
}
