//! The world as one pass of the intake controller sees it: plain data, so that a test can write it down.

use kube::ResourceExt;
use lorafleet_artifact::{Digest, Traits};
use lorafleet_crds::{BaseModel, LoraAdapter, LoraAdapterStatus, PoolPlacement, SourceFile};
use serde::{Deserialize, Serialize};

use crate::job::JobState;
use crate::recheck::Recheck;

/// Everything that a plan rests on.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Observed {
    pub adapter: LoraAdapter,
    #[serde(default)]
    pub base: Option<BaseModel>,
    /// Other adapters of the namespace and base with the same served name.
    #[serde(default)]
    pub rivals: Vec<Rival>,
    /// Pools of the namespace that serve the base, by name.
    #[serde(default)]
    pub pools: Vec<PoolSeen>,
    pub job: JobState<Outcome>,
    /// The look whether the source is still what was judged.
    #[serde(default)]
    pub recheck: Recheck,
    #[serde(default)]
    pub source_caps: Vec<String>,
    /// Seconds since 1970.
    #[serde(default)]
    pub now_s: i64,
}

/// Another object that wants the same name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rival {
    pub name: String,
    /// Seconds since 1970.
    pub created_s: i64,
    /// A revision of it is served under the name.
    #[serde(default)]
    pub served: bool,
}

impl Rival {
    pub fn of(adapter: &LoraAdapter) -> Self {
        let serves = |status: &LoraAdapterStatus| {
            status.current_revision.is_some() && status.served_name.as_deref() == Some(adapter.served_name())
        };
        Self {
            name: adapter.name_any(),
            created_s: adapter.creation_timestamp().map_or(i64::MAX, |time| time.0.as_second()),
            served: adapter.status.as_ref().is_some_and(serves),
        }
    }

    /// Whose the name is: of the one that is served under it, so that nobody takes away what is in use; else of the oldest.
    /// Gateways have the same rule.
    pub fn goes_before(&self, other: &Self) -> bool {
        let order = |rival: &Self| (!rival.served, rival.created_s);
        order(self) < order(other) || order(self) == order(other) && self.name < other.name
    }
}

/// One pool of the base.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSeen {
    pub name: String,
    /// Its selector takes the adapter.
    pub selects: bool,
    /// The pool's controller has looked since this operator leads.
    pub looked: bool,
    /// What it saw of the adapter.
    #[serde(default)]
    pub seen: Option<PoolPlacement>,
}

/// How a read ended for good.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Outcome {
    Verified(Box<Facts>),
    Refused {
        reason: String,
        message: String,
        /// The files are those that were pinned before: what changed is the judgement, not the bytes.
        #[serde(default)]
        same_files: bool,
        /// Names the files that were refused.
        #[serde(default)]
        listing: String,
    },
}

/// What a read found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub digest: Digest,
    pub traits: Traits,
    pub alpha: f64,
    pub size_bytes: u64,
    pub files: Vec<SourceFile>,
}
