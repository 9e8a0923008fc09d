//! A real one-node Kubernetes from public packages, in namespaces of its own.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub use files::PAUSE_IMAGE;
pub use node::{Process, processes};
pub use settings::{Life, Parts, Prefix, Settings};

use crate::cache::Cache;
use crate::debian::{self, Needed};
use crate::kubectl::Kubectl;
use crate::progress;
use crate::shell::Shell;
use crate::tools::Tools;
use crate::wait;
use node::Node;

mod settings;
mod pki;
mod files;
mod node;
mod groups;
mod programs;

const PACKAGES: [Needed; 11] = [
    Needed { file: "containerd", package: "containerd" },
    Needed { file: "runc", package: "runc" },
    Needed { file: "/usr/lib/cni/ptp", package: "containernetworking-plugins" },
    Needed { file: "iptables", package: "iptables" },
    Needed { file: "conntrack", package: "conntrack" },
    Needed { file: "ethtool", package: "ethtool" },
    Needed { file: "socat", package: "socat" },
    Needed { file: "ip", package: "iproute2" },
    Needed { file: "sysctl", package: "procps" },
    Needed { file: "nsenter", package: "util-linux" },
    Needed { file: "curl", package: "curl" },
];

/// Seconds are usual; the rest is for a slow and busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// A running cluster that this harness made.
#[derive(Clone, Debug)]
pub struct Cluster {
    settings: Settings,
    folder: PathBuf,
    tools: Tools,
}

impl Cluster {
    /// The cluster of these settings: the one that runs, when it is whole, else a new one.
    ///
    /// # Errors
    /// When a package, a tool or a process of it cannot be had; the message names the log.
    pub fn up(cache: &Cache, settings: &Settings) -> Result<Self> {
        Self::check(cache, settings)?;
        let tools = Tools::build(cache)?;
        let folder = settings.folder(cache);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let _lock = lock(&folder)?;
        let cluster = Self { settings: settings.clone(), folder, tools };
        if cluster.is_whole() {
            progress::say(format!("cluster {} is up already", settings.name));
            return Ok(cluster);
        }
        cluster.may_be_replaced()?;
        progress::step(&format!("start cluster {}", settings.name), || {
            remove(settings, &cluster.folder)?;
            cluster.start()
        })?;
        Ok(cluster)
    }

    /// Whether a cluster can run here; missing packages are installed.
    ///
    /// # Errors
    /// When these settings, this user or this machine cannot have one; the message says what is missing.
    pub fn check(cache: &Cache, settings: &Settings) -> Result<()> {
        settings.check(cache)?;
        if !debian::is_root()? {
            bail!(
                "a cluster of its own needs root, since its kubelet mounts and makes control groups: run this as root, or \
                 give --context NAME to use a cluster that you have"
            );
        }
        debian::ensure(&PACKAGES)?;
        // One that runs has its room.
        if Node::find(&settings.folder(cache)).is_some() { Ok(()) } else { ensure_space(cache.root()) }
    }

    /// Ends the cluster and removes everything but its logs. Nothing happens where none is.
    ///
    /// # Errors
    /// When something of it cannot be ended or removed.
    pub fn down(cache: &Cache, settings: &Settings) -> Result<()> {
        settings.check(cache)?;
        let folder = settings.folder(cache);
        if !folder.exists() {
            return Ok(());
        }
        let _lock = lock(&folder)?;
        remove(settings, &folder)
    }

    /// [`Cluster::down`] for the cluster of this name, and a line that says what came of it.
    ///
    /// # Errors
    /// As there.
    pub fn down_named(cache: &Cache, name: &str) -> Result<()> {
        let settings = Settings { name: name.to_owned(), ..Settings::default() };
        settings.check(cache)?;
        let folder = settings.folder(cache);
        if Node::find(&folder).is_none() && entries(&folder).is_empty() {
            progress::say(format!("there is no cluster {name}"));
            return Ok(());
        }
        progress::step(&format!("end cluster {name}"), || Self::down(cache, &settings))?;
        progress::say(format!(
            "cluster {name} is gone; its logs are in {}, the tools in {}",
            folder.join("logs").display(),
            cache.root().join("tools").display()
        ));
        Ok(())
    }

    /// [`Cluster::down_named`] for every cluster that was ever started from this cache, but for those of runs under way, which end
    /// them by themselves.
    ///
    /// # Errors
    /// As there; the other clusters are ended all the same.
    pub fn down_all(cache: &Cache) -> Result<()> {
        let mut failed = Vec::new();
        for name in names(cache) {
            let folder = Settings { name: name.clone(), ..Settings::default() }.folder(cache);
            if let Some((owner, true)) = owner(&folder) {
                progress::say(format!("process {owner} runs on a cluster and ends it: {}", folder.display()));
            } else if let Err(error) = Self::down_named(cache, &name) {
                failed.push(format!("{error:#}"));
            }
        }
        if !failed.is_empty() {
            bail!("{}", failed.join("\n"));
        }
        Ok(())
    }

    /// Ends the clusters of runs that have ended: those that were tied to them, or not whole yet. Their names.
    ///
    /// # Errors
    /// When something of one cannot be ended or removed.
    pub fn end_orphans(cache: &Cache) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        for name in names(cache) {
            let settings = Settings { name: name.clone(), ..Settings::default() };
            let folder = settings.folder(cache);
            if owner(&folder).is_none() {
                continue;
            }
            let _lock = lock(&folder)?;
            // Another run may have made it anew meanwhile.
            if let Some((_, false)) = owner(&folder) {
                remove(&settings, &folder)?;
                ended.push(name);
            }
        }
        Ok(ended)
    }

    /// Names of the clusters that run until somebody ends them.
    pub fn kept(cache: &Cache) -> Vec<String> {
        let mut names = names(cache);
        names.retain(|name| {
            let folder = Settings { name: name.clone(), ..Settings::default() }.folder(cache);
            owner(&folder).is_none() && Node::find(&folder).is_some()
        });
        names
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("admin.kubeconfig")
    }

    /// Folder of the processes' logs.
    pub fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    pub fn kubectl(&self) -> Kubectl {
        Kubectl::new(&self.tools.kubernetes.join("kubectl"), &self.kubeconfig())
    }

    /// Puts an image archive into the node's store.
    ///
    /// # Errors
    /// When containerd refuses it.
    pub fn import(&self, archive: &Path) -> Result<()> {
        self.containerd(&["images", "import"]).arg(archive).run()
    }

    /// containerd's own client, for what Kubernetes has no word for.
    pub fn containerd(&self, args: &[&str]) -> Shell {
        let socket = settings::containerd_socket(&self.folder);
        Shell::new("ctr").arg("--address").arg(socket).args(["--namespace", "k8s.io"]).args(args)
    }

    fn is_whole(&self) -> bool {
        let Some(node) = Node::find(&self.folder) else { return false };
        fs::read_to_string(self.folder.join(MADE_BY)).ok() == Some(self.made_by())
            && programs::all(&self.folder, &self.settings, &self.tools).iter().all(|it| node.runs(&it.path))
            && self.ready().is_ok_and(|ready| ready)
    }

    /// A cluster that somebody keeps may hold what nobody wants to lose.
    fn may_be_replaced(&self) -> Result<()> {
        let name = &self.settings.name;
        if Node::find(&self.folder).is_none() || owner(&self.folder).is_some() {
            return Ok(());
        }
        let end = format!("`cargo xtask down --name {name}` ends it, with all that is in it");
        match running(&self.folder, name) {
            Some(there) if there != (Settings { life: Life::Kept, ..self.settings.clone() }) => {
                bail!("cluster {name} is up with {}, not with {}: {end}", there.words(), self.settings.words())
            }
            _ if fs::read_to_string(self.folder.join(MADE_BY)).ok() != Some(self.made_by()) => {
                bail!("cluster {name} is up, and was made by other versions of its programs: {end}")
            }
            _ => progress::say(format!("cluster {name} is no longer whole: it is made anew, without what was in it")),
        }
        Ok(())
    }

    /// Settings of the cluster of this name that runs and is kept, if one does.
    pub fn running(cache: &Cache, name: &str) -> Option<Settings> {
        let folder = Settings { name: name.to_owned(), ..Settings::default() }.folder(cache);
        Node::find(&folder)?;
        if owner(&folder).is_some() {
            return None;
        }
        running(&folder, name)
    }

    /// What a running cluster must have been made by to be used again.
    fn made_by(&self) -> String {
        let settings = Settings { life: Life::Kept, ..self.settings.clone() };
        format!("{settings:?} {:?}", self.tools)
    }

    fn ready(&self) -> Result<bool> {
        Ok(self.kubectl().args(["get", "--raw", "/readyz"]).shell().finish()?.success)
    }

    fn start(&self) -> Result<()> {
        let (folder, settings) = (&self.folder, &self.settings);
        pki::write(&folder.join("pki"), settings)?;
        for (path, text) in files::all(folder, settings) {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap_or(folder))?;
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
        fs::write(folder.join(INTERFACE), &settings.interface)?;
        fs::write(folder.join(SETTINGS), settings.words())?;
        let own = std::process::id();
        fs::write(folder.join(OWNER), format!("{own} {}", started(own).context("when this process started")?))?;
        groups::make(settings)?;
        let node = Node::start(folder, &self.tools.pause, settings.life)?;
        node.own_folders()?;
        node.link(settings)?;
        let (first, then): (Vec<_>, Vec<_>) =
            programs::all(folder, settings, &self.tools).into_iter().partition(|program| !program.wants_server);
        for program in &first {
            node.spawn(program.name, &program.path, &program.args)?;
        }
        wait::until("the API server is ready", PATIENCE, || self.ready().map(|ready| ready.then_some(())))
            .with_context(|| format!("see the logs in {}", self.logs().display()))?;
        for program in &then {
            node.spawn(program.name, &program.path, &program.args)?;
        }
        if settings.parts == Parts::Node {
            self.import(&crate::images::pause(&self.tools, folder)?)?;
            self.node_ready().with_context(|| format!("see the logs in {}", self.logs().display()))?;
        }
        fs::write(folder.join(MADE_BY), self.made_by())?;
        if settings.life == Life::Kept {
            fs::remove_file(folder.join(OWNER))?;
        }
        Ok(())
    }

    fn node_ready(&self) -> Result<()> {
        let kubectl = self.kubectl();
        wait::until("the node is Ready", PATIENCE, || {
            let nodes = kubectl.json(["get", "nodes"])?;
            let conditions = nodes["items"][0]["status"]["conditions"].as_array().cloned().unwrap_or_default();
            Ok(conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True").then_some(()))
        })?;
        // Pods of a namespace are refused until its account is there.
        wait::until("the default service account is there", PATIENCE, || {
            let found = kubectl.args(["get", "serviceaccount", "default", "-n", "default"]).shell().finish()?;
            Ok(found.success.then_some(()))
        })
    }
}

/// Name of the link, written before it is laid, so that whoever ends the cluster finds it.
const INTERFACE: &str = "interface";

/// Its settings, as flags.
const SETTINGS: &str = "settings";

/// Settings that the cluster in this folder was started with.
fn running(folder: &Path, name: &str) -> Option<Settings> {
    Settings::from_words(name, &fs::read_to_string(folder.join(SETTINGS)).ok()?)
}

/// Number and start of the process that a cluster ends with: its life long if it is tied, else until it is whole.
const OWNER: &str = "owner";

/// Written last when a cluster starts, and read to know whether a running one is the wanted one.
const MADE_BY: &str = "made-by";

/// The process that a cluster ends with, and whether it lives.
fn owner(folder: &Path) -> Option<(u32, bool)> {
    let text = fs::read_to_string(folder.join(OWNER)).ok()?;
    let (owner, start) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    let owner: u32 = owner.parse().ok()?;
    // Another process may have its number by now.
    Some((owner, started(owner).is_some_and(|started| started == start)))
}

/// When a process was started, in the kernel's ticks; none if there is no such process, or only its remains.
fn started(process: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // A program's name may hold anything, but is the last thing in parentheses. After it the state, and the twentieth.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    (fields.next()? != "Z").then(|| fields.nth(18).map(str::to_owned)).flatten()
}

/// Names of all clusters that were ever started from this cache.
fn names(cache: &Cache) -> Vec<String> {
    let folder = Settings::default().folder(cache);
    let entries = fs::read_dir(folder.parent().unwrap_or(&folder)).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// Least room for images, pods and logs; the tools' builds want some more.
const SPACE_MIN: u64 = 3 << 30;

fn ensure_space(folder: &Path) -> Result<()> {
    let printed = Shell::new("df").args(["--block-size=1", "--output=avail"]).arg(folder).output()?;
    let free: u64 = printed.lines().nth(1).and_then(|line| line.trim().parse().ok()).context("read what df printed")?;
    if free < SPACE_MIN {
        bail!(
            "{} has {} MB free, a cluster needs {} MB; LORAFLEET_CACHE moves the folder elsewhere",
            folder.display(),
            free / 1_000_000,
            SPACE_MIN / 1_000_000
        );
    }
    Ok(())
}

/// What a cluster's folder holds besides its logs.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    found.filter(|entry| entry.file_name() != "logs").map(|entry| entry.path()).collect()
}

fn lock(folder: &Path) -> Result<File> {
    let path = folder.with_extension("lock");
    let file = File::create(&path).with_context(|| format!("make {}", path.display()))?;
    file.lock().with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}

/// Ends whatever there is of a cluster, whole or half, and removes all but its logs.
fn remove(settings: &Settings, folder: &Path) -> Result<()> {
    while let Some(node) = Node::find(folder) {
        node.kill()?;
    }
    Node::end_left(folder)?;
    // The link goes with the node's namespace, but that may stay a minute or two, for connections whose other end has gone before
    // it.
    if let Ok(interface) = fs::read_to_string(folder.join(INTERFACE)) {
        let link = Shell::new("ip").args(["link", "show", "dev", &interface]).finish()?;
        let ours = format!("alias {}", settings.link_alias());
        if link.success && link.stdout.lines().any(|line| line.trim() == ours) {
            Shell::new("ip").args(["link", "delete", &interface]).finish()?;
        }
    }
    groups::remove(settings)?;
    for path in entries(folder) {
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}
