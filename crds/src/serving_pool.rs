//! `ServingPool`: engine pods that serve one base with many adapters, and their gateway.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvVar, LocalObjectReference, ResourceRequirements, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BaseModelRef, SecretRef};

/// Engine pods that serve one base with every adapter that the pool selects, behind one gateway.
///
/// Foreseen and not in this version, so not accepted: `allowedAdapters` (only adapters of the pool's namespace are
/// served), `engine.backend: cuda`, `capacity.adapterPages`, `autoscaling`, `dedicated`, `placement`, `gateway.tls` and
/// `gateway.exposeInferencePool`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "lorafleet.dev",
    version = "v1alpha1",
    kind = "ServingPool",
    plural = "servingpools",
    shortname = "pool",
    shortname = "pools",
    category = "lorafleet",
    namespaced,
    status = "ServingPoolStatus",
    derive = "PartialEq",
    doc = "Engine pods that serve one base with every adapter that the pool selects, behind one gateway.",
    validation = Rule::new("self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("the name of a ServingPool starts with a letter, has only lower-case letters, digits and '-', and at most 40 characters: its Services are named after it"),
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Base", type_ = "string", json_path = ".spec.baseModelRef.name"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredReplicas"),
    printcolumn(name = "Pods", type_ = "integer", description = "Engine pods that take traffic", json_path = ".status.readyReplicas"),
    printcolumn(name = "Adapters", type_ = "integer", description = "Adapters that every ready pod holds", json_path = ".status.adapters.ready"),
    printcolumn(name = "Failed", type_ = "integer", description = "Adapters that are refused or fail to load", json_path = ".status.adapters.failed"),
    printcolumn(name = "Since", type_ = "date", json_path = ".status.conditions[?(@.type==\"Ready\")].lastTransitionTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct ServingPoolSpec {
    /// The base that the pool serves. Does not change.
    #[x_kube(validation = Rule::new("self == oldSelf").message("baseModelRef does not change: a pool for another base is another ServingPool"))]
    pub base_model_ref: BaseModelRef,
    /// Which verified adapters of the base the pool serves. Default: all of the pool's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_label_selector")]
    pub adapter_selector: Option<LabelSelector>,
    #[serde(default)]
    pub engine: EngineTemplate,
    #[serde(default)]
    pub capacity: Capacity,
    /// Engine pods.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: u32,
    #[serde(default)]
    pub upgrade: Upgrade,
    #[serde(default)]
    pub gateway: GatewayTemplate,
}

fn one() -> u32 {
    1
}

/// How the engine pods look.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineTemplate {
    /// Default: the operator's `--engine-image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = crate::schema::IMAGE_PATTERN))]
    pub image: Option<String>,
    #[serde(default)]
    pub backend: Backend,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_resources")]
    pub resources: Option<ResourceRequirements>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::node_selector")]
    pub node_selector: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::tolerations")]
    pub tolerations: Vec<Toleration>,
    /// Of the engine's own variables it may set those that tune it: `LORAFLEET_LOG`, `LORAFLEET_THREADS`, and limits for which
    /// `capacity` has no field. The operator says all others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::env")]
    #[x_kube(
        validation = Rule::new("self.all(e, !e.name.startsWith('LORAFLEET_') || e.name in ['LORAFLEET_LOG', 'LORAFLEET_THREADS', 'LORAFLEET_MAX_MODEL_TOKENS', 'LORAFLEET_MAX_QUEUED', 'LORAFLEET_STEP_MS_MAX', 'LORAFLEET_AGE_MS_MAX', 'LORAFLEET_DRAIN_SECONDS_MAX', 'LORAFLEET_MAX_CONNECTIONS', 'LORAFLEET_MAX_BODY_BYTES', 'LORAFLEET_HEAD_TIMEOUT_SECONDS', 'LORAFLEET_WRITE_TIMEOUT_SECONDS'])")
            .message("of the LORAFLEET_ variables env may set _LOG, _THREADS, _MAX_MODEL_TOKENS, _MAX_QUEUED, _STEP_MS_MAX, _AGE_MS_MAX, _DRAIN_SECONDS_MAX, _MAX_CONNECTIONS, _MAX_BODY_BYTES, _HEAD_TIMEOUT_SECONDS and _WRITE_TIMEOUT_SECONDS alone: what an engine is, serves and may hold is said by the pool and its base")
    )]
    pub env: Vec<EnvVar>,
    /// Identity of the engine pods, for sources without a credentials Secret. Default: the namespace's `default`, without a
    /// mounted token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub service_account_name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
}

/// What the engine computes on.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    #[default]
    Cpu,
}

/// Limits of one engine pod, bytes as plain numbers (268435456, not 256Mi). What is not given, the engine derives from its machine
/// and prints at start.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.hostCacheBytes) || !has(self.diskCacheBytes) || self.hostCacheBytes <= self.diskCacheBytes")
        .message("hostCacheBytes is above diskCacheBytes: what is in memory also lies on the disk"),
    validation = Rule::new("!has(self.maxSequences) || !has(self.maxStepTokens) || self.maxSequences <= self.maxStepTokens")
        .message("maxSequences is above maxStepTokens: a step has a token of each sequence that runs")
)]
pub struct Capacity {
    /// Distinct adapters in one batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_adapters_per_batch: Option<u32>,
    /// Largest rank of an adapter that this pool takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub max_rank: Option<u32>,
    /// Sequences that run at once. Default: 32, or `maxStepTokens` if that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536))]
    pub max_sequences: Option<u32>,
    /// Tokens of one step, prefill and decode together. Default: 256, or `maxSequences` if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_step_tokens: Option<u32>,
    /// Bytes of the device's memory for keys, values and adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576, max = 17_592_186_044_416_u64))]
    pub page_budget: Option<u64>,
    /// Bytes of host memory for adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576, max = 17_592_186_044_416_u64))]
    pub host_cache_bytes: Option<u64>,
    /// Bytes of the pod's volume for base and adapters. Default: 8 GiB, or twice the base if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1_048_576, max = 17_592_186_044_416_u64))]
    pub disk_cache_bytes: Option<u64>,
}

/// How a change of the engine's template rolls out, in pods or in percent of `replicas`.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.maxSurge) || (self.maxSurge != 0 && self.maxSurge != '0%') || (has(self.maxUnavailable) && self.maxUnavailable != 0 && self.maxUnavailable != '0%')")
        .message("maxSurge is 0, so maxUnavailable has to be above 0 (default 0): else no pod can ever be replaced")
)]
pub struct Upgrade {
    /// Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_count_or_percentage")]
    pub max_surge: Option<IntOrString>,
    /// Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_count_or_percentage")]
    pub max_unavailable: Option<IntOrString>,
}

/// The pool's front door.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayTemplate {
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 100))]
    pub replicas: u32,
    /// Default: the operator's `--gateway-image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = crate::schema::IMAGE_PATTERN))]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_resources")]
    pub resources: Option<ResourceRequirements>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "crate::schema::node_selector")]
    pub node_selector: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::tolerations")]
    pub tolerations: Vec<Toleration>,
    /// Default: those of `engine`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    #[serde(default)]
    pub service_type: GatewayServiceType,
    /// Secret with one entry per client, its value the JSON `{"key": "...", "models": ["smollm2", "support"]}`; a key has 8 to
    /// 512 visible ASCII characters, and `"*"` means every model. To revoke a key, take its entry out: pods keep the files of
    /// a Secret that is deleted. Without it every client may use every model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_keys_secret_ref: Option<SecretRef>,
}

impl Default for GatewayTemplate {
    fn default() -> Self {
        Self {
            replicas: one(),
            image: None,
            resources: None,
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
            image_pull_secrets: Vec::new(),
            service_type: GatewayServiceType::default(),
            api_keys_secret_ref: None,
        }
    }
}

/// Type of the gateway's Service.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GatewayServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
}

/// What the pool's pods are and hold.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServingPoolStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Engine pods that exist.
    #[serde(default)]
    pub replicas: u32,
    /// Engine pods that take traffic.
    #[serde(default)]
    pub ready_replicas: u32,
    /// Engine pods that shall exist.
    #[serde(default)]
    pub desired_replicas: u32,
    /// Label selector of the engine pods, for `scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub selector: Option<String>,
    #[serde(default)]
    pub adapters: AdapterCounts,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Adapters that the pool selects.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterCounts {
    #[serde(default)]
    pub total: u32,
    /// Every pod that takes traffic holds what the spec asks for.
    #[serde(default)]
    pub ready: u32,
    /// Refused, beyond the capacity, or failed on a pod.
    #[serde(default)]
    pub failed: u32,
}
