//! Asked at the same moment, base and adapters share one engine pod's batches, and each says what it says alone.
#![allow(clippy::unwrap_used, clippy::panic)]

const MODELS: [&str; 3] = ["smollm2", "tickets", "pirate"];
const PROMPTS: [&str; 3] = ["How do I cook rice?", "The app crashes when I log in.", "Tell me about the sea."];

const ROUNDS_MAX: usize = 20;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_a_batch_changes_no_answer() {
    let world = crate::world();
    let space = world.namespace("batch").unwrap();
    let client = space.serve(&["tickets", "pirate"]).unwrap();
    let questions: Vec<(&str, &str)> =
        MODELS.iter().flat_map(|&model| PROMPTS.iter().map(move |&prompt| (model, prompt))).collect();

    let engine = space.engine().unwrap();
    let steps = || counter(&engine.text("/metrics").unwrap(), "lorafleet_step_seconds_count");
    let before = steps();
    let alone: Vec<String> = questions.iter().map(|(model, prompt)| client.say(model, prompt, 32).unwrap()).collect();
    let spent_alone = steps() - before;
    // On a busy machine nine threads may ask one after another.
    let spent: Vec<f64> = (0..ROUNDS_MAX)
        .map(|_| {
            let before = steps();
            let together: Vec<String> = std::thread::scope(|scope| {
                let client = &client;
                let ask = |&(model, prompt): &_| scope.spawn(move || client.say(model, prompt, 32).unwrap());
                let asked: Vec<_> = questions.iter().map(ask).collect();
                asked.into_iter().map(|it| it.join().unwrap()).collect()
            });
            for ((question, alone), together) in questions.iter().zip(&alone).zip(&together) {
                assert_eq!(alone, together, "{question:?}");
            }
            steps() - before
        })
        .take_while(|spent| *spent > 0.6 * spent_alone)
        .collect();
    assert!(
        spent.len() < ROUNDS_MAX,
        "the answers did not share batches: alone {spent_alone} steps, together {spent:?}"
    );
}

/// Value of a counter without labels on a page of metrics.
fn counter(page: &str, name: &str) -> f64 {
    let line = page.lines().find(|line| line.split([' ', '{']).next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in:\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
