//! A deleted pool takes with it all that was made for it, says so at its adapters, and can be made anew.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE};

const PROMPT: &str = "How do I cook rice?";

/// Kind and name of everything in the namespace that is labelled as the pool's.
fn made_for_pool(space: &Namespace<'_>) -> Vec<String> {
    let kinds = "deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,rolebindings,endpointslices";
    let printed = space.kubectl.output(["get", kinds, "--selector=lorafleet.dev/pool=chat", "-o", "name"]).unwrap();
    printed.lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_deleted_pool_leaves_nothing() {
    let world = crate::world();
    let space = world.namespace("deleted").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let answer = client.say("tickets", PROMPT, 16).unwrap();
    let made = made_for_pool(&space);
    for kind in ["deployment.apps/", "pod/", "service/", "configmap/", "secret/", "serviceaccount/", "rolebinding."] {
        assert!(made.iter().any(|name| name.starts_with(kind)), "no {kind} among {made:?}");
    }

    space.kubectl.output(["delete", "servingpool", "chat", "--wait=false"]).unwrap();
    wait::until("all is gone that was made for the pool", PATIENCE, || {
        let left = made_for_pool(&space);
        if left.is_empty() { Ok(Some(())) } else { anyhow::bail!("left: {left:?}") }
    })
    .unwrap();
    space.says("loraadapter", "tickets", "Placed=False NoPool", &[]).unwrap();
    space.condition("loraadapter", "tickets", "Available", "False").unwrap();
    space.condition("loraadapter", "tickets", "Verified", "True").unwrap();

    let client = space.serve(&["tickets"]).unwrap();
    assert_eq!(client.say("tickets", PROMPT, 16).unwrap(), answer);
}
