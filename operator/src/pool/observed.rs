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
}

/// How far a Deployment is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DeploymentSeen {
    /// Its controller has seen its present spec.
    pub observed: bool,
    /// Pods made from the present template.
    pub updated: u32,
    pub ready: u32,
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
