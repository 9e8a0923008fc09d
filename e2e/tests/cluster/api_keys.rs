//! Clients with keys see and use the models that are theirs. Their keys, and those between gateway and engine, are changed without
//! a restart.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE};

const PROMPT: &str = "Hello";

/// The Secret that the pool names, with this key for one client that may use the base and `tickets`.
fn clients(key: &str) -> String {
    format!(
        "apiVersion: v1
kind: Secret
metadata: {{name: clients}}
stringData:
  alice: '{{\"key\": \"{key}\", \"models\": [\"smollm2\", \"tickets\"]}}'
"
    )
}

fn models(client: &Client) -> Vec<String> {
    let listed = client.get("/v1/models").unwrap().body;
    let mut names: Vec<String> =
        listed["data"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect();
    names.sort_unstable();
    names
}

/// Waits until the engine takes this key, or no longer does.
fn engine_answers(space: &Namespace<'_>, client: &Client, status: u16) {
    let what = format!("the engine in {} answers {status}", space.name);
    wait::until(&what, PATIENCE, || Ok((client.get("/v1/lora_adapters")?.status == status).then_some(()))).unwrap();
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_keys_say_who_may_what() {
    let world = crate::world();
    let space = world.namespace("keys").unwrap();
    space.apply(&clients("alice-key-1")).unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&space.demo("adapters").unwrap()).unwrap();
    space.apply(&(space.demo("pool").unwrap() + "  gateway: {apiKeysSecretRef: {name: clients}}\n")).unwrap();
    for (kind, name) in [("servingpool", "chat"), ("loraadapter", "tickets"), ("loraadapter", "pirate")] {
        space.condition(kind, name, "Ready", "True").unwrap();
    }
    let nobody = Client::new(space.reach("service/chat-gateway", 80).unwrap());
    let asked = |client: &Client, model: &str| Ok::<_, anyhow::Error>(client.chat(model, PROMPT, 1)?.status);
    let status = |client: &Client, model: &str| asked(client, model).unwrap();
    let alice = nobody.with_key("alice-key-1");
    wait::until("the gateway answers", PATIENCE, || Ok((asked(&alice, "tickets")? == 200).then_some(()))).unwrap();
    assert_eq!((status(&nobody, "tickets"), status(&nobody.with_key("alice-key-2"), "tickets")), (401, 401));
    assert_eq!((status(&alice, "smollm2"), status(&alice, "pirate"), status(&alice, "nosuch")), (200, 404, 404));
    assert_eq!(models(&alice), ["smollm2", "tickets"]);

    let pods = |component: &str| {
        let selector = format!("--selector=app.kubernetes.io/component={component}");
        let starts = "jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].restartCount}{end}";
        space.kubectl.output(["get", "pods", &selector, "-o", starts]).unwrap()
    };
    let before = (pods("engine"), pods("gateway"));
    let old_engine = space.engine().unwrap();
    space.apply(&clients("alice-key-2")).unwrap();
    space.kubectl.output(["delete", "secret", "chat-engine-keys"]).unwrap();
    // The kubelet brings new content to running pods within a minute or so.
    let new_alice = nobody.with_key("alice-key-2");
    wait::until("the new key counts", PATIENCE, || Ok((asked(&new_alice, "tickets")? == 200).then_some(()))).unwrap();
    wait::until("the old key no longer counts", PATIENCE, || Ok((asked(&alice, "tickets")? == 401).then_some(())))
        .unwrap();
    wait::until("the operator has made new keys", PATIENCE, || Ok(space.engine().ok())).unwrap();
    engine_answers(&space, &space.engine().unwrap(), 200);
    engine_answers(&space, &old_engine, 401);
    wait::until("gateway and engine agree", PATIENCE, || Ok((asked(&new_alice, "tickets")? == 200).then_some(())))
        .unwrap();
    space.condition("loraadapter", "tickets", "Ready", "True").unwrap();
    assert_eq!((pods("engine"), pods("gateway")), before, "nothing was restarted");
}
