//! An adapter's files change in the store. What is pinned goes on being served, and the change is said; asked to look
//! again, the pool serves the new ones, and what runs ends on the old. What is followed is served by itself, until a policy
//! forbids it.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::install::demo_adapter;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE, adapter, versioned};

const PROMPT: &str = "How do I cook rice?";
const LONG: u32 = 200;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_changed_content_is_a_new_revision() {
    let world = crate::world();
    world.store.put_folder(&demo_adapter("pirate"), "adapters/team/changing").unwrap();
    let space = world.namespace("changes").unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&adapter("changing", "smollm2", "source: {uri: s3://adapters/team/changing}")).unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    space.condition("loraadapter", "changing", "Ready", "True").unwrap();
    let digest =
        |field: &str| space.get("loraadapter", "changing").unwrap()["status"][field].as_str().map(str::to_owned);
    let old = digest("currentRevision").unwrap();
    let old_name = versioned("changing", &old).unwrap();
    let short = client.say("changing", PROMPT, 24).unwrap();
    let long = client.say("changing", PROMPT, LONG).unwrap();

    // New files under the same path are noticed, and not served by themselves: the digest is pinned.
    world.store.put_folder(&demo_adapter("tickets"), "adapters/team/changing").unwrap();
    let verified = space.condition("loraadapter", "changing", "Verified", "False").unwrap();
    assert_eq!(verified["reason"], "SourceChanged", "{verified}");
    let ready = space.condition("loraadapter", "changing", "Ready", "True").unwrap();
    assert!(ready["message"].as_str().unwrap().contains("SourceChanged"), "{ready}");
    assert_eq!(client.say("changing", PROMPT, 24).unwrap(), short);
    assert_eq!(digest("currentRevision").unwrap(), old);

    std::thread::scope(|scope| {
        // A request that runs over the change ends with the words of the old revision.
        let running = scope.spawn(|| client.say("changing", PROMPT, LONG).unwrap());
        space.kubectl.output(["annotate", "loraadapter", "changing", "lorafleet.dev/resolve-at=now"]).unwrap();
        wait::until("the new revision is current", PATIENCE, || Ok(digest("currentRevision").filter(|it| *it != old)))
            .unwrap();
        assert_eq!(running.join().unwrap(), long, "a running request changed adapters");
    });
    space.condition("loraadapter", "changing", "Ready", "True").unwrap();
    let new = digest("currentRevision").unwrap();
    let tickets = space.get("loraadapter", "tickets").unwrap()["status"]["digest"].as_str().unwrap().to_owned();
    assert_eq!(new, tickets, "the same files are the same digest");
    let answer = wait::until("the alias means the new revision", PATIENCE, || {
        Ok(client.say("changing", PROMPT, 24).ok().filter(|it| *it != short))
    });
    assert_eq!(answer.unwrap(), client.say("tickets", PROMPT, 24).unwrap());
    let gone = wait::until("the old revision is gone", PATIENCE, || {
        let answer = client.chat(&old_name, PROMPT, 1)?;
        Ok((answer.status != 200).then_some(answer.status))
    });
    assert_eq!(gone.unwrap(), 404);
    space.condition("loraadapter", "changing", "Verified", "True").unwrap();

    // Who follows a source serves what comes, and keeps the last good version when what comes is none.
    let follow = r#"--patch={"spec": {"source": {"follow": true}}}"#;
    space.kubectl.output(["patch", "loraadapter", "changing", "--type=merge", follow]).unwrap();
    world.store.put_folder(&demo_adapter("pirate"), "adapters/team/changing").unwrap();
    wait::until("the old content is current again", PATIENCE, || Ok(digest("currentRevision").filter(|it| *it == old)))
        .unwrap();
    world.store.put_folder(&demo_adapter("stranger"), "adapters/team/changing").unwrap();
    let verified = space.condition("loraadapter", "changing", "Verified", "False").unwrap();
    assert_eq!(verified["reason"], "BaseMismatch", "{verified}");
    space.condition("loraadapter", "changing", "Available", "True").unwrap();
    space.condition("loraadapter", "changing", "Ready", "False").unwrap();
    assert_eq!(client.say("changing", PROMPT, 24).unwrap(), short);
    a_policy_forbids_it(&space, &client);
}

/// What is served is taken away, though the source has held other bytes for a while.
fn a_policy_forbids_it(space: &Namespace<'_>, client: &Client) {
    let tighten = r#"--patch={"spec": {"adapterPolicy": {"maxRank": 8}}}"#;
    space.kubectl.output(["patch", "basemodel", "smollm2", "--type=merge", tighten]).unwrap();
    let available = space.condition("loraadapter", "changing", "Available", "False").unwrap();
    assert_eq!(available["reason"], "RankTooHigh", "{available}");
    let gone = wait::until("what is forbidden is gone", PATIENCE, || {
        let answer = client.chat("changing", PROMPT, 1)?;
        Ok((answer.status != 200).then_some(answer.status))
    });
    assert_eq!(gone.unwrap(), 404);
    // What the same policy allows is served all the while.
    client.say("tickets", PROMPT, 1).unwrap();
}
