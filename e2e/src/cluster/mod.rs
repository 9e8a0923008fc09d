//! A real one-node Kubernetes from public packages, in namespaces of its own.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

pub use files::PAUSE_IMAGE;
pub use settings::{Parts, Prefix, Settings};

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

const PACKAGES: [Needed; 13] = [
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
    Needed { file: "strip", package: "binutils" },
    Needed { file: "/etc/ssl/certs/ca-certificates.crt", package: "ca-certificates" },
];

const PATIENCE: Duration = Duration::from_secs(60);

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
        settings.check(cache)?;
        debian::ensure(&PACKAGES)?;
        let tools = Tools::build(cache)?;
        let folder = settings.folder(cache);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let _lock = lock(&folder)?;
        let cluster = Self { settings: settings.clone(), folder, tools };
        if cluster.is_whole() {
            progress::say(format!("cluster {} is up already", settings.name));
            return Ok(cluster);
        }
        progress::step(&format!("start cluster {}", settings.name), || {
            remove(settings, &cluster.folder)?;
            cluster.start()
        })?;
        Ok(cluster)
    }

    /// The cluster of these settings if it runs and is whole; nothing is started.
    ///
    /// # Errors
    /// When the tools cannot be had.
    pub fn running(cache: &Cache, settings: &Settings) -> Result<Option<Self>> {
        let folder = settings.folder(cache);
        if Node::find(&folder).is_none() {
            return Ok(None);
        }
        let cluster = Self { settings: settings.clone(), folder, tools: Tools::build(cache)? };
        Ok(cluster.is_whole().then_some(cluster))
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
        Kubectl::new(&self.tools, &self.kubeconfig())
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

    /// What a running cluster must have been made by to be used again.
    fn made_by(&self) -> String {
        format!("{:?} {:?}", self.settings, self.tools)
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
        groups::make(settings)?;
        let node = Node::start(folder, &self.tools.pause)?;
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

/// Written last when a cluster starts, and read to know whether a running one is the wanted one.
const MADE_BY: &str = "made-by";

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
    // The link goes with the node's namespace; one whose node died half made is removed here.
    let link = Shell::new("ip").args(["link", "show", "dev", &settings.interface]).finish()?;
    if link.success && !link.stdout.contains("state UP") {
        Shell::new("ip").args(["link", "delete", &settings.interface]).finish()?;
    }
    groups::remove(settings)?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name() == "logs" {
            continue;
        }
        let path = entry.path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}
