//! The bodies that operator, gateway and engine exchange. Plain data: no client, no clock.
//!
//! Sizes are in bytes, durations in milliseconds unless a name says otherwise.

use std::collections::BTreeMap;

use lorafleet_artifact::Digest;
use serde::{Deserialize, Serialize};

/// Adapter versions that one engine knows at most.
pub const ADAPTERS_MAX: usize = 10_000;

/// Largest report that is read: that many adapters with the longest names, each with an alias.
pub const REPORT_BYTES_MAX: usize = ADAPTERS_MAX * 768;

/// Longest name of holdings that is sent back to a pod.
const HOLDINGS_NAME_BYTES_MAX: usize = 128;

/// Desired state of one engine pod: the body of `PUT /v1/placement`.
///
/// The engine converges to it by itself. 409 `Stale` if `boot_id` is not the process that answers, or if `generation`
/// is lower than the last accepted one; the same generation with the same body is accepted again and changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    pub boot_id: String,
    pub generation: u64,
    /// Names everything below it (a hash that the sender makes; opaque to the engine, at most 64 characters). The report
    /// gives it back, so that a sender that was restarted sees that the pod has its placement already.
    #[serde(default)]
    pub revision: String,
    #[serde(default)]
    pub role: Role,
    #[serde(default)]
    pub adapters: Vec<PlacedAdapter>,
    /// Name a client may ask for -> the digest it means now. Every digest named here is among `adapters`.
    #[serde(default)]
    pub aliases: BTreeMap<String, Digest>,
}

/// What the pod's base weights are: pristine, or with one adapter merged in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    #[default]
    Shared,
    Merged(Digest),
}

/// One adapter version that a pod shall hold. Identity is (`name`, `digest`): two versions of one name may stand side
/// by side while a rollout is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlacedAdapter {
    /// As clients ask for it: `servedName`, or `<namespace>/<servedName>` from another namespace than the pool's.
    pub name: String,
    /// Namespace of the `LoraAdapter`; empty in a standalone engine.
    #[serde(default)]
    pub namespace: String,
    pub digest: Digest,
    /// Folder that holds `adapter_config.json` and `adapter_model.safetensors`. How to reach it (endpoint, region,
    /// credentials) comes from the engine's own allowed sources, never over this wire.
    pub uri: String,
    /// Never evicted from the tier named by `floor`.
    #[serde(default)]
    pub pinned: bool,
    #[serde(default)]
    pub floor: Floor,
    /// The base that it was made for, as the one who enrolled it says: goes before what the file itself says. The engine
    /// judges it by the same rule as the operator did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_digest: Option<Digest>,
}

/// The tier that an adapter must have reached before the pod says it is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Floor {
    /// May be fetched at first use.
    #[default]
    None,
    Disk,
    Host,
    Device,
}

/// Where the nearest copy of an adapter is. Ordered: a later tier is nearer to the compute units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Tier {
    Source,
    Disk,
    Host,
    Device,
}

/// What a pod holds and does: the body of `GET /v1/lora_adapters`.
///
/// With `?known=HOLDINGS`, and if that is what `holdings` still is, `adapters` and `aliases` are left out (`unchanged`):
/// who asks every second need not read thousands of rows that it has read before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// New for each start of the process: the one way to notice a restart.
    pub boot_id: String,
    /// Generation of the last accepted placement; 0 if this process has had none.
    pub generation: u64,
    /// `revision` of the last accepted placement; empty if this process has had none.
    #[serde(default)]
    pub revision: String,
    /// Every adapter with a floor is there or has failed with a type, for this boot.
    pub ready: bool,
    pub draining: bool,
    pub base: BaseReport,
    pub role: Role,
    pub budgets: Budgets,
    pub load: Load,
    /// Names what `adapters` and `aliases` say (opaque), but for the counters of each adapter, which move all the time.
    #[serde(default)]
    pub holdings: String,
    /// The asker knows these holdings already: the next two are empty.
    #[serde(default)]
    pub unchanged: bool,
    pub adapters: Vec<AdapterReport>,
    pub aliases: BTreeMap<String, Digest>,
}

impl Report {
    /// Path and query to ask a pod with, by who knows these `holdings` of its last report. A name that is no plain word is
    /// not sent back.
    pub fn path(known: Option<&str>) -> String {
        let plain = |name: &&str| {
            name.len() <= HOLDINGS_NAME_BYTES_MAX && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
        };
        format!("/v1/lora_adapters?known={}", known.filter(plain).unwrap_or_default())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BaseReport {
    pub name: String,
    pub digest: Digest,
    /// Where its files came from at this start: `Source` if they were brought from the store, `Disk` if they were on this
    /// machine already (and their digest was computed all the same).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Tier>,
    /// Context length in tokens that a request may use.
    pub max_model_tokens: u32,
}

/// Capacity and use of each tier. `free + cached + used = total` for pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Budgets {
    pub page_bytes: u64,
    pub pages_total: u64,
    pub pages_free: u64,
    /// Held by the prefix cache or by idle adapters; can be taken back at once.
    pub pages_cached: u64,
    pub pages_used: u64,
    pub host_bytes_total: u64,
    pub host_bytes_used: u64,
    pub disk_bytes_total: u64,
    pub disk_bytes_used: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens that wait for their prefill.
    pub waiting_tokens: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdapterReport {
    pub name: String,
    #[serde(default)]
    pub namespace: String,
    pub digest: Digest,
    pub state: AdapterState,
    pub tier: Tier,
    pub pinned: bool,
    /// Largest rank; 0 while unknown.
    pub rank: u32,
    pub bytes: u64,
    /// Sequences that use it now.
    pub leases: u32,
    /// Requests that wait for it.
    pub waiting: u32,
    /// Since its last use; `None` if never used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    pub loads: u64,
    pub evictions: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<ErrorBody>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdapterState {
    /// On its way to its floor.
    Loading,
    /// Answers requests (perhaps after a fetch).
    Ready,
    /// Refused or unreachable; `last_error` says which.
    Failed,
    /// No longer desired; the last leases finish.
    Draining,
}

/// Body of `POST /v1/load_lora_adapter`, with the field names that clients of other servers send.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoadRequest {
    pub lora_name: String,
    pub lora_path: String,
    #[serde(default)]
    pub load_inplace: bool,
    #[serde(default)]
    pub digest: Option<Digest>,
    #[serde(default)]
    pub pinned: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReply {
    pub lora_name: String,
    pub digest: Digest,
    pub rank: u32,
    /// Modules of all layers that the adapter changes.
    pub modules: u32,
    pub bytes: u64,
    pub tier: Tier,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnloadRequest {
    pub lora_name: String,
    /// Sent by some clients; not used.
    #[serde(default)]
    pub lora_int_id: Option<i64>,
}

/// OpenAI's error envelope. `code` is the typed reason and is stable; `message` is for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorEnvelope {
    pub error: ErrorBody,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub param: Option<String>,
    pub code: String,
}

/// OpenAI's `type` of an error with this HTTP status.
pub fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}
