//! Applied with kubectl, two adapters answer through the gateway, each in its own way, and say who answered.
#![allow(clippy::unwrap_used, clippy::panic)]

use anyhow::ensure;
use lorafleet_e2e::chat::Client;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{PATIENCE, versioned};

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_an_applied_adapter_answers() {
    let world = crate::world();
    let space = world.namespace("answers").unwrap();
    let client = space.serve(&["tickets", "pirate"]).unwrap();

    let prompt = "My invoice shows a charge that I did not make. Please help.";
    let base = client.say("smollm2", prompt, 24).unwrap();
    let mut answers = vec![base];
    for name in ["tickets", "pirate"] {
        let answer = client.chat(name, prompt, 24).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        answers.push(answer.body["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
        let digest = space.get("loraadapter", name).unwrap()["status"]["digest"].as_str().unwrap().to_owned();
        let who = versioned(name, &digest).unwrap();
        assert_eq!(answer.adapter.as_deref(), Some(who.as_str()));
        // The version that the alias means now can be asked for by itself.
        let versioned = client.say(&who, prompt, 24).unwrap();
        assert_eq!(Some(&versioned), answers.last());
    }
    let mut different = answers.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 3, "base and adapters answer alike: {answers:?}");
    // What the ticket adapter was trained for: one JSON object.
    let label: serde_json::Value = serde_json::from_str(answers[1].trim()).unwrap();
    assert!(label.is_object(), "{label}");

    let listed = client.get("/v1/models").unwrap().body;
    let names: Vec<&str> = listed["data"].as_array().unwrap().iter().filter_map(|it| it["id"].as_str()).collect();
    for name in ["smollm2", "tickets", "pirate"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    let unknown = client.chat("nobody", prompt, 1).unwrap();
    assert_eq!(unknown.status, 404, "{}", unknown.body);
    assert!(unknown.body["error"]["message"].as_str().unwrap().contains("nobody"), "{}", unknown.body);

    let mut pieces = 0;
    let streamed = client.stream("pirate", prompt, 24, |_| pieces += 1).unwrap();
    assert_eq!(streamed, answers[2]);
    assert!(pieces > 3, "the stream came in {pieces} pieces");

    // What was asked is counted, each under its own name, and once more at first by `serve`.
    let selector = "--selector=app.kubernetes.io/component=gateway";
    let gateway = space.kubectl.output(["get", "pods", selector, "-o", "name"]).unwrap();
    let metrics = Client::new(space.reach(gateway.trim(), 8081).unwrap());
    for (name, asked) in [("smollm2", 2), ("tickets", 3), ("pirate", 4)] {
        let counted = format!("requests_total{{model=\"{name}\",outcome=\"Answered\",status=\"200\"}} {asked}\n");
        // An answer is counted once it has ended, which its client may know a moment earlier.
        wait::until(&counted, PATIENCE, || {
            let page = metrics.text("/metrics")?;
            ensure!(page.contains(&counted), "{page}");
            Ok(Some(()))
        })
        .unwrap();
    }
}
