//! What a cluster could leave on the machine.
#![allow(clippy::unwrap_used)]

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::Settings;
use lorafleet_e2e::shell::Shell;

/// Everything of the machine that a cluster could leave a trace in, one line each.
pub fn traces(settings: &Settings, cache: &Cache) -> Vec<String> {
    let folder = settings.folder(cache).display().to_string();
    let mut lines = Vec::new();
    for (command, args) in [
        ("ip", &["-brief", "link"][..]),
        ("ip", &["-4", "route"]),
        ("iptables-save", &[]),
        ("ls", &["-A", "/run", "/var/lib", "/var/log", "/opt", "/etc/cni"]),
        ("find", &["/sys/fs/cgroup", "-maxdepth", "2", "-name", "lorafleet-*"]),
    ] {
        let printed = Shell::new(command).args(args).finish().unwrap().stdout;
        // Counters and comments of the packet filter change with every packet.
        lines.extend(
            printed.lines().filter(|line| !line.starts_with(['#', ':'])).map(|line| format!("{command}: {line}")),
        );
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    lines.extend(mounts.lines().map(|line| format!("mount: {line}")));
    let processes = Shell::new("ps").args(["-eo", "args"]).output().unwrap();
    lines.extend(processes.lines().filter(|line| line.contains(&folder)).map(|line| format!("process: {line}")));
    // Other clusters may come and go meanwhile; this one's names are its own.
    let other = |line: &String| line.contains("lorafleet-") && !line.contains(&settings.control_group());
    lines.retain(|line| !other(line));
    lines.sort();
    lines
}
