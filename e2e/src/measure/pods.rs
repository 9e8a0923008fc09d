//! The parts as pods of a cluster that is started for it: the demo's time, and what its pods take.
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Figure;
use super::process::{self, Memory};
use crate::cache::Cache;
use crate::cluster::{Cluster, Parts, Settings, processes};
use crate::demo;
use crate::place::Place;
use crate::progress::step;

/// After the demo, until memory is looked at.
const IDLE: Duration = Duration::from_secs(30);

/// Runs the demo in a new cluster and looks at its pods; the cluster is ended whatever came of it.
///
/// # Errors
/// When the demo fails, or one of its programs does not run.
pub fn figures(cache: &Cache) -> Result<Vec<Figure>> {
    let settings = Settings::numbered("measure", 4, Parts::Node).tied();
    Cluster::down(cache, &settings)?;
    let begun = Instant::now();
    let done = demo::run(cache, &Place::Own(settings.clone())).and_then(|()| {
        let demo = begun.elapsed().as_secs_f64();
        step("let it rest", || {
            std::thread::sleep(IDLE);
            Ok(())
        })?;
        let mut figures = vec![Figure::new(
            "`cargo xtask demo`, tools and programs built, no cluster yet",
            "s",
            Some(120.0),
            vec![demo],
        )];
        for (name, goal) in [("operator", Some(64.0)), ("gateway", None), ("engine", Some(1024.0))] {
            let memory = memory(&settings, name)?;
            figures.push(Figure::new(format!("{name} pod of the demo, resident, idle"), "MiB", goal, vec![memory.now]));
            figures.push(Figure::new("the same, the most it ever had", "MiB", goal, vec![memory.most]));
        }
        Ok(figures)
    });
    Cluster::down(cache, &settings)?;
    done
}

/// Memory of the one process of a program among the cluster's pods.
///
/// # Errors
/// When there is none, or more than one.
pub fn memory(settings: &Settings, name: &str) -> Result<Memory> {
    Memory::of(of_pod(settings, name)?)
}

/// Seconds of processor that this process has had.
///
/// # Errors
/// As [`memory`].
pub fn processor_time(settings: &Settings, name: &str) -> Result<f64> {
    process::processor_time(of_pod(settings, name)?)
}

fn of_pod(settings: &Settings, name: &str) -> Result<u32> {
    let program = format!("/usr/local/bin/lorafleet-{name}");
    let group = settings.control_group();
    let found: Vec<u32> = processes()
        .into_iter()
        .filter(|process| process.words.first() == Some(&program))
        .filter(|process| {
            fs::read_to_string(format!("/proc/{}/cgroup", process.id)).is_ok_and(|it| it.contains(&group))
        })
        .map(|process| process.id)
        .collect();
    ensure!(found.len() == 1, "one process {program} expected in {group}, found {found:?}");
    found.first().copied().context("no process")
}
