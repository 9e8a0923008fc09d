//! Engine pods and processes go; the pool says so, heals, and what was served is served again with the same words.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use lorafleet_e2e::chat::Client;
use lorafleet_e2e::cluster::Cluster;
use lorafleet_e2e::world::{Namespace, PATIENCE};
use lorafleet_e2e::{tied, wait};
use serde_json::json;

const PROMPT: &str = "How do I cook rice?";
const TRIES_MAX: usize = 5;

/// Every `Ready` that an object has had since, as `STATUS REASON`, however short. It watches as long as it lives.
struct Watch(Child, Arc<Mutex<Vec<String>>>);

impl Watch {
    fn start(space: &Namespace<'_>, object: &str) -> Self {
        // After a `range` kubectl prints nothing more.
        let ready = r#".status.conditions[?(@.type=="Ready")]"#;
        let line = format!("jsonpath={{{ready}.status}} {{{ready}.reason}}{{\"\\n\"}}");
        let words = ["get", object, "--watch", "-o", &line];
        let mut command = tied::command(space.kubectl.args(words).words());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = tied::spawn(command).unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // It has begun when it has said that all is well.
        assert!(lines.any(|line| line == "True Succeeded"), "the watch of {object} ended");
        let said = Arc::new(Mutex::new(Vec::new()));
        let saying = Arc::clone(&said);
        std::thread::spawn(move || lines.for_each(|line| saying.lock().unwrap().push(line)));
        Self(child, said)
    }

    fn said(&self) -> Vec<String> {
        self.1.lock().unwrap().clone()
    }

    /// Whether it has been said that not all is well, which may be told here some moments later. How, depends on what is seen
    /// first: the pod that does not answer, or that it takes no traffic.
    fn was_sorry(&self) -> bool {
        let is_sorry = |line: &String| line.starts_with("False ");
        let said = || Ok(self.said().iter().any(is_sorry).then_some(()));
        wait::until("it has been said that pods are missing", Duration::from_secs(5), said).is_ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `cut` in the middle of an answer; what its client is told.
fn told_in_a_stream(client: &Client, cut: impl FnOnce()) -> String {
    std::thread::scope(|scope| {
        let (piece, pieces) = mpsc::channel();
        let streaming = scope.spawn(move || {
            // It would go on for many seconds.
            let endless = json!({
                "model": "pirate",
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": 1_800,
                "ignore_eos": true,
                "temperature": 0,
            });
            client.stream_body(&endless, |_| {
                // Only the first is waited for.
                let _ = piece.send(());
            })
        });
        // A stream that ends before its first piece says why.
        if pieces.recv().is_ok() {
            cut();
        }
        match streaming.join().unwrap() {
            Ok(text) => panic!("an answer that was cut off looks whole: `{text}`"),
            Err(error) => format!("{error:#}"),
        }
    })
}

fn boot_id(space: &Namespace<'_>) -> Option<String> {
    let report = space.engine().ok()?.get("/v1/lora_adapters").ok()?;
    report.body["bootId"].as_str().map(str::to_owned)
}

/// Waits until another engine process than `before` runs, the pool is Ready again, and the adapter answers as it did.
fn heals(space: &Namespace<'_>, before: &str, answer: &str) {
    wait::until("another engine process runs", PATIENCE, || Ok(boot_id(space).filter(|id| id != before))).unwrap();
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    space.condition("loraadapter", "pirate", "Ready", "True").unwrap();
    let client = space.gateway("chat").unwrap();
    let again = wait::until("the adapter answers again", PATIENCE, || client.say("pirate", PROMPT, 24).map(Some));
    assert_eq!(again.unwrap(), answer);
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_an_engine_that_dies_comes_back_whole() {
    let world = crate::world();
    let space = world.namespace("restarts").unwrap();
    let client = space.serve(&["pirate"]).unwrap();
    let answer = client.say("pirate", PROMPT, 24).unwrap();

    // The pod is deleted: another takes its place. That may be there within a second or two, too short to be seen by looking now
    // and then, and on a busy machine by the operator.
    let watch = Watch::start(&space, "servingpool/chat");
    let sorry = (0..TRIES_MAX).any(|_| {
        let first = boot_id(&space).unwrap();
        let pod = space.engine_pods().unwrap().remove(0);
        space.kubectl.output(["delete", "pod", &pod, "--wait=false"]).unwrap();
        heals(&space, &first, &answer);
        watch.was_sorry()
    });
    assert!(sorry, "pods were missing {TRIES_MAX} times, and it has said: {:?}", watch.said());
    drop(watch);

    // The process is killed in place: the same pod starts it again, with what it was told last. From outside nobody reaches a
    // process in somebody else's cluster.
    let Some(cluster) = world.target.own() else {
        println!("left out in a cluster that is not the harness's own: an engine process killed in place");
        return;
    };
    let second = boot_id(&space).unwrap();
    let pod = space.engine_pods().unwrap().remove(0);
    let watched = ["servingpool/chat", "loraadapter/pirate"].map(|object| Watch::start(&space, object));
    let told = told_in_a_stream(&space.gateway("chat").unwrap(), || kill(cluster, &space, &pod));
    assert!(told.contains("EngineLost"), "{told}");
    heals(&space, &second, &answer);
    if !watched.iter().all(Watch::was_sorry) {
        // It was back before anybody looked. A second time the kubelet waits for ten seconds.
        let third = boot_id(&space).unwrap();
        kill(cluster, &space, &pod);
        heals(&space, &third, &answer);
    }
    for watch in watched {
        assert!(watch.was_sorry(), "a pod was missing for ten seconds, and it has said: {:?}", watch.said());
        wait::until("all is well again", PATIENCE, || {
            let said = watch.said();
            let well = said.last().is_some_and(|line| line == "True Succeeded");
            if well { Ok(Some(())) } else { anyhow::bail!("it has said: {said:?}") }
        })
        .unwrap();
    }
    assert_eq!(space.engine_pods().unwrap(), [pod], "the pod stayed");
}

/// Kills the only process of a pod.
fn kill(cluster: &Cluster, space: &Namespace<'_>, pod: &str) {
    let described = space.get("pod", pod).unwrap();
    let container = described["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
    let container = container.trim_start_matches("containerd://");
    cluster.containerd(&["tasks", "kill", "--signal", "SIGKILL", container]).run().unwrap();
}
