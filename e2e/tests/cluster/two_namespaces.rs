//! The same names in two namespaces are two fleets that know nothing of each other.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE, adapter};

const PROMPT: &str = "How do I cook rice?";

/// A pool with one adapter, called `same` whichever of the demo's it is.
fn serve(space: &Namespace<'_>, source: &str) -> Client {
    space.apply(&space.demo("base").unwrap()).unwrap();
    let spec = format!("source: {{uri: s3://adapters/team/{source}}}");
    space.apply(&adapter("same", "smollm2", &spec)).unwrap();
    let client = space.serve(&[]).unwrap();
    space.condition("loraadapter", "same", "Ready", "True").unwrap();
    space.answer(&client, &["same"]).unwrap();
    client
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_namespaces_do_not_meet() {
    let world = crate::world();
    let (one, two) = (world.namespace("one").unwrap(), world.namespace("other").unwrap());
    let (first, second) = (serve(&one, "tickets"), serve(&two, "pirate"));
    let asked =
        |client: &Client| (client.say("same", PROMPT, 24).unwrap(), client.chat("same", PROMPT, 1).unwrap().adapter);
    let (before, other) = (asked(&first), asked(&second));
    assert_ne!(before.0, other.0);
    assert_ne!(before.1, other.1);
    for (space, client, answered) in [(&one, &first, &before.1), (&two, &second, &other.1)] {
        assert_eq!(Some(space.held().unwrap().concat()), *answered, "{}", space.name);
        // Not even by its full name.
        let strange = if space.name == one.name { &two.name } else { &one.name };
        assert_eq!(client.chat(&format!("{strange}/same"), PROMPT, 1).unwrap().status, 404);
    }
    two.kubectl.output(["delete", "loraadapter", "same"]).unwrap();
    wait::until(
        "the other one is gone",
        PATIENCE,
        || Ok((second.chat("same", PROMPT, 1)?.status == 404).then_some(())),
    )
    .unwrap();
    assert_eq!(asked(&first), before);
}
