//! The operator is killed while it works; the next one finishes the work, and a steady state writes nothing.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use lorafleet_e2e::world::{Namespace, PATIENCE};
use lorafleet_e2e::{install, wait};

/// Version of every object that the operator writes, to see whether it wrote again.
fn versions(space: &Namespace<'_>) -> Vec<String> {
    let kinds =
        "basemodels,loraadapters,servingpools,deployments,services,configmaps,secrets,serviceaccounts,rolebindings";
    let found = space.kubectl.json(["get", kinds]).unwrap();
    let items = found["items"].as_array().unwrap().iter();
    items.map(|it| format!("{} {} {}", it["kind"], it["metadata"]["name"], it["metadata"]["resourceVersion"])).collect()
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_killed_operator_is_taken_over() {
    let world = crate::world();
    let space = world.namespace("takeover").unwrap();
    for name in ["base", "adapters", "pool"] {
        space.apply(&space.demo(name).unwrap()).unwrap();
    }
    // Killed again and again in the midst of the first passes, at moments that differ.
    for pause_ms in [150, 400, 900, 1_700] {
        std::thread::sleep(Duration::from_millis(pause_ms));
        let operator = world.kubectl().namespace(install::NAMESPACE);
        let words = ["delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false"];
        operator.output(words).unwrap();
    }
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    space.condition("loraadapter", "tickets", "Ready", "True").unwrap();
    space.condition("loraadapter", "pirate", "Ready", "True").unwrap();
    space.condition("loraadapter", "stranger", "Stalled", "True").unwrap();
    let client = space.gateway("chat").unwrap();
    space.answer(&client, &["tickets"]).unwrap();

    // Settled, it is silent: over ten seconds nothing is written.
    let quiet = Duration::from_secs(10);
    wait::until("nothing is written for ten seconds", PATIENCE, || {
        let before = versions(&space);
        std::thread::sleep(quiet);
        Ok((versions(&space) == before).then_some(()))
    })
    .unwrap();
}
