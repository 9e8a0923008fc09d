//! A run that is ended from outside leaves nothing of what it was at, and the next one works.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::{Child, Command, Stdio};

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings, processes};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

use crate::own_crd_rules;
use crate::traces::{gone, traces};

fn up(settings: &Settings) -> Command {
    let (network, services) = (settings.network.to_string(), settings.services.to_string());
    // A shell's background job, for one, ignores SIGINT, and so would all that it starts.
    let mut command = Command::new("env");
    command.args(["--default-signal", env!("CARGO_BIN_EXE_xtask")]);
    command.args(["up", "--name", &settings.name, "--interface", &settings.interface]);
    command.args(["--network", &network, "--services", &services]).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Signals, and a word of the process with whose start each comes: when the run has begun, while it writes files, while the API
/// server starts, while the node does.
const MOMENTS: [(&str, &str); 4] =
    [("-INT", "--kill-child"), ("-TERM", "/etcd"), ("-KILL", "/kube-apiserver"), ("-HUP", "/kube-scheduler")];
const TRIES_MAX: usize = 5;

/// Starts a cluster and ends the run at this moment; false when the run was about to end by itself.
fn cut_off(cache: &Cache, settings: &Settings, signal: &str, moment: &str) -> bool {
    let folder = settings.folder(cache).display().to_string();
    let run = up(settings).spawn().unwrap();
    // The guard is a child of the run, and starts before all else.
    let is_it = |words: &[String]| {
        words.iter().any(|word| word.ends_with(moment)) && words.iter().any(|word| word.contains(&folder))
    };
    wait::until(&format!("{moment} runs"), PATIENCE, || {
        Ok(processes().iter().any(|process| is_it(&process.words)).then_some(()))
    })
    .unwrap();
    // A run that has ended by itself cannot be reached.
    let _ = Shell::new("kill").args([signal, &run.id().to_string()]).run();
    // The guard holds standard error for as long as it is at work.
    let ended = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    if ended.status.success() || said.is_empty() {
        Cluster::down(cache, settings).unwrap();
        return false;
    }
    assert!(said.contains("ended from outside"), "{signal} at {moment}: {said}");
    true
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_that_is_ended_from_outside_nothing_is_left() {
    crate::guarded();
    let cache = Cache::open().unwrap();
    let settings = Settings::numbered("cut", 5, Parts::Node);
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);
    for (signal, moment) in MOMENTS {
        // On a machine where this test stands still for seconds, the cluster is up before the signal comes.
        let cut = (0..TRIES_MAX).any(|_| cut_off(&cache, &settings, signal, moment));
        assert!(cut, "{signal} came too late {TRIES_MAX} times");
        gone(&settings, &cache, &before, signal);
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

/// Starts a program of tests whose cluster runs until a program of this name does.
fn tests(settings: &Settings, cache: &Cache, runs: &str) -> Child {
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["--ignored", "own_crd_rules::"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let tests = tests.spawn().unwrap();
    wait::until("its cluster runs", PATIENCE, || Ok(inside(settings, cache, runs).map(drop))).unwrap();
    tests
}

/// Number of a cluster's own program of this name.
fn inside(settings: &Settings, cache: &Cache, program: &str) -> Option<u32> {
    let folder = settings.folder(cache).display().to_string();
    let is_it = |words: &[String]| {
        words.first().is_some_and(|word| word.ends_with(program)) && words.iter().any(|word| word.contains(&folder))
    };
    processes().into_iter().find(|process| is_it(&process.words)).map(|process| process.id)
}

fn signal(signal: &str, process: u32) {
    Shell::new("kill").args([signal, &process.to_string()]).run().unwrap();
}

/// A program of tests that starts a cluster by itself is no better guarded by anybody else.
#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_of_tests_that_are_killed_nothing_is_left() {
    let (cache, settings) = (Cache::open().unwrap(), own_crd_rules::settings());
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);
    let tests = tests(&settings, &cache, "/etcd");
    signal("-KILL", tests.id());
    // The guard holds standard error for as long as it is at work.
    let said = String::from_utf8_lossy(&tests.wait_with_output().unwrap().stderr).into_owned();
    assert!(said.contains("the tests have ended") && said.contains("cluster rules"), "{said}");
    gone(&settings, &cache, &before, "killed tests");
}

/// What stands still is killed by nobody's end: who comes next clears it away.
#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_that_stands_still_nothing_is_left_by_who_comes_next() {
    let (cache, settings) = (Cache::open().unwrap(), own_crd_rules::settings());
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);
    let mut tests = tests(&settings, &cache, "/kube-apiserver");
    signal("-STOP", inside(&settings, &cache, "/kube-apiserver").unwrap());
    let children = Shell::new("ps").args(["--ppid", &tests.id().to_string(), "-o", "pid=,args="]).output().unwrap();
    let guard = children.lines().find(|line| line.contains("--of-tests")).unwrap();
    signal("-KILL", guard.split_whitespace().next().unwrap().parse().unwrap());
    signal("-KILL", tests.id());
    tests.wait().unwrap();
    // The node goes with the tests; the parent of what stood still in it does not.
    wait::until("the node is gone", PATIENCE, || Ok(inside(&settings, &cache, "/node").is_none().then_some(())))
        .unwrap();
    Cluster::down(&cache, &settings).unwrap();
    gone(&settings, &cache, &before, "a cluster that stood still");
}
