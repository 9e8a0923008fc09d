//! Asked at the same moment, base and adapters share one engine pod's batches, and each says what it says alone.
#![allow(clippy::unwrap_used, clippy::panic)]

const MODELS: [&str; 3] = ["smollm2", "tickets", "pirate"];
const PROMPTS: [&str; 3] = ["How do I cook rice?", "The app crashes when I log in.", "Tell me about the sea."];

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_batch_changes_no_answer() {
    let world = crate::world();
    let space = world.namespace("batch").unwrap();
    let client = space.serve(&["tickets", "pirate"]).unwrap();
    let questions: Vec<(&str, &str)> =
        MODELS.iter().flat_map(|&model| PROMPTS.iter().map(move |&prompt| (model, prompt))).collect();

    let alone: Vec<String> = questions.iter().map(|(model, prompt)| client.say(model, prompt, 32).unwrap()).collect();
    let steps = |page: &str| counter(page, "lorafleet_step_seconds_count");
    let engine = space.engine().unwrap().text("/metrics").unwrap();
    let before = steps(&engine);
    let together: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            questions.iter().map(|(model, prompt)| scope.spawn(|| client.say(model, prompt, 32).unwrap())).collect();
        asked.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let spent = steps(&space.engine().unwrap().text("/metrics").unwrap()) - before;

    for ((question, alone), together) in questions.iter().zip(&alone).zip(&together) {
        assert_eq!(alone, together, "{question:?}");
    }
    // Nine answers of up to 32 tokens, one after another, are about 288 steps.
    assert!(spent > 0.0 && spent < 200.0, "{spent} steps: the answers did not share batches");
}

/// Value of a counter without labels on a page of metrics.
fn counter(page: &str, name: &str) -> f64 {
    let line = page.lines().find(|line| line.split([' ', '{']).next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in:\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
