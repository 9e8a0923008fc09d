//! A cluster that was used, broken, repaired and ended leaves the machine as it was.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;

use crate::traces::traces;

fn run_a_pod(cluster: &Cluster, name: &str) {
    let pod = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: it, image: 'lorafleet.local/pause:1'}}]}}}}"
    );
    cluster.kubectl().namespace("default").apply(&pod).unwrap();
    wait::until("the pod runs", Duration::from_secs(60), || {
        let pod = cluster.kubectl().namespace("default").json(["get", "pod", name])?;
        Ok((pod["status"]["phase"] == "Running").then_some(()))
    })
    .unwrap();
}

/// Kills the one program with this argument, by its number.
fn kill(argument: &str) {
    let printed = Shell::new("ps").args(["-eo", "pid,args"]).output().unwrap();
    let line = printed.lines().find(|line| line.contains(argument) && !line.contains("nsenter")).unwrap();
    Shell::new("kill").args(["-KILL", line.split_whitespace().next().unwrap()]).run().unwrap();
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_that_ends_nothing_is_left() {
    let cache = Cache::open().unwrap();
    crate::guarded();
    let settings = Settings::numbered("ends", 2, Parts::Node).tied();
    Cluster::down(&cache, &settings).unwrap();
    let before = traces(&settings, &cache);

    let cluster = Cluster::up(&cache, &settings).unwrap();
    run_a_pod(&cluster, "one");
    assert_ne!(traces(&settings, &cache), before, "a running cluster is seen");

    // Found again while whole, made anew when a process of it is gone.
    let made = std::fs::metadata(cluster.kubeconfig()).unwrap().modified().unwrap();
    let again = Cluster::up(&cache, &settings).unwrap();
    assert_eq!(std::fs::metadata(again.kubeconfig()).unwrap().modified().unwrap(), made, "the running one is used");
    kill(&format!("--data-dir={}/etcd", settings.folder(&cache).display()));
    let anew = Cluster::up(&cache, &settings).unwrap();
    assert_ne!(std::fs::metadata(anew.kubeconfig()).unwrap().modified().unwrap(), made, "a broken one is made anew");
    run_a_pod(&anew, "two");

    Cluster::down(&cache, &settings).unwrap();
    let after = traces(&settings, &cache);
    assert_eq!(after, before);
    Cluster::down(&cache, &settings).unwrap();
}
