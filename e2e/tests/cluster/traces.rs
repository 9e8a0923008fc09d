//! What a cluster could leave on the machine.
#![allow(clippy::unwrap_used)]

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::Settings;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::PATIENCE;

/// Everything of the machine that a cluster could leave a trace in, one line each. Other clusters may come and go meanwhile: what
/// is theirs is left out.
pub fn traces(settings: &Settings, cache: &Cache) -> Vec<String> {
    let (own, folder) = (settings.link_alias(), settings.folder(cache).display().to_string());
    let is_other = |line: &String| line.contains("lorafleet-") && !line.contains(&own);
    // "7: lf0@if2: <BROADCAST,MULTICAST,UP> ... alias NAME": what else it says changes with its use.
    let name = |line: &String| line.split([' ', '@']).nth(1).unwrap_or_default().trim_end_matches(':').to_owned();
    let (others, links): (Vec<String>, Vec<String>) =
        printed("ip", &["-oneline", "link"]).into_iter().partition(is_other);
    let others: Vec<String> = others.iter().map(|line| format!(" dev {} ", name(line))).collect();
    let is_routed_by_another = |line: &String| others.iter().any(|device| format!("{line} ").contains(device));

    let mut found: Vec<String> = links.iter().map(|line| format!("link: {}", name(line))).collect();
    found.extend(printed("ip", &["-4", "route"]).into_iter().filter(|line| !is_routed_by_another(line)));
    for folder in ["/run", "/var/lib", "/var/log", "/opt", "/etc/cni"] {
        found.extend(printed("ls", &["-A", folder]).iter().map(|line| format!("{folder}/{line}")));
    }
    // Counters and comments of the packet filter change with every packet.
    found.extend(printed("iptables-save", &[]).into_iter().filter(|line| !line.starts_with(['#', ':'])));
    found.extend(printed("find", &["/sys/fs/cgroup", "-maxdepth", "2", "-name", "lorafleet-*"]));
    found.extend(std::fs::read_to_string("/proc/self/mounts").unwrap().lines().map(|line| format!("mount: {line}")));
    found.extend(printed("ps", &["-eo", "args"]).into_iter().filter(|line| line.contains(&folder)));
    found.retain(|line| !is_other(line));
    found
}

/// Waits until nothing is left that was not there before; the kernel and other processes take some things away later.
pub fn gone(settings: &Settings, cache: &Cache, before: &[String], ended: &str) {
    wait::until("all traces are gone", PATIENCE, || {
        let left = traces(settings, cache);
        let more: Vec<_> = left.iter().filter(|line| !before.contains(line)).collect();
        if more.is_empty() { Ok(Some(())) } else { anyhow::bail!("{ended}: {more:?}") }
    })
    .unwrap();
}

/// What a command prints, whatever its exit: not every machine has all of it.
fn printed(command: &str, args: &[&str]) -> Vec<String> {
    Shell::new(command).args(args).finish().unwrap().stdout.lines().map(str::to_owned).collect()
}
