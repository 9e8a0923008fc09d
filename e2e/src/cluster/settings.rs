//! What tells two clusters apart, and every address that follows from it.
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use crate::cache::Cache;

/// Longest path of a Unix socket that Linux takes is 107 bytes.
const SOCKET_PATH_MAX: usize = 107;
/// Longest name of a network interface that Linux takes.
const INTERFACE_NAME_MAX: usize = 15;

/// Name and addresses of a cluster. Two clusters with different values never meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Names the folder, the control groups and the context.
    pub name: String,
    /// The one network interface that the host sees.
    pub interface: String,
    /// First two numbers of the pods' and the node's addresses.
    pub network: Prefix,
    /// First two numbers of the services' addresses.
    pub services: Prefix,
    /// What runs.
    pub parts: Parts,
    /// How long it runs, if this process starts it. Does not tell clusters apart.
    pub life: Life,
}

/// How long a cluster runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Life {
    /// Until somebody ends it.
    #[default]
    Kept,
    /// At most as long as the thread that starts it, however that ends.
    Tied,
}

/// How much of a cluster runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Everything: pods run.
    Node,
    /// etcd and the API server alone: schemas, rules and RBAC can be tested in seconds.
    ApiServer,
}

/// The first two numbers of a /16 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub u8, pub u8);

impl std::fmt::Display for Prefix {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{}", self.0, self.1)
    }
}

impl std::str::FromStr for Prefix {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once('.').map(|(first, second)| (first.parse(), second.parse())) {
            Some((Ok(first), Ok(second))) => Ok(Self(first, second)),
            _ => bail!("`{text}` is not the first two numbers of a network, such as 10.88"),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "dev".to_owned(),
            interface: "lf0".to_owned(),
            network: Prefix(10, 88),
            services: Prefix(10, 96),
            parts: Parts::Node,
            life: Life::Kept,
        }
    }
}

impl Settings {
    /// The cluster that most tests share; it stands beside the developer's own.
    pub fn for_tests() -> Self {
        Self::numbered("test", 1, Parts::Node)
    }

    /// A cluster that differs from the default one, and from others with another `index`, in everything that could meet.
    pub fn numbered(name: &str, index: u8, parts: Parts) -> Self {
        Self {
            name: name.to_owned(),
            interface: format!("lf{index}"),
            network: Prefix(10, 100 + index),
            services: Prefix(10, 140 + index),
            parts,
            life: Life::Kept,
        }
    }

    /// The same, gone with the thread that starts it.
    #[must_use]
    pub fn tied(self) -> Self {
        Self { life: Life::Tied, ..self }
    }

    /// What tells it from others of its name, as the flags of `cargo xtask up`.
    pub fn words(&self) -> String {
        let only = if self.parts == Parts::ApiServer { " without a node" } else { "" };
        format!("--interface {} --network {} --services {}{only}", self.interface, self.network, self.services)
    }

    /// The cluster of this name whose [`Settings::words`] these are.
    pub fn from_words(name: &str, words: &str) -> Option<Self> {
        let mut words = words.split(' ').skip(1).step_by(2);
        let (interface, network, services) = (words.next()?, words.next()?, words.next()?);
        let parts = if words.next().is_some() { Parts::ApiServer } else { Parts::Node };
        Some(Self {
            name: name.to_owned(),
            interface: interface.to_owned(),
            network: network.parse().ok()?,
            services: services.parse().ok()?,
            parts,
            life: Life::Kept,
        })
    }

    /// # Errors
    /// When a name is empty or too long, or holds what a folder, a control group or an interface cannot.
    pub fn check(&self, cache: &Cache) -> Result<()> {
        let simple = |text: &str| {
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        ensure!(simple(&self.name), "cluster name `{}`: only a-z, 0-9 and - are allowed", self.name);
        ensure!(simple(&self.interface), "interface `{}`: only a-z, 0-9 and - are allowed", self.interface);
        ensure!(
            self.interface.len() <= INTERFACE_NAME_MAX,
            "interface `{}` has {} bytes, at most {INTERFACE_NAME_MAX}",
            self.interface,
            self.interface.len()
        );
        ensure!(self.network != self.services, "pods and services cannot share the network {}.0.0/16", self.network);
        let folder = self.folder(cache);
        for hidden in ["/run", "/var/run", "/var/lib", "/var/log"] {
            ensure!(!folder.starts_with(hidden), "the cluster's folder {} cannot lie in {hidden}", folder.display());
        }
        let socket = folder.join(CONTAINERD_SOCKET).as_os_str().len();
        ensure!(socket <= SOCKET_PATH_MAX, "{} is too long for a socket: {socket} bytes", folder.display());
        Ok(())
    }

    /// Everything that the cluster writes.
    pub fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join("clusters").join(&self.name)
    }

    /// The host's end of the one link.
    pub fn host_ip(&self) -> String {
        format!("{}.255.1", self.network)
    }

    /// The node's address: API server, kubelet and name service.
    pub fn node_ip(&self) -> String {
        format!("{}.255.2", self.network)
    }

    /// The API server's own service.
    pub fn first_service_ip(&self) -> String {
        format!("{}.0.1", self.services)
    }

    pub fn pods(&self) -> String {
        format!("{}.0.0/17", self.network)
    }

    pub fn service_range(&self) -> String {
        format!("{}.0.0/16", self.services)
    }

    pub fn server(&self) -> String {
        format!("https://{}:6443", self.node_ip())
    }

    /// What the link says of itself, so that nobody removes another cluster's.
    pub fn link_alias(&self) -> String {
        format!("lorafleet-{}", self.name)
    }

    /// Parent of all control groups of the cluster's pods.
    pub fn control_group(&self) -> String {
        format!("/lorafleet-{}", self.name)
    }
}

const CONTAINERD_SOCKET: &str = "containerd.sock";

/// Path of containerd's socket in a cluster's folder.
pub fn containerd_socket(folder: &Path) -> PathBuf {
    folder.join(CONTAINERD_SOCKET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_words() {
        for settings in [Settings::default(), Settings::numbered("rules", 3, Parts::ApiServer), Settings::for_tests()] {
            assert_eq!(Settings::from_words(&settings.name, &settings.words()), Some(settings));
        }
        assert_eq!(Settings::from_words("dev", "--interface lf0"), None);
    }

    #[test]
    fn reads_prefixes() {
        assert_eq!("10.88".parse::<Prefix>().unwrap(), Prefix(10, 88));
        for wrong in ["10", "10.256", "10.88.1", "a.b", ""] {
            assert!(wrong.parse::<Prefix>().unwrap_err().to_string().contains(&format!("`{wrong}`")));
        }
    }
}
