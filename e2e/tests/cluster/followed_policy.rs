//! A followed source changes to what is refused, and in the same moment the policy forbids what was served: nothing is served any more.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::install::demo_adapter;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{PATIENCE, adapter};

const PROMPT: &str = "How do I cook rice?";
const FOLDER: &str = "adapters/team/outlawed";

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_what_is_forbidden_is_not_followed_on() {
    let world = crate::world();
    // Of rank 16.
    world.store.put_folder(&demo_adapter("pirate"), FOLDER).unwrap();
    let space = world.namespace("outlawed").unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    let follows = "source: {uri: s3://adapters/team/outlawed, follow: true}";
    space.apply(&adapter("outlawed", "smollm2", follows)).unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    space.condition("loraadapter", "outlawed", "Ready", "True").unwrap();
    space.answer(&client, &["outlawed"]).unwrap();

    world.store.put_folder(&demo_adapter("stranger"), FOLDER).unwrap();
    let stricter = r#"--patch={"spec": {"adapterPolicy": {"maxRank": 8}}}"#;
    space.kubectl.output(["patch", "basemodel", "smollm2", "--type=merge", stricter]).unwrap();
    let status = || Ok::<_, anyhow::Error>(client.chat("outlawed", PROMPT, 1)?.status);
    wait::until("the forbidden one is unknown", PATIENCE, || Ok((status()? == 404).then_some(()))).unwrap();
    space.condition("loraadapter", "outlawed", "Available", "False").unwrap();
    wait::until("no pod holds it", PATIENCE, || {
        let held = space.held()?;
        Ok((!held.iter().any(|it| it.starts_with("outlawed@"))).then_some(()))
    })
    .unwrap();
    // Who was within the policy before is so still.
    assert_eq!(client.chat("tickets", PROMPT, 1).unwrap().status, 200);

    // Of rank 8.
    world.store.put_folder(&demo_adapter("tickets"), FOLDER).unwrap();
    space.condition("loraadapter", "outlawed", "Ready", "True").unwrap();
    space.answer(&client, &["outlawed"]).unwrap();
    assert_eq!(client.say("outlawed", PROMPT, 24).unwrap(), client.say("tickets", PROMPT, 24).unwrap());
}
