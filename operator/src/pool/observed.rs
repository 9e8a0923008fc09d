//! The world as one pass of the pool controller sees it: plain data, so that a test can write it down.

use std::collections::BTreeMap;

use lorafleet_crds::wire::Report;
use lorafleet_crds::{BaseModel, LoraAdapter, ServingPool};
use serde::{Deserialize, Serialize};

use super::report::Held;
use crate::build::Defaults;

/// Everything that a plan rests on.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Observed {
    pub pool: ServingPool,
    #[serde(default)]
    pub base: Option<BaseModel>,
    /// Adapters of the pool's namespace and base, selected or not, oldest first.
    #[serde(default)]
    pub adapters: Vec<LoraAdapter>,
    /// Engine pods by name.
    #[serde(default)]
    pub pods: Vec<PodSeen>,
    /// Objects of the pool that exist, by `Kind/name`.
    #[serde(default)]
    pub children: BTreeMap<String, ChildSeen>,
    /// The Secret with the keys exists.
    #[serde(default)]
    pub keys_exist: bool,
    /// The entry that it lacks. Without it pods cannot be asked.
    #[serde(default)]
    pub keys_lack: Option<String>,
    /// The Secret with the clients' keys is named and does not exist.
    #[serde(default)]
    pub api_keys_missing: bool,
    #[serde(default)]
    pub engine: DeploymentSeen,
    #[serde(default)]
    pub gateway: DeploymentSeen,
    pub defaults: Defaults,
}

/// One engine pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodSeen {
    pub name: String,
    /// Kubernetes sends it traffic.
    #[serde(default)]
    pub ready: bool,
    #[serde(default)]
    pub deleting: bool,
    /// Its engine runs and does not answer Kubernetes yet.
    #[serde(default)]
    pub starting: bool,
    /// Why it does not run, as Kubernetes says it.
    #[serde(default)]
    pub trouble: Option<Trouble>,
    #[serde(default)]
    pub address: Option<String>,
    #[serde(default)]
    pub answer: Answer,
}

/// Why a container does not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

/// What the pod answered when it was asked what it holds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// It has no address yet, or is going away.
    #[default]
    NotAsked,
    Unreachable(String),
    Report(Held),
}

/// One object of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChildSeen {
    pub resource_version: String,
    #[serde(default)]
    pub uid: Option<String>,
    /// It carries the pool's labels, and the pool does not control it.
    #[serde(default)]
    pub foreign: bool,
    /// What this operator last applied to it, and which version came of it.
    #[serde(default)]
    pub applied: Option<Applied>,
}

/// A write that is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    /// Hash of what was sent.
    pub hash: String,
    pub resource_version: String,
    /// Of the object's spec as it is since.
    #[serde(default)]
    pub generation: Option<i64>,
}

/// How far a Deployment is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DeploymentSeen {
    /// Of its spec.
    pub generation: i64,
    /// Its controller has seen that spec.
    pub observed: bool,
    /// Pods of any template, but for those that are going away.
    pub pods: u32,
    /// Pods made from the present template.
    pub updated: u32,
    pub ready: u32,
    /// Why it cannot make pods, or why one of them does not run.
    pub trouble: Option<String>,
}

impl DeploymentSeen {
    /// What is not yet as it shall be, if so many pods of the present template shall take traffic and no others be there.
    pub fn behind(&self, desired: u32) -> Option<String> {
        let updated = if self.observed { self.updated } else { 0 };
        let older = self.pods.saturating_sub(self.updated);
        if updated < desired {
            Some(format!("{updated} are of the present template"))
        } else {
            (older > 0).then(|| format!("{older} of an older template are there still"))
        }
    }
}

impl PodSeen {
    /// Its report, unless it is going away.
    pub fn report(&self) -> Option<&Report> {
        match &self.answer {
            Answer::Report(report) if !self.deleting => Some(report),
            _ => None,
        }
    }

    /// Kubernetes sends it new traffic.
    pub fn takes_traffic(&self) -> bool {
        self.ready && !self.deleting
    }
}
