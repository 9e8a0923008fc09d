//! One client's long prompt does not keep the others waiting until it has been read.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

/// Some thousands of tokens, seconds of prefill.
const WORDS: usize = 2_500;
/// Answers to others that begin and end while the long prompt is read. Whoever had to wait until then would be one.
const OTHERS_MIN: usize = 3;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_long_prompt_keeps_nobody_waiting() {
    let world = crate::world();
    let space = world.namespace("long").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let engine = space.engine().unwrap();
    let short = client.say("tickets", "Hello", 2).unwrap();
    let prompt = "rice ".repeat(WORDS);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let long = scope.spawn(|| {
            let begun = Instant::now();
            let answer = client.chat("smollm2", &prompt, 1);
            done.store(true, Ordering::Relaxed);
            (answer.unwrap(), begun.elapsed())
        });
        wait::until("the long prompt is read", PATIENCE, || {
            let page = engine.text("/metrics")?;
            Ok((done.load(Ordering::Relaxed) || page.contains("\nvllm:num_requests_running 1\n")).then_some(()))
        })
        .unwrap();
        let mut waits = Vec::new();
        while !done.load(Ordering::Relaxed) {
            let begun = Instant::now();
            assert_eq!(client.say("tickets", "Hello", 2).unwrap(), short);
            waits.push(begun.elapsed());
        }
        // The last may have ended after it.
        waits.pop();
        let (answer, took) = long.join().unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        let tokens = answer.body["usage"]["prompt_tokens"].as_u64().unwrap();
        let longest = waits.iter().max().copied().unwrap_or_default();
        let told =
            format!("{tokens} tokens took {took:.1?}; meanwhile {} answers, the longest {longest:.1?}", waits.len());
        println!("{told}");
        assert!(waits.len() >= OTHERS_MIN, "{told}");
    });
}
