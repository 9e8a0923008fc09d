//! Operator and gateways may do what they must, and the API server itself says that they may do no more.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::world::PATIENCE;
use lorafleet_e2e::{install, wait};

/// Verb, and resource with a name or a part of it where that matters.
const OPERATOR_MAY: [&str; 7] = [
    "list loraadapters",
    "patch loraadapters --subresource=status",
    "create deployments.apps",
    "create secrets",
    "list pods",
    "bind clusterrole/lorafleet-gateway",
    "create events.events.k8s.io",
];
const OPERATOR_MAY_NOT: [&str; 16] = [
    "patch loraadapters",
    "delete loraadapters",
    "update servingpools",
    "create basemodels",
    "create pods",
    "delete pods",
    "create pods --subresource=exec",
    "delete deployments.apps",
    "update secrets",
    "delete secrets",
    "create clusterroles",
    "create clusterrolebindings",
    "bind clusterrole/cluster-admin",
    "escalate clusterroles",
    "impersonate users",
    "list nodes",
];
const GATEWAY_MAY: [&str; 4] =
    ["watch loraadapters", "watch servingpools", "watch basemodels", "watch endpointslices.discovery.k8s.io"];
const GATEWAY_MAY_NOT: [&str; 6] = [
    "get secrets",
    "list pods",
    "list services",
    "patch loraadapters --subresource=status",
    "patch servingpools",
    "create events",
];

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_rights_are_those_that_are_needed() {
    let world = crate::world();
    let space = world.namespace("rights").unwrap();
    let elsewhere = world.namespace("elsewhere").unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&space.demo("pool").unwrap()).unwrap();
    wait::until("the gateway has its account and role", PATIENCE, || {
        space.get("serviceaccount", "chat-gateway")?;
        space.get("rolebinding", "chat-gateway").map(Some)
    })
    .unwrap();
    let operator = format!("{}:{}", install::NAMESPACE, "lorafleet-operator");
    let gateway = format!("{}:chat-gateway", space.name);
    for (account, namespace, allowed, list) in [
        (&operator, &space, "yes", &OPERATOR_MAY[..]),
        (&operator, &space, "no", &OPERATOR_MAY_NOT),
        (&gateway, &space, "yes", &GATEWAY_MAY),
        (&gateway, &space, "no", &GATEWAY_MAY_NOT),
        // Not a namespace further.
        (&gateway, &elsewhere, "no", &GATEWAY_MAY),
    ] {
        for action in list {
            let words = ["auth", "can-i", &format!("--as=system:serviceaccount:{account}")];
            let asked = namespace.kubectl.args(words).args(action.split(' ')).shell().finish().unwrap();
            let (said, namespace) = (asked.stdout.trim(), &namespace.name);
            assert!(
                said == allowed || said.starts_with(&format!("{allowed} ")),
                "{account} in {namespace}: {action}: {said} {}",
                asked.stderr
            );
        }
    }
}
