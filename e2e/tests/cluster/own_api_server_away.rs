//! While the API server is away, gateways and engines go on with what they know; when it is back, so is everything else.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use lorafleet_e2e::chat::Client;
use lorafleet_e2e::cluster::processes;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

const PROMPT: &str = "How do I cook rice?";
/// Longer than what an operator holds a lease for.
const AWAY: Duration = Duration::from_secs(15);

/// A process that stands still as long as this lives.
struct Still(String);

impl Still {
    fn start(process: String) -> Self {
        Shell::new("kill").args(["-STOP", &process]).run().unwrap();
        Self(process)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        // Somebody may have ended it.
        let _ = Shell::new("kill").args(["-CONT", &self.0]).run();
    }
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_without_its_api_server_answers_go_on() {
    let world = crate::world();
    let cluster = world.target.own().unwrap();
    let space = world.namespace("away").unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    let expected = client.say("tickets", PROMPT, 6).unwrap();
    let selector = "--selector=app.kubernetes.io/component=gateway";
    let gateway = space.kubectl.output(["get", "pods", selector, "-o", "name"]).unwrap();
    let metrics = Client::new(space.reach(gateway.trim(), 8081).unwrap());

    let folder = cluster.kubeconfig().parent().unwrap().display().to_string();
    let server = processes().into_iter().find(|process| {
        let words = &process.words;
        words.first().is_some_and(|word| word.ends_with("/kube-apiserver"))
            && words.iter().any(|word| word.contains(&folder))
    });
    let still = Still::start(server.unwrap().id.to_string());
    let begun = Instant::now();
    while begun.elapsed() < AWAY {
        assert_eq!(client.say("tickets", PROMPT, 6).unwrap(), expected, "after {:.1?}", begun.elapsed());
        assert_eq!(client.chat("nosuch", PROMPT, 1).unwrap().status, 404);
        std::thread::sleep(Duration::from_millis(300));
    }
    wait::until("the gateway says that its view is old", PATIENCE, || {
        let page = metrics.text("/metrics")?;
        let stale = page.lines().find_map(|line| line.strip_prefix("lorafleet_gateway_api_stale_seconds "));
        let stale: f64 = stale.context("no such metric")?.parse()?;
        if stale > 5.0 { Ok(Some(())) } else { bail!("it says {stale} s") }
    })
    .unwrap();
    drop(still);

    // Whoever has lost the lease meanwhile starts anew.
    wait::until("the API server answers", PATIENCE, || Ok(space.get("servingpool", "chat").ok())).unwrap();
    space.serve(&["pirate"]).unwrap();
    space.answer(&client, &["tickets"]).unwrap();
    assert_eq!(client.say("tickets", PROMPT, 6).unwrap(), expected);
}
