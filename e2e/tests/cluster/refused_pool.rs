//! An object of a pool that the API server refuses is named in the pool's status in the server's words; when the reason is gone
//! the pool comes up.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

const QUOTA: &str = "
apiVersion: v1
kind: ResourceQuota
metadata: {name: none}
spec: {hard: {count/deployments.apps: 0}}
";

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_refused_object_is_said_in_the_servers_words() {
    let world = crate::world();
    let space = world.namespace("quota").unwrap();
    space.apply(QUOTA).unwrap();
    wait::until("the quota counts", PATIENCE, || {
        let quota = space.get("resourcequota", "none")?;
        Ok((quota["status"]["used"]["count/deployments.apps"] == "0").then_some(()))
    })
    .unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&space.demo("pool").unwrap()).unwrap();
    let words = ["chat-", "exceeded quota: none", "count/deployments.apps"];
    space.says("servingpool", "chat", "Ready=False ApplyFailed", &words).unwrap();

    space.kubectl.output(["delete", "resourcequota", "none"]).unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    assert_eq!(client.chat("tickets", "Hello", 1).unwrap().status, 200);
}
