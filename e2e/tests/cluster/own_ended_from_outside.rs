//! A run that is ended from outside leaves nothing of what it was at, and the next one works.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::{Command, Stdio};
use std::time::Duration;

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings, processes};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;

use crate::own_crd_rules;
use crate::traces::traces;

/// Waits until nothing is left that was not there before.
fn gone(settings: &Settings, cache: &Cache, before: &[String], ended: &str) {
    wait::until("all traces are gone", Duration::from_secs(10), || {
        let left = traces(settings, cache);
        let more: Vec<_> = left.iter().filter(|line| !before.contains(line)).collect();
        if more.is_empty() { Ok(Some(())) } else { anyhow::bail!("{ended}: {more:?}") }
    })
    .unwrap();
}

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
    crate::guarded();
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
        gone(&settings, &cache, &before, &format!("{signal} after {after_ms} ms"));
    }
    assert!(up(&settings).status().unwrap().success());
    let nodes = Shell::new("ip").args(["-brief", "link", "show", &settings.interface]).finish().unwrap();
    assert!(nodes.success, "a run that ends by itself leaves the cluster up");
    never_replaced_by_another(&cache, &settings);
    Cluster::down(&cache, &settings).unwrap();
}

/// Who asks for it in another way than it was made is told; who says nothing finds it.
fn never_replaced_by_another(cache: &Cache, settings: &Settings) {
    let made = || std::fs::metadata(settings.folder(cache).join("admin.kubeconfig")).unwrap().modified().unwrap();
    let before = made();
    let other = Settings { interface: "lf9".to_owned(), ..settings.clone() };
    let refused = up(&other).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("--interface lf5") && said.contains("--interface lf9"),
        "{said}"
    );
    let mut plain = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let found = plain.args(["up", "--name", &settings.name]).output().unwrap();
    let said = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(found.status.success() && said.contains("is up already"), "{said}");
    assert_eq!(made(), before, "it is the same cluster");
}

/// A program of tests that starts a cluster by itself is no better guarded by anybody else.
#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_of_tests_that_are_killed_nothing_is_left() {
    let (cache, settings) = (Cache::open().unwrap(), own_crd_rules::settings());
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["--ignored", "own_crd_rules::"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let tests = tests.spawn().unwrap();
    let server = settings.folder(&cache).join("etcd").display().to_string();
    wait::until("its cluster runs", Duration::from_secs(60), || {
        let runs = processes().iter().any(|process| process.words.iter().any(|word| word.contains(&server)));
        Ok(runs.then_some(()))
    })
    .unwrap();
    Shell::new("kill").args(["-KILL", &tests.id().to_string()]).run().unwrap();
    // The guard holds standard error for as long as it is at work.
    let said = String::from_utf8_lossy(&tests.wait_with_output().unwrap().stderr).into_owned();
    assert!(said.contains("the tests have ended") && said.contains("cluster rules"), "{said}");
    gone(&settings, &cache, &before, "killed tests");
}
