//! The control groups under which all pods of a cluster live, made and removed in every hierarchy of the machine.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::settings::Settings;
use crate::shell::Shell;

const PATIENCE: Duration = Duration::from_secs(60);

/// Where the machine's hierarchies are mounted: one in version 2, one per controller in version 1.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (place, kind) = (words.next()?, words.next()?);
            (kind == "cgroup" || kind == "cgroup2").then(|| PathBuf::from(place))
        })
        .collect()
}

/// The cluster's group in each hierarchy, made or not.
pub fn places(settings: &Settings) -> Vec<PathBuf> {
    let name = settings.control_group();
    hierarchies().into_iter().map(|place| place.join(name.trim_start_matches('/'))).collect()
}

/// Makes the groups.
///
/// # Errors
/// When a folder cannot be made.
pub fn make(settings: &Settings) -> Result<()> {
    for place in places(settings) {
        fs::create_dir_all(&place).with_context(|| format!("make the control group {}", place.display()))?;
        // A new cpuset of version 1 is empty, and no process can enter it before it has what its parent has.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let parent = place.parent().unwrap_or(&place).join(file);
            let Ok(value) = fs::read_to_string(&parent) else { continue };
            fs::write(place.join(file), value.trim()).with_context(|| format!("set {file} of {}", place.display()))?;
        }
    }
    Ok(())
}

/// Ends what still runs in the groups and removes them.
///
/// # Errors
/// When a group is still in use after a minute.
pub fn remove(settings: &Settings) -> Result<()> {
    let begun = Instant::now();
    for place in places(settings) {
        while place.exists() {
            for group in deepest_first(&place) {
                for process in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
                    Shell::new("kill").args(["-KILL", process]).finish()?;
                }
                // Fails while a process is still leaving; the next round sees to it.
                let _ = fs::remove_dir(&group);
            }
            if begun.elapsed() > PATIENCE {
                bail!("the control group {} is still in use after {PATIENCE:?}", place.display());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn deepest_first(place: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(deepest_first(&entry.path()));
        }
    }
    found.push(place.to_owned());
    found
}
