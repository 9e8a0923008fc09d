//! The node: processes in network, mount and process namespaces of their own. The host sees one link, and when the node's
//! first process ends the kernel ends all others and takes mounts, links and packet rules with them.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::settings::{Life, Settings};
use crate::shell::Shell;
use crate::tied;

/// Time for the node's first process to appear, and for all to be gone.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A running node: its first process as the host numbers it.
#[derive(Clone, Debug)]
pub struct Node {
    folder: PathBuf,
    first: u32,
}

impl Node {
    /// Finds the node of the cluster in `folder` among the running processes, whoever started it.
    pub fn find(folder: &Path) -> Option<Self> {
        let name = first_program(folder);
        let first = processes().into_iter().find(|process| process.words.first() == Some(&name))?.id;
        Some(Self { folder: folder.to_owned(), first })
    }

    /// Starts an empty node whose first process is a copy of `pause`.
    ///
    /// # Errors
    /// When the namespaces cannot be made.
    pub fn start(folder: &Path, pause: &Path, life: Life) -> Result<Self> {
        let first = folder.join("node");
        fs::copy(pause, &first).with_context(|| format!("copy {} to {}", pause.display(), first.display()))?;
        let log = log_file(folder, "node")?;
        // `setsid` becomes `unshare`, which ends its child when it is killed itself.
        let mut command = match life {
            Life::Kept => Command::new("setsid"),
            Life::Tied => tied::command(["setsid"]),
        };
        command
            .args(["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation"])
            .arg("private")
            .arg(&first)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let started = match life {
            Life::Kept => command.spawn(),
            Life::Tied => tied::spawn(command),
        };
        started.context("start unshare")?;
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(node) = Self::find(folder).filter(|node| node.is_apart()) {
                return Ok(node);
            }
            std::thread::sleep(POLL);
        }
        bail!("no node after {PATIENCE:?}: {}", fs::read_to_string(folder.join("logs/node.log")).unwrap_or_default())
    }

    /// Whether the process has its own namespaces already: it is seen before they are complete.
    fn is_apart(&self) -> bool {
        let of = |who: &str| fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
        of(&self.first.to_string()).is_some_and(|mounts| Some(mounts) != of("self"))
    }

    /// A command inside, to its end.
    pub fn shell(&self, program: &str) -> Shell {
        Shell::new("nsenter").args(self.enter()).arg(program)
    }

    fn enter(&self) -> Vec<String> {
        ["--target", &self.first.to_string(), "--net", "--mount", "--pid", "--"].map(str::to_owned).to_vec()
    }

    /// Starts a program inside that outlives this process; its output goes to `logs/NAME.log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, name: &str, program: &Path, args: &[String]) -> Result<()> {
        let log = log_file(&self.folder, name)?;
        Command::new("setsid")
            .arg("nsenter")
            .args(self.enter())
            .arg(program)
            .args(args)
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .map(drop)
            .with_context(|| format!("start {name}"))
    }

    /// Whether a program of this path runs inside.
    pub fn runs(&self, program: &Path) -> bool {
        let program = program.display().to_string();
        let inside = namespace(self.first);
        processes().iter().any(|process| {
            process.words.first() == Some(&program) && namespace(process.id) == inside && inside.is_some()
        })
    }

    /// Cuts the node's folders from the host's, so that nothing that a node writes by fixed path lands on the host.
    ///
    /// # Errors
    /// When a mount fails.
    pub fn own_folders(&self) -> Result<()> {
        self.shell("mount").args(["-t", "tmpfs", "tmpfs", "/run"]).run()?;
        for (inside, own) in [("/var/lib", "var-lib"), ("/var/log", "var-log")] {
            let own = self.folder.join(own);
            fs::create_dir_all(&own).with_context(|| format!("make {}", own.display()))?;
            self.shell("mount").arg("--bind").arg(own).arg(inside).run()?;
        }
        // Volumes that the kubelet mounts must be seen by the containers' runtime.
        self.shell("mount").args(["--make-rshared", "/"]).run()
    }

    /// Lays the one link between host and node, and the routes to pods and services.
    ///
    /// # Errors
    /// When the host already has such a link or routes into these networks.
    pub fn link(&self, settings: &Settings) -> Result<()> {
        let (host, node) = (settings.host_ip(), settings.node_ip());
        for network in [settings.pods(), settings.service_range()] {
            let taken = Shell::new("ip").args(["-4", "route", "show", "to", "exact", &network]).output()?;
            if !taken.trim().is_empty() {
                bail!(
                    "this machine already routes {network} ({}): choose other --network and --services",
                    taken.trim()
                );
            }
        }
        let link = &settings.interface;
        if Shell::new("ip").args(["link", "show", "dev", link]).finish()?.success {
            bail!("this machine has a link {link} already: choose another --interface");
        }
        // Made inside, where it goes with the node, it comes out with its alias on: nobody takes another's for ours.
        let enter = || Shell::new("nsenter").args(["--target", &self.first.to_string(), "--net", "--", "ip"]);
        ip(enter(), &format!("link add uplink type veth peer name {link}"))?;
        ip(enter(), &format!("link set {link} alias {}", settings.link_alias()))?;
        ip(enter(), &format!("link set {link} netns {}", std::process::id()))?;
        ip(Shell::new("ip"), &format!("address add {host}/30 dev {link}"))?;
        ip(Shell::new("ip"), &format!("link set {link} up"))?;
        ip(self.shell("ip"), "link set lo up")?;
        ip(self.shell("ip"), &format!("address add {node}/30 dev uplink"))?;
        ip(self.shell("ip"), "link set uplink up")?;
        ip(self.shell("ip"), &format!("route add default via {host}"))?;
        self.shell("sysctl").args(["-q", "-w", "net.ipv4.ip_forward=1"]).run()?;
        for network in [settings.pods(), settings.service_range()] {
            ip(Shell::new("ip"), &format!("route add {network} via {node} dev {link}"))?;
        }
        Ok(())
    }

    /// Ends every process of the node, and waits until all are gone.
    ///
    /// # Errors
    /// When some process is still there after a minute.
    pub fn kill(self) -> Result<()> {
        let inside = namespace(self.first);
        Shell::new("kill").args(["-KILL", &self.first.to_string()]).finish()?;
        let begun = Instant::now();
        loop {
            let left: Vec<Process> = processes()
                .into_iter()
                .filter(|process| (inside.is_some() && namespace(process.id) == inside) || self.enters(process))
                .collect();
            if left.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                bail!("still running after {PATIENCE:?}: {left:?}");
            }
            // A parent of one inside that stands still, as one does whose child was stopped, does not see its child end.
            for process in left {
                Shell::new("kill").args(["-KILL", &process.id.to_string()]).finish()?;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Ends what entered a node of the cluster in `folder` that is gone. The parent of a process that stands still stands still
    /// itself, and does not see its child end with the node: nothing but a kill reaches it.
    ///
    /// # Errors
    /// When some such process is still there after a minute.
    pub fn end_left(folder: &Path) -> Result<()> {
        let inside = format!("{}/", folder.display());
        let begun = Instant::now();
        loop {
            let mut left = processes();
            left.retain(|it| it.words.first().is_some_and(|word| word == "nsenter"));
            left.retain(|it| it.words.iter().any(|word| word.contains(&inside)));
            if left.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                bail!("still running after {PATIENCE:?}: {left:?}");
            }
            for process in left {
                Shell::new("kill").args(["-KILL", &process.id.to_string()]).finish()?;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Whether a process of the host is the parent of one inside: it ends by itself once its child has.
    fn enters(&self, process: &Process) -> bool {
        let words = &process.words;
        words.first().is_some_and(|program| program == "nsenter" || program == "unshare")
            && (words.contains(&self.first.to_string()) || words.contains(&first_program(&self.folder)))
    }
}

fn ip(shell: Shell, words: &str) -> Result<()> {
    shell.args(words.split(' ')).run()
}

fn first_program(folder: &Path) -> String {
    folder.join("node").display().to_string()
}

fn log_file(folder: &Path, name: &str) -> Result<File> {
    let logs = folder.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("make {}", logs.display()))?;
    let path = logs.join(format!("{name}.log"));
    File::create(&path).with_context(|| format!("make {}", path.display()))
}

fn namespace(process: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/pid")).ok()
}

/// A process of the host and its command line.
#[derive(Clone, Debug)]
pub struct Process {
    pub id: u32,
    pub words: Vec<String>,
}

/// All processes that have a command line; those that end meanwhile are left out, and so are those already dead.
pub fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let words: Vec<String> = line
                .split(|&byte| byte == 0)
                .filter(|word| !word.is_empty())
                .map(|word| String::from_utf8_lossy(word).into_owned())
                .collect();
            (!words.is_empty()).then_some(Process { id, words })
        })
        .collect()
}
