//! `BaseModel`: which weights, and which adapters may sit on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use lorafleet_artifact::Digest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A base model: where its weights are, what counts as the same base, and which adapters may be served on it.
///
/// Foreseen and not in this version: `nodeCache` (weights that stay on the node for the next pod) and
/// `adapterPolicy.signatureKeySecretRef`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "lorafleet.dev",
    version = "v1alpha1",
    kind = "BaseModel",
    plural = "basemodels",
    shortname = "bm",
    category = "lorafleet",
    namespaced,
    status = "BaseModelStatus",
    derive = "PartialEq",
    doc = "A base model: where its weights are, what counts as the same base, and which adapters may be served on it.",
    validation = Rule::new("self.metadata.name.size() <= 63").message("the name of a BaseModel has at most 63 characters"),
    // One that the weights do not have is a mistake, which may be corrected.
    validation = Rule::new("!has(oldSelf.spec.digest) || (has(self.spec.digest) && self.spec.digest == oldSelf.spec.digest) || !has(oldSelf.status) || !has(oldSelf.status.digest) || oldSelf.status.digest != oldSelf.spec.digest")
        .message("spec.digest does not change once the weights have it: other weights are another BaseModel"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Architecture", type_ = "string", json_path = ".status.architecture"),
    printcolumn(name = "Parameters", type_ = "integer", json_path = ".status.parameters"),
    printcolumn(name = "Bytes", type_ = "integer", json_path = ".status.sizeBytes"),
    printcolumn(name = "Since", type_ = "date", json_path = ".status.conditions[?(@.type==\"Ready\")].lastTransitionTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Digest", type_ = "string", json_path = ".status.digest", priority = 1),
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.source.uri", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.source.uri == oldSelf.source.uri || (has(self.digest) && has(oldSelf.digest))")
        .message("source.uri changes only under a digest that says the weights are the same: other weights are another BaseModel")
)]
pub struct BaseModelSpec {
    pub source: ModelSource,
    /// What the weights must hash to: the SHA-256 of what `sha256sum` prints for the sorted config, tokenizer and weight
    /// files of the folder. Without it, the digest is pinned at first sight until the annotation `lorafleet.dev/resolve-at`
    /// changes. Once the weights have it (`status.digest`), it does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub digest: Option<Digest>,
    /// Digests that count as this base besides its own: for instance the full-precision weights that a quantised file was
    /// made from, so that adapters trained on those are accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::digests")]
    pub identities: Vec<Digest>,
    /// What the weights must be. A folder with `config.json` and safetensors is taken as safetensors, whatever else lies in
    /// it, and any other as its one GGUF file; a source of another format than this is refused. To take a GGUF file beside
    /// safetensors, name the file itself in the `uri`.
    #[serde(default)]
    pub format: WeightFormat,
    /// Which adapters may be served on this base. Without it, none may: no source is allowed.
    #[serde(default)]
    pub adapter_policy: AdapterPolicy,
}

/// Where the weights are.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.uri.startsWith('s3://') || (!has(self.endpoint) && !has(self.region))")
        .message("endpoint and region belong to s3:// sources")
)]
pub struct ModelSource {
    /// `s3://bucket/prefix`: a folder with config, tokenizer and weights, or a single `.gguf` object.
    /// `https://`, `hf://org/repo@revision` and `pvc://claim/path` are refused by this version (`UnsupportedSource`).
    #[schemars(length(min = 6, max = 1024), regex(pattern = crate::schema::SOURCE_PATTERN))]
    #[x_kube(
        validation = Rule::new(crate::schema::NO_DOTS).message("no segment of a uri may be '.' or '..'"),
        validation = Rule::new(crate::schema::NOTHING_HIDDEN).message(crate::schema::NOTHING_HIDDEN_SAID)
    )]
    pub uri: String,
    #[serde(flatten)]
    pub access: StoreAccess,
}

/// How a store is reached.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreAccess {
    /// Endpoint of an S3-compatible server, for instance `http://s3.example:9000`. Default: AWS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512), regex(pattern = crate::schema::ENDPOINT_PATTERN))]
    pub endpoint: Option<String>,
    /// Region of the bucket. Default: what the reader's surroundings say (`AWS_REGION`, a profile), else `us-east-1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), regex(pattern = r"^[a-z0-9-]+$"))]
    pub region: Option<String>,
    /// Secret of the same namespace with `access-key-id`, `secret-access-key` and, if there is one, `session-token`.
    /// Without it, engine pods use their own identity (service account, environment), and the operator reads as itself
    /// where it is allowed to (`--source-cap`, `--allow-ambient-credentials`), but never through an `endpoint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<SecretRef>,
}

/// A Secret of the same namespace.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretRef {
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub name: String,
}

/// What the weights of a base are.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    #[default]
    Auto,
    Safetensors,
    Gguf,
}

/// Which adapters may be served on a base.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.maxRank) || !has(self.allowedRanks) || self.allowedRanks.all(rank, rank <= self.maxRank)")
        .message("an allowed rank of allowedRanks is above maxRank")
)]
pub struct AdapterPolicy {
    /// Where adapters may come from. Empty: nowhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["prefix"]))]
    #[x_kube(validation = Rule::new("self.all(a, !a.prefix.endsWith('/') || !self.exists(b, b.prefix + '/' == a.prefix))")
        .message("two allowedSources are the same prefix, once with a slash at its end: only one of them would count"))]
    pub allowed_sources: Vec<AllowedSource>,
    /// Largest rank of any module of an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub max_rank: Option<u32>,
    /// If given, each module of an adapter has one of these ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(range(min = 1, max = 256)), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_ranks: Vec<u32>,
    /// If given, an adapter changes only modules of these names, for instance `q_proj`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9_.]+$")), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_target_modules: Vec<String>,
    /// Refuse adapters whose `spec.digest` is not given.
    #[serde(default)]
    pub require_digest: bool,
    /// Refuse adapters that do not say which base they were trained on (`spec.baseModelDigest`, or
    /// `lorafleet.base_digest` in the metadata of their safetensors file).
    #[serde(default = "yes")]
    pub require_base_digest: bool,
    /// Largest adapter, in bytes of its weights file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_099_511_627_776_u64))]
    pub max_adapter_bytes: Option<u64>,
}

fn yes() -> bool {
    true
}

impl Default for AdapterPolicy {
    fn default() -> Self {
        Self {
            allowed_sources: Vec::new(),
            max_rank: None,
            allowed_ranks: Vec::new(),
            allowed_target_modules: Vec::new(),
            require_digest: false,
            require_base_digest: true,
            max_adapter_bytes: None,
        }
    }
}

/// One place where adapters may come from, and how to reach it.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.prefix.startsWith('s3://') || (!has(self.endpoint) && !has(self.region))")
        .message("endpoint and region belong to s3:// sources")
)]
pub struct AllowedSource {
    /// Scheme, bucket or host, and whole path segments: `s3://adapters/team` allows `s3://adapters/team/x` and not
    /// `s3://adapters/team-evil`.
    #[schemars(length(min = 6, max = 512), regex(pattern = crate::schema::SOURCE_PATTERN))]
    #[x_kube(
        validation = Rule::new(crate::schema::NO_DOTS).message("no segment of a prefix may be '.' or '..'"),
        validation = Rule::new(crate::schema::NOTHING_HIDDEN).message(crate::schema::NOTHING_HIDDEN_SAID)
    )]
    pub prefix: String,
    #[serde(flatten)]
    pub access: StoreAccess,
}

/// What was found at the source, and whether it can be served.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BaseModelStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Identity of the weights; always counts as this base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::schema::optional_digest")]
    pub digest: Option<Digest>,
    /// What the digest was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<crate::SourcePin>,
    /// Fingerprint of what was resolved: source, pin and format. A change resolves again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub resolved_for: Option<String>,
    /// Fingerprint of the files (names, sizes, versions) that were judged. When the source shows others, it is read again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub source_listing: Option<String>,
    /// For instance `llama`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub architecture: Option<String>,
    /// Number of weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// Decoder layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// Width of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_size: Option<u32>,
    /// Width inside the feed-forward block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feed_forward_size: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_heads: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_value_heads: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_size: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary_size: Option<u32>,
    /// The output head's weight is the embedding's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tied_embeddings: Option<bool>,
    /// All files together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Keys and values of one token in all layers, at 16 bits each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes_per_token: Option<u64>,
    /// What one rank of an adapter on all linear modules costs, at 16 bits each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter_bytes_per_rank: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "crate::schema::conditions")]
    pub conditions: Vec<Condition>,
}
