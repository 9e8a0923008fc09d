//! A pool whose Secret with the clients' keys is absent says so by its name, and serves once it is there.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_missing_keys_are_named() {
    let world = crate::world();
    let space = world.namespace("keyless").unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&(space.demo("pool").unwrap() + "  gateway: {apiKeysSecretRef: {name: clients}}\n")).unwrap();
    space.says("servingpool", "chat", "Ready=False CredentialsMissing", &["'clients'"]).unwrap();

    let clients = "apiVersion: v1
kind: Secret
metadata: {name: clients}
stringData: {alice: '{\"key\": \"alice-key\", \"models\": [\"smollm2\"]}'}
";
    space.apply(clients).unwrap();
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    let nobody = Client::new(space.reach("service/chat-gateway", 80).unwrap());
    let status = |client: &Client| Ok::<_, anyhow::Error>(client.chat("smollm2", "Hello", 1)?.status);
    wait::until("the key counts", PATIENCE, || Ok((status(&nobody.with_key("alice-key"))? == 200).then_some(())))
        .unwrap();
    assert_eq!(status(&nobody).unwrap(), 401);
}
