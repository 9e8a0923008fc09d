//! The world as one pass of the intake controller sees it: plain data, so that a test can write it down.

use lorafleet_artifact::{Digest, Traits};
use lorafleet_crds::{BaseModel, LoraAdapter, NameClaim, PoolPlacement, SourceFile};
use serde::{Deserialize, Serialize};

use crate::job::JobState;
use crate::recheck::{Recheck, listing};

/// Everything that a plan rests on.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Observed {
    pub adapter: LoraAdapter,
    #[serde(default)]
    pub base: Option<BaseModel>,
    /// What other adapters of the namespace and base say for themselves that want the same served name.
    #[serde(default)]
    pub rivals: Vec<NameClaim>,
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

impl Observed {
    /// Some pool's controller has not looked since this operator leads: what is known of its pods is what the last leader saw.
    pub fn unseen(&self) -> bool {
        self.pools.iter().any(|pool| pool.selects && !pool.looked)
    }
}

/// One pool of the base.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolSeen {
    pub name: String,
    /// Its selector takes the adapter.
    pub selects: bool,
    /// It shall have no pods.
    #[serde(default)]
    pub idle: bool,
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
        /// Of the files, if they were read to the end.
        #[serde(default)]
        digest: Option<Digest>,
    },
}

impl Outcome {
    /// Names the files that it is about.
    pub(super) fn listing(&self) -> String {
        match self {
            Self::Verified(found) => listing(&found.files),
            Self::Refused { listing, .. } => listing.clone(),
        }
    }
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
