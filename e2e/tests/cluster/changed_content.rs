//! An adapter's files change in the store. What is pinned goes on being served, and the change is said; asked to look
//! again, the pool serves the new ones, and what runs ends on the old. What is followed is served by itself, until a policy
//! forbids it.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::mpsc;

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
    space.answer(&client, &["changing"]).unwrap();
    let digest =
        |field: &str| space.get("loraadapter", "changing").unwrap()["status"][field].as_str().map(str::to_owned);
    let old = digest("currentRevision").unwrap();
    let old_name = versioned("changing", &old).unwrap();
    let short = client.say("changing", PROMPT, 24).unwrap();
    let long = client.say("changing", PROMPT, LONG).unwrap();

    // New files under the same path are noticed, and not served by themselves: the digest is pinned.
    world.store.put_folder(&demo_adapter("tickets"), "adapters/team/changing").unwrap();
    space.says("loraadapter", "changing", "Verified=False SourceChanged", &[]).unwrap();
    space.says("loraadapter", "changing", "Ready=True Succeeded", &["SourceChanged"]).unwrap();
    assert_eq!(client.say("changing", PROMPT, 24).unwrap(), short);
    assert_eq!(digest("currentRevision").unwrap(), old);

    std::thread::scope(|scope| {
        // A request that runs over the change ends with the words of the old revision.
        let (piece, pieces) = mpsc::channel();
        let running = scope.spawn(|| {
            client.stream("changing", PROMPT, LONG, move |_| {
                // Only the first is waited for.
                let _ = piece.send(());
            })
        });
        pieces.recv().unwrap();
        space.kubectl.output(["annotate", "loraadapter", "changing", "lorafleet.dev/resolve-at=now"]).unwrap();
        wait::until("the new revision is current", PATIENCE, || Ok(digest("currentRevision").filter(|it| *it != old)))
            .unwrap();
        assert_eq!(running.join().unwrap().unwrap(), long, "a running request changed adapters");
    });
    space.condition("loraadapter", "changing", "Ready", "True").unwrap();
    let new = digest("currentRevision").unwrap();
    let tickets = space.get("loraadapter", "tickets").unwrap()["status"]["digest"].as_str().unwrap().to_owned();
    assert_eq!(new, tickets, "the same files are the same digest");
    let answer = wait::until("the alias means the new revision", PATIENCE, || {
        Ok(client.say("changing", PROMPT, 24).ok().filter(|it| *it != short))
    });
    assert_eq!(answer.unwrap(), client.say("tickets", PROMPT, 24).unwrap());
    gone(&client, &old_name);
    space.condition("loraadapter", "changing", "Verified", "True").unwrap();

    // Who follows a source serves what comes, and keeps the last good version when what comes is none.
    let follow = r#"--patch={"spec": {"source": {"follow": true}}}"#;
    space.kubectl.output(["patch", "loraadapter", "changing", "--type=merge", follow]).unwrap();
    world.store.put_folder(&demo_adapter("pirate"), "adapters/team/changing").unwrap();
    wait::until("the old content is current again", PATIENCE, || Ok(digest("currentRevision").filter(|it| *it == old)))
        .unwrap();
    world.store.put_folder(&demo_adapter("stranger"), "adapters/team/changing").unwrap();
    // For a moment its configuration is one adapter's and its weights are another's.
    space.says("loraadapter", "changing", "Verified=False BaseMismatch", &[]).unwrap();
    space.condition("loraadapter", "changing", "Available", "True").unwrap();
    space.condition("loraadapter", "changing", "Ready", "False").unwrap();
    let same = || Ok((client.say("changing", PROMPT, 24)? == short).then_some(()));
    wait::until("the last good version answers", PATIENCE, same).unwrap();
    a_policy_forbids_it(&space, &client);
}

/// Waits until a model is unknown. What is not served any more may be so for its pods first.
fn gone(client: &Client, model: &str) {
    wait::until(&format!("{model} is unknown"), PATIENCE, || {
        let answer = client.chat(model, PROMPT, 1)?;
        if answer.status == 404 { Ok(Some(())) } else { anyhow::bail!("{} {}", answer.status, answer.body) }
    })
    .unwrap();
}

/// What is served is taken away, though the source has held other bytes for a while.
fn a_policy_forbids_it(space: &Namespace<'_>, client: &Client) {
    let tighten = r#"--patch={"spec": {"adapterPolicy": {"maxRank": 8}}}"#;
    space.kubectl.output(["patch", "basemodel", "smollm2", "--type=merge", tighten]).unwrap();
    space.says("loraadapter", "changing", "Available=False RankTooHigh", &[]).unwrap();
    gone(client, "changing");
    // What the same policy allows is served all the while.
    client.say("tickets", PROMPT, 1).unwrap();
}
