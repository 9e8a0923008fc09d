//! Of two operators one leads. When it is killed or stands still the other takes over, and the first writes nothing any more.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::chat::Client;
use lorafleet_e2e::cluster::processes;
use lorafleet_e2e::kubectl::Kubectl;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::world::{PATIENCE, World};
use lorafleet_e2e::{install, wait};

/// Two operators as long as it lives, then one again.
struct Two<'a>(&'a World, Kubectl);

impl<'a> Two<'a> {
    fn start(world: &'a World) -> Self {
        install::set(&Cache::open().unwrap(), world.kubectl(), &["operator.replicas=2"]).unwrap();
        let two = Self(world, world.kubectl().namespace(install::NAMESPACE));
        wait::until("two operators run and no other", PATIENCE, || Ok((two.pods().len() == 2).then_some(()))).unwrap();
        two
    }

    /// Names of the operators' pods that are ready.
    fn pods(&self) -> Vec<String> {
        let words =
            ["get", "pods", "--selector=app.kubernetes.io/name=lorafleet", "--field-selector=status.phase=Running"];
        let found = self.1.json(words).unwrap();
        let pods = found["items"].as_array().unwrap().iter();
        let alive = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        alive.map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    fn holder(&self) -> String {
        self.1.output(["get", "lease", "lorafleet-operator", "-o", "jsonpath={.spec.holderIdentity}"]).unwrap()
    }

    /// Waits until another pod than `before` leads; its name.
    fn other_leader(&self, before: &str) -> String {
        wait::until("another operator leads", PATIENCE, || {
            Ok(Some(self.holder()).filter(|holder| holder != before && self.pods().contains(holder)))
        })
        .unwrap()
    }

    /// Whether a pod says that it leads, and how often it has written.
    fn says(&self, pod: &str) -> Result<(bool, f64)> {
        let route = self.0.target.reach(install::NAMESPACE, &format!("pod/{pod}"), 8080)?;
        let page = Client::new(route).text("/metrics")?;
        let values = |name: &str| {
            let lines = page.lines().filter(|line| line.starts_with(name));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
        };
        Ok((values("lorafleet_operator_leader") > 0.0, values("lorafleet_operator_writes_total")))
    }

    /// The one that leads, once it says so and that it has written, and the other one neither.
    fn leader(&self) -> String {
        wait::until("one of two operators leads and writes", PATIENCE, || {
            let holder = self.holder();
            for pod in self.pods() {
                let (leads, writes) = self.says(&pod)?;
                let is = pod == holder;
                ensure!((leads, writes > 0.0) == (is, is), "{pod}, of which {holder} leads: {leads}, {writes} writes");
            }
            Ok((self.holder() == holder).then_some(holder))
        })
        .unwrap()
    }
}

impl Drop for Two<'_> {
    fn drop(&mut self) {
        let again = install::set(&Cache::open().unwrap(), self.0.kubectl(), &["operator.replicas=1"]);
        // A second panic would end the whole program of tests.
        assert!(again.is_ok() || std::thread::panicking(), "{again:?}");
    }
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_of_two_operators_one_leads() {
    let world = crate::world();
    let space = world.namespace("two").unwrap();
    let two = Two::start(world);
    space.serve(&["tickets"]).unwrap();
    let first = two.leader();

    // Killed: the other one does what came meanwhile.
    two.1.output(["delete", "pod", &first, "--grace-period=0", "--force", "--wait=false"]).unwrap();
    let begun = Instant::now();
    space.serve(&["pirate"]).unwrap();
    let second = two.other_leader(&first);
    println!("killed: {second} leads and has served an adapter after {:.1?}", begun.elapsed());
    wait::until("two operators run again", PATIENCE, || Ok((two.pods().len() == 2).then_some(()))).unwrap();

    // Standing still, as on a node that is frozen: it thinks that it leads, until it looks. From outside nobody can stop a process
    // in somebody else's cluster.
    if world.target.own().is_none() {
        println!("left out in a cluster that is not the harness's own: an operator that stands still");
        return;
    }
    let process = process_of(&second);
    Shell::new("kill").args(["-STOP", &process]).run().unwrap();
    let begun = Instant::now();
    let third = two.other_leader(&second);
    println!("standing still: {third} leads after {:.1?}", begun.elapsed());
    let written = || {
        // Of several kinds, kubectl prints now these first and now those.
        let words = ["get", "loraadapters,servingpools", "-o", "jsonpath={..resourceVersion}"];
        let printed = space.kubectl.output(words).unwrap();
        let mut versions: Vec<String> = printed.split_whitespace().map(str::to_owned).collect();
        versions.sort_unstable();
        versions
    };
    wait::until("the new leader has nothing to write", PATIENCE, || {
        let before = written();
        std::thread::sleep(Duration::from_secs(3));
        Ok((written() == before).then_some(()))
    })
    .unwrap();
    let of_third = || two.says(&third).unwrap().1;
    let (writes, before) = (of_third(), written());
    // Of one that has stood still for long, the kubelet has made an end.
    let _ = Shell::new("kill").args(["-CONT", &process]).finish().unwrap();
    wait::until("the one that stood still has ended", PATIENCE, || {
        Ok(processes().iter().all(|it| it.id.to_string() != process).then_some(()))
    })
    .unwrap();
    assert_eq!(two.holder(), third, "it took nothing back");
    // Unless the new leader had something to write meanwhile.
    let after = written();
    assert!(after == before || of_third() > writes, "it wrote: {before:?}, and then {after:?}");
    space.condition("loraadapter", "tickets", "Ready", "True").unwrap();
    space.condition("loraadapter", "pirate", "Ready", "True").unwrap();
}

/// Number of the operator's process in this pod, as this machine counts.
fn process_of(pod: &str) -> String {
    let is = |id: u32| {
        let told = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        told.split(|byte| *byte == 0).any(|word| word == format!("POD_NAME={pod}").as_bytes())
    };
    processes().iter().find(|process| is(process.id)).unwrap().id.to_string()
}
