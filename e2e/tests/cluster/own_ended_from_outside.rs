//! A run that is ended from outside leaves nothing of what it was at, and the next one works.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::{Command, Stdio};
use std::time::Duration;

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;

use crate::traces::traces;

fn up(settings: &Settings) -> Command {
    let (network, services) = (settings.network.to_string(), settings.services.to_string());
    // A shell's background job, for one, ignores SIGINT, and so would all that it starts.
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_xtask")]);
    command.args(["up", "--name", &settings.name, "--interface", &settings.interface]);
    command.args(["--network", &network, "--services", &services]).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_that_is_ended_from_outside_nothing_is_left() {
    let cache = Cache::open().unwrap();
    let settings = Settings::numbered("cut", 5, Parts::Node);
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);
    // Cut off at moments that differ: while files are written, while the API server starts, while the node does.
    for (signal, after_ms) in [("-INT", 150), ("-TERM", 900), ("-KILL", 2_000), ("-HUP", 2_800)] {
        let run = up(&settings).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        Shell::new("kill").args([signal, &run.id().to_string()]).run().unwrap();
        // The guard holds standard error for as long as it is at work.
        let ended = run.wait_with_output().unwrap();
        assert!(!ended.status.success(), "{signal} after {after_ms} ms came too late");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.contains("ended from outside"), "{signal} after {after_ms} ms: {said}");
        wait::until("all traces are gone", Duration::from_secs(10), || {
            let left = traces(&settings, &cache);
            let more: Vec<_> = left.iter().filter(|line| !before.contains(line)).collect();
            if more.is_empty() { Ok(Some(())) } else { anyhow::bail!("{signal} after {after_ms} ms: {more:?}") }
        })
        .unwrap();
    }
    assert!(up(&settings).status().unwrap().success());
    let nodes = Shell::new("ip").args(["-brief", "link", "show", &settings.interface]).finish().unwrap();
    assert!(nodes.success, "a run that ends by itself leaves the cluster up");
    Cluster::down(&cache, &settings).unwrap();
}
