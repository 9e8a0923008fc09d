//! `LoraAdapter`: one adapter, where it comes from, and where it is served.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use lorafleet_artifact::{Digest, Traits};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::AdapterName;

/// One LoRA adapter: where its files are, and under which name it answers.
///
/// Foreseen and not in this version, so not accepted: `type: Medusa`, `mode` (every adapter is shared), `share`, `limits`,
/// `warmth.minReplicas` and `schedule`, `rollout` (every change is served at once on all pods, the old version until then).
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "lorafleet.dev",
    version = "v1alpha1",
    kind = "LoraAdapter",
    plural = "loraadapters",
    shortname = "lora",
    shortname = "loras",
    category = "lorafleet",
    namespaced,
    status = "LoraAdapterStatus",
    derive = "PartialEq",
    doc = "One LoRA adapter: where its files are, and under which name it answers.",
    selectable = ".spec.baseModelRef.name",
    validation = Rule::new("self.metadata.name.size() <= 63 || has(self.spec.servedName)")
        .message("a name of more than 63 characters needs a servedName"),
    validation = Rule::new("!has(self.spec.digest) || !has(self.spec.source.follow) || !self.spec.source.follow")
        .message("digest pins the content and source.follow takes whatever comes: give one of them"),
    printcolumn(name = "Base", type_ = "string", json_path = ".spec.baseModelRef.name"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Served", type_ = "string", description = "Pods that hold it, and their pools", json_path = ".status.served"),
    printcolumn(name = "Rank", type_ = "integer", json_path = ".status.rank"),
    printcolumn(name = "Since", type_ = "date", json_path = ".status.conditions[?(@.type==\"Ready\")].lastTransitionTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Available", type_ = "string", json_path = ".status.conditions[?(@.type==\"Available\")].status", priority = 1),
    printcolumn(name = "Served-As", type_ = "string", description = "What clients put into `model`", json_path = ".status.servedName", priority = 1),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.currentRevision", priority = 1),
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.source.uri", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct LoraAdapterSpec {
    /// The base that it was trained for. Does not change.
    #[x_kube(validation = Rule::new("self == oldSelf").message("baseModelRef does not change: an adapter for another base is another LoraAdapter"))]
    pub base_model_ref: BaseModelRef,
    pub source: AdapterSource,
    /// What the adapter must hash to: the SHA-256 of what `sha256sum adapter_config.json adapter_model.safetensors` prints
    /// in its folder. Without it, the digest is pinned at first sight until `source` or the annotation
    /// `lorafleet.dev/resolve-at` changes, or the source's content where `source.follow` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub digest: Option<Digest>,
    /// Digest of the base that it was trained on. Goes before what the file's metadata says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub base_model_digest: Option<Digest>,
    /// What clients put into `model`. Default: the name of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_name: Option<AdapterName>,
    #[serde(default)]
    pub warmth: Warmth,
}

/// A `BaseModel` of the same namespace.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BaseModelRef {
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
}

/// Where the adapter's files are. How to reach them (endpoint, region, credentials) is said by the entry of the base's
/// `adapterPolicy.allowedSources` that allows them.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterSource {
    /// `s3://bucket/folder`, a folder with `adapter_config.json` and `adapter_model.safetensors`.
    /// `https://`, `hf://` and `pvc://` are refused by this version (`UnsupportedSource`).
    #[schemars(length(min = 6, max = 1024), regex(pattern = crate::schema::SOURCE_PATTERN))]
    #[x_kube(
        validation = Rule::new(crate::schema::NO_DOTS).message("no segment of a uri may be '.' or '..'"),
        validation = Rule::new(crate::schema::NOTHING_HIDDEN).message(crate::schema::NOTHING_HIDDEN_SAID)
    )]
    pub uri: String,
    /// Serve what the folder holds, whenever it changes: new content that has stayed for a minute is verified and rolled out
    /// by itself. Put both files there together, else a mixture of old and new may be what is verified. Default: the digest
    /// is pinned at first sight, and other content is reported (`SourceChanged`) while the pinned one is served.
    #[serde(default, skip_serializing_if = "is_false")]
    pub follow: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// How near to the compute units an adapter stays.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warmth {
    /// A pod says that it is ready when the adapter has reached this tier, and keeps it there. Pinned adapters may take half of
    /// a pod's pages: where that does not suffice for `Device`, it is served from host memory, and the message of `Ready` says so.
    #[serde(default)]
    pub floor: WarmthFloor,
}

/// The farthest tier that an adapter may fall to.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WarmthFloor {
    Disk,
    #[default]
    Host,
    Device,
}

/// What is known of the adapter, and where it is served. The intake controller is its one writer.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoraAdapterStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Identity of what the spec asks for, once resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub digest: Option<Digest>,
    /// What the digest was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourcePin>,
    /// Fingerprint of all that the verification rested on: source, digests and base, and behind a dash the policy. A change
    /// verifies again; one of the policy alone does so by what is known of the revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub verified_for: Option<String>,
    /// Fingerprint of the files (names, sizes, versions) that were judged. When the source shows others, it is read again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub source_listing: Option<String>,
    /// Digest of the base that `digest` was verified for. Pods of another base hold nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub verified_base: Option<Digest>,
    /// Largest rank of any module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Largest rank per kind of module, for instance `q_proj: 8`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub ranks: BTreeMap<String, u32>,
    /// `lora_alpha` of its config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Kinds of modules that it changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 128)))]
    pub target_modules: Vec<String>,
    /// Its files together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The name that clients use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub served_name: Option<String>,
    /// The digest that the served name means now. Moves when every pod that takes traffic holds the candidate, in every pool
    /// that has such pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub current_revision: Option<Digest>,
    /// The digest that is on its way to be current; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub candidate_revision: Option<Digest>,
    /// Folder that holds the current revision, which may differ from the spec's while a candidate is on its way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub current_uri: Option<String>,
    /// `spec.baseModelDigest` as it was when the current revision was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub current_base_digest: Option<Digest>,
    /// What is known of `digest` and of every revision that is served or on its way: enough for a changed policy to judge each
    /// without its source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["digest"]))]
    pub revisions: Vec<KnownRevision>,
    /// What the served name meant before; still held for a moment, for requests that are on their way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retiring: Option<RetiringRevision>,
    /// For people: how many pods hold it, in which pools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub served: Option<String>,
    /// One entry per pool that selects it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub pools: Vec<PoolPlacement>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// What was found in one revision when it was read.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KnownRevision {
    #[schemars(schema_with = "crate::schema::digest")]
    pub digest: Digest,
    /// Fingerprint of the source, digests and base for which every byte of it was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub verified_for: Option<String>,
    /// `spec.digest` said that it is this one; else it was pinned at first sight, or followed.
    #[serde(default)]
    pub digest_claimed: bool,
    /// The base that it says it was made for: `spec.baseModelDigest`, else the file's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub declared_base: Option<Digest>,
    /// The ranks of each kind of module, for instance `q_proj: [8, 16]`.
    #[schemars(schema_with = "crate::schema::ranks")]
    pub ranks: BTreeMap<String, Vec<u32>>,
    /// Its weights file.
    pub weights_bytes: u64,
    /// Its files together.
    pub size_bytes: u64,
}

impl KnownRevision {
    /// What a policy judges of it.
    pub fn traits(&self) -> Traits {
        let Self { declared_base, ranks, weights_bytes, .. } = self;
        Traits { ranks: ranks.clone(), base_digest: *declared_base, weights_bytes: *weights_bytes }
    }
}

impl LoraAdapterStatus {
    /// What is known of the revision with this digest.
    pub fn revision(&self, digest: Digest) -> Option<&KnownRevision> {
        self.revisions.iter().find(|revision| revision.digest == digest)
    }
}

/// A revision that the served name no longer means.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RetiringRevision {
    #[schemars(schema_with = "crate::schema::digest")]
    pub digest: Digest,
    #[schemars(length(max = 1024))]
    pub uri: String,
    /// `spec.baseModelDigest` as it was when this revision was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub base_digest: Option<Digest>,
    /// When pods let go of it, as soon as their last request on it ends.
    pub until: Time,
}

/// What a digest was computed from.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourcePin {
    #[schemars(length(max = 1024))]
    pub uri: String,
    /// Value of the annotation `lorafleet.dev/resolve-at` at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub resolve_at: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub files: Vec<SourceFile>,
}

/// One file of a source as it was seen.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceFile {
    #[schemars(length(max = 255))]
    pub name: String,
    pub size_bytes: u64,
    /// The store's own word for the content, for instance its ETag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub version: Option<String>,
}

/// How one pool serves the adapter.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolPlacement {
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Why it is placed as it is, or why it is not; one word.
    #[schemars(length(max = 64))]
    pub reason: String,
    /// The same for people, with the limit and both values.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,
    /// Revisions that every pod of the pool that takes traffic holds for its present boot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::digests")]
    pub held: Vec<Digest>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    /// Where there are very many, those that are not ready come first and the rest is left out.
    #[schemars(length(max = 512))]
    pub placements: Vec<PlacementStatus>,
}

/// One version of the adapter on one pod, as the pod itself reports it.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacementStatus {
    #[schemars(length(max = 253))]
    pub pod: String,
    #[schemars(schema_with = "crate::schema::digest")]
    pub digest: Digest,
    /// The pod has said so for its present boot.
    pub ready: bool,
    /// Kubernetes sends the pod traffic.
    #[serde(default)]
    pub traffic: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<PlacementError>,
}

/// Why a pod does not hold it; or, of one that does, why not as its floor asks.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementError {
    /// The typed reason, for instance `DigestMismatch`.
    #[schemars(length(max = 64))]
    pub code: String,
    #[schemars(length(max = 512))]
    pub message: String,
}

impl LoraAdapter {
    /// The name that clients ask for: `servedName`, else the name of the object.
    pub fn served_name(&self) -> &str {
        match &self.spec.served_name {
            Some(name) => name.as_str(),
            None => self.metadata.name.as_deref().unwrap_or_default(),
        }
    }

    /// What this object can say for itself where several want the same served name.
    pub fn claim(&self, served_name: &str) -> NameClaim {
        let serves = |status: &LoraAdapterStatus| {
            status.current_revision.is_some() && status.served_name.as_deref() == Some(served_name)
        };
        NameClaim {
            served: self.status.as_ref().is_some_and(serves),
            created_s: self.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |time| time.0.as_second()),
            name: self.metadata.name.clone().unwrap_or_default(),
        }
    }
}

/// A claim to a served name. The smallest one has it: who is served under the name, so that nobody takes away what is in use;
/// else the oldest object.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NameClaim {
    /// Of the object.
    pub name: String,
    /// Seconds since 1970.
    pub created_s: i64,
    /// A revision of it is served under the name.
    #[serde(default)]
    pub served: bool,
}

impl NameClaim {
    fn key(&self) -> (bool, i64, &str) {
        (!self.served, self.created_s, &self.name)
    }
}

impl Ord for NameClaim {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for NameClaim {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
