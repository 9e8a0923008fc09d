//! The API server refuses a change of the engine's Deployment: the pool says so in its words, what runs serves on and hears of
//! new adapters, and once nothing refuses it any more the change comes by itself.
#![allow(clippy::unwrap_used)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

use crate::policy::Policy;

const WORDS: &str = "engines are frozen until Monday";

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_refused_deployment_is_said_and_holds_nothing_else_up() {
    let world = crate::world();
    let space = world.namespace("refused").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let pods = space.engine_pods().unwrap();

    let label = ["label", "deployment", "chat-engine", "probe=1", "--dry-run=server"];
    let policy = Policy::refuse(&space, "apps", "deployments", "object.metadata.name != 'chat-engine'", WORDS, &label);
    let change = r#"--patch={"spec": {"engine": {"env": [{"name": "COLOUR", "value": "blue"}]}}}"#;
    space.kubectl.output(["patch", "servingpool", "chat", "--type=merge", change]).unwrap();
    let words = ["Deployment/chat-engine", WORDS];
    space.says("servingpool", "chat", "Ready=False ApplyFailed", &words).unwrap();
    space.says("servingpool", "chat", "Reconciling=True ApplyFailed", &words).unwrap();
    space.condition("servingpool", "chat", "Available", "True").unwrap();

    let adapters = space.demo("adapters").unwrap();
    space.apply(adapters.split("---\n").find(|document| document.contains("{name: pirate}")).unwrap()).unwrap();
    space.condition("loraadapter", "pirate", "Ready", "True").unwrap();
    for model in ["smollm2", "tickets"] {
        assert_eq!(client.chat(model, "Hello", 1).unwrap().status, 200, "{model}");
    }
    space.answer(&client, &["pirate"]).unwrap();
    assert_eq!(space.engine_pods().unwrap(), pods);

    drop(policy);
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    wait::until("pods are of the changed template", PATIENCE, || {
        let deployment = space.get("deployment", "chat-engine")?;
        let env = &deployment["spec"]["template"]["spec"]["containers"][0]["env"];
        let changed = env.as_array().is_some_and(|env| env.iter().any(|entry| entry["value"] == "blue"));
        Ok((changed && space.engine_pods()? != pods).then_some(()))
    })
    .unwrap();
    assert_eq!(space.gateway("chat").unwrap().chat("pirate", "Hello", 1).unwrap().status, 200);
}
