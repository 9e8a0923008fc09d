//! A deleted adapter is unknown at once, and its memory comes back.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_deleted_adapter_gives_its_memory_back() {
    let world = crate::world();
    let space = world.namespace("deletes").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let report = || space.engine().unwrap().get("/v1/lora_adapters").unwrap().body;
    // A page that the base's own prompts hold stays cached: ask the base first.
    client.say("smollm2", "Hello", 4).unwrap();
    let before = report();

    space.serve(&["tickets", "pirate"]).unwrap();
    let held = report();
    assert_eq!(held["adapters"].as_array().unwrap().len(), 2, "{held}");
    let host = |report: &serde_json::Value| report["budgets"]["hostBytesUsed"].as_u64().unwrap();
    assert!(host(&held) > host(&before), "{held}");

    space.kubectl.output(["delete", "loraadapter", "pirate"]).unwrap();
    let answer = wait::until("the deleted adapter is unknown", PATIENCE, || {
        let answer = client.chat("pirate", "Ahoy", 4)?;
        Ok((answer.status == 404).then_some(answer))
    });
    assert!(answer.unwrap().body["error"]["message"].as_str().unwrap().contains("pirate"));
    wait::until("its memory is back", PATIENCE, || {
        let now = report();
        let held = now["adapters"].as_array().map_or(0, Vec::len);
        Ok((held == 1 && host(&now) == host(&before)).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}\nbefore {before}\nnow {}", report()));
    assert_eq!(client.chat("tickets", "Hello", 4).unwrap().status, 200);
}
