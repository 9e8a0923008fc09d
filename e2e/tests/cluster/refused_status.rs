//! The API server refuses an adapter's status: the object says so in its words instead of staying as it was, what is served is
//! served on, and once nothing refuses it any more the whole status is there again.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use lorafleet_e2e::wait;

use crate::policy::Policy;

const WORDS: &str = "nobody writes down how large an adapter is";
/// A refused status is tried again every minute.
const AGAIN_MAX: Duration = Duration::from_secs(400);

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_refused_status_is_said() {
    let world = crate::world();
    let space = world.namespace("speechless").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let before = space.get("loraadapter", "tickets").unwrap();

    let probe = [
        "patch",
        "loraadapter",
        "tickets",
        "--subresource=status",
        "--type=merge",
        r#"--patch={"status": {"sizeBytes": 1}}"#,
        "--dry-run=server",
    ];
    // As a definition of the kind would that is older than the operator: one field that it does not take.
    let rule = "!has(object.status) || !has(object.status.sizeBytes)";
    let policy = Policy::refuse(&space, "lorafleet.dev", "loraadapters/status", rule, WORDS, &probe);
    // Something is to be said.
    let warmer = r#"--patch={"spec": {"warmth": {"floor": "Disk"}}}"#;
    space.kubectl.output(["patch", "loraadapter", "tickets", "--type=merge", warmer]).unwrap();
    space.says("loraadapter", "tickets", "Ready=False ApplyFailed", &[WORDS]).unwrap();
    space.condition("loraadapter", "tickets", "Stalled", "True").unwrap();

    drop(policy);
    wait::until("the whole status is there again", AGAIN_MAX, || {
        let now = space.get("loraadapter", "tickets")?;
        let same = ["digest", "currentRevision", "sizeBytes", "served"]
            .map(|field| now["status"][field] == before["status"][field]);
        Ok((!same.contains(&false)).then_some(()))
    })
    .unwrap();
    space.condition("loraadapter", "tickets", "Ready", "True").unwrap();
    assert_eq!(client.chat("tickets", "Hello", 1).unwrap().status, 200);
}
