//! A pool is scaled out and in while clients ask: new pods hold the adapters before they take traffic, and nobody is sent to a pod
//! that goes.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE};

const PROMPT: &str = "How do I cook rice?";
/// Answers after each change.
const MORE: usize = 30;

/// Waits until the pool has so many pods, and each holds the adapter.
fn scale(space: &Namespace<'_>, pods: usize) {
    space.kubectl.output(["scale", "servingpool", "chat", &format!("--replicas={pods}")]).unwrap();
    wait::until(&format!("{pods} pods hold the adapter, and there are no others"), PATIENCE, || {
        let status = space.get("loraadapter", "tickets")?["status"].clone();
        let placements = status["pools"][0]["placements"].as_array().cloned().unwrap_or_default();
        let holding = placements.iter().filter(|it| it["ready"] == true && it["traffic"] == true).count();
        let there = space.engine_pods()?;
        if status["served"] == format!("{pods}/{pods} chat") && holding == pods && there.len() == pods {
            return Ok(Some(()));
        }
        anyhow::bail!("pods {there:?}, {status}")
    })
    .unwrap();
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_scaling_is_not_felt() {
    let world = crate::world();
    let space = world.namespace("scaling").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let expected = client.say("tickets", PROMPT, 6).unwrap();
    let (done, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    let answers = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut answers = Vec::new();
            while !done.load(Ordering::Relaxed) {
                answers.push(client.say("tickets", PROMPT, 6).map_err(|error| format!("{error:#}")));
                asked.fetch_add(1, Ordering::Relaxed);
            }
            answers
        });
        // The end of the clients must come whatever comes of this.
        let scaled = std::panic::catch_unwind(|| {
            for pods in [2, 1] {
                scale(&space, pods);
                let before = asked.load(Ordering::Relaxed);
                wait::until("clients have gone on asking", PATIENCE, || {
                    Ok((asked.load(Ordering::Relaxed) >= before + MORE).then_some(()))
                })
                .unwrap();
            }
        });
        done.store(true, Ordering::Relaxed);
        let answers = asking.join().unwrap();
        scaled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        answers
    });
    let wrong: Vec<_> = answers.iter().filter(|answer| answer.as_ref() != Ok(&expected)).collect();
    assert!(wrong.is_empty(), "of {} answers these are not as before: {wrong:?}", answers.len());
}
