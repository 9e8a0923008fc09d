//! A cluster that was used, broken, repaired and ended leaves the machine as it was.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings, processes};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

use crate::traces::{gone, traces};

fn run_a_pod(cluster: &Cluster, name: &str) {
    let pod = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: it, image: 'lorafleet.local/pause:1'}}]}}}}"
    );
    cluster.kubectl().namespace("default").apply(&pod).unwrap();
    wait::until("the pod runs", PATIENCE, || {
        let pod = cluster.kubectl().namespace("default").json(["get", "pod", name])?;
        Ok((pod["status"]["phase"] == "Running").then_some(()))
    })
    .unwrap();
}

/// Kills the one program with this argument, by its number, and waits until it is gone.
fn kill(argument: &str) {
    let all = processes().into_iter();
    let mut found = all.filter(|it| it.words.iter().any(|word| word == argument) && !it.words[0].contains("nsenter"));
    let id = found.next().unwrap().id;
    Shell::new("kill").args(["-KILL", &id.to_string()]).run().unwrap();
    wait::until("it is gone", PATIENCE, || Ok(processes().iter().all(|it| it.id != id).then_some(()))).unwrap();
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
    gone(&settings, &cache, &before, "ended");
    Cluster::down(&cache, &settings).unwrap();
}
