//! The world as one pass of the intake controller sees it: plain data, so that a test can write it down.

use std::collections::BTreeMap;

use lorafleet_artifact::Digest;
use lorafleet_crds::{BaseModel, LoraAdapter, PoolPlacement, SourceFile};
use serde::{Deserialize, Serialize};

use crate::job::JobState;

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
    },
}

/// What a read found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub digest: Digest,
    pub rank: u32,
    pub ranks: BTreeMap<String, u32>,
    pub alpha: f64,
    pub size_bytes: u64,
    pub files: Vec<SourceFile>,
}
