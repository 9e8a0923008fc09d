//! The keys between gateway, engine and operator are changed while chats go on, and none of them fails.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE};

/// Puts these keys into the Secret, as `docs/OPERATIONS.md` says.
fn put(space: &Namespace<'_>, admin: &[&str], api: &[&str]) {
    let data = serde_json::json!({ "stringData": { "admin-key": admin.join("\n"), "api-key": api.join("\n") } });
    let patch = data.to_string();
    space.kubectl.output(["patch", "secret", "chat-engine-keys", "--type=merge", "-p", &patch]).unwrap();
}

/// Waits until the engine takes this key for its report, or no longer does.
fn engine_answers(client: &Client, key: &str, status: u16) {
    let what = format!("the engine answers {status}");
    let client = client.with_key(key);
    wait::until(&what, PATIENCE, || Ok((client.get("/v1/lora_adapters")?.status == status).then_some(()))).unwrap();
}

fn gateway_has_changed(space: &Namespace<'_>) {
    wait::until("the gateway sends the new key", PATIENCE, || {
        let log = space.kubectl.output(["logs", "deployment/chat-gateway"])?;
        Ok(log.contains("the engines' key has changed").then_some(()))
    })
    .unwrap();
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_keys_are_rotated_and_no_chat_fails() {
    let world = crate::world();
    let space = world.namespace("rotated").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let engine = space.engine().unwrap();
    let [admin, api] = ["admin-key", "api-key"].map(|entry| space.engine_keys(entry).unwrap().remove(0));
    let (new_admin, new_api) = ("a-new-key-of-the-operator", "a-new-key-of-the-gateway");

    let (over, answered) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let chats = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let answer = client.chat("tickets", "Hello", 1).unwrap();
                assert_eq!(answer.status, 200, "{}", answer.body);
                answered.fetch_add(1, Ordering::Relaxed);
            }
        });
        let some_more = || {
            let before = answered.load(Ordering::Relaxed);
            wait::until("chats go on", PATIENCE, || {
                anyhow::ensure!(!chats.is_finished(), "a chat has failed");
                Ok((answered.load(Ordering::Relaxed) > before + 2).then_some(()))
            })
            .unwrap();
        };
        // Whatever comes of it, the chats end.
        let rotated = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            some_more();
            // The new ones are taken beside the old ones,
            put(&space, &[&admin, new_admin], &[&api, new_api]);
            engine_answers(&engine, new_api, 200);
            engine_answers(&engine, new_admin, 200);
            some_more();
            // then sent,
            put(&space, &[new_admin, &admin], &[new_api, &api]);
            gateway_has_changed(&space);
            some_more();
            // and the old ones are taken no more.
            put(&space, &[new_admin], &[new_api]);
            engine_answers(&engine, &api, 401);
            engine_answers(&engine, &admin, 401);
            some_more();
        }));
        over.store(true, Ordering::Relaxed);
        rotated.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    // The operator has gone along.
    space.apply(&lorafleet_e2e::world::adapter("late", "smollm2", "source: {uri: s3://adapters/team/pirate}")).unwrap();
    space.condition("loraadapter", "late", "Ready", "True").unwrap();
    space.answer(&client, &["late"]).unwrap();
}
