//! The engine's configuration file.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use lorafleet_artifact::Digest;
use lorafleet_crds::{Backend, BaseModel, SecretRef, ServingPool, names};
use serde::Serialize;

use super::{ENGINE_PORT, metadata};

/// Where the pod's volumes are mounted.
pub(super) const CONFIG_FOLDER: &str = "/etc/lorafleet/engine";
pub(super) const CONFIG_FILE: &str = "config.toml";
pub(super) const KEYS_FOLDER: &str = "/etc/lorafleet/keys";
pub(super) const SOURCES_FOLDER: &str = "/etc/lorafleet/sources";
pub(super) const CACHE_FOLDER: &str = "/var/cache/lorafleet";

/// Default of `capacity.diskCacheBytes`, unless twice the base is more.
const DISK_CACHE_BYTES: u64 = 8 << 30;

/// The engine's configuration could not be written as TOML.
#[derive(Debug, thiserror::Error)]
#[error("writing the configuration of the engine: {0}")]
pub struct ConfigError(#[from] toml::ser::Error);

/// Flags of `lorafleet-engine serve` under their long names, and the sources.
#[derive(Serialize)]
struct EngineConfig {
    model: String,
    model_digest: String,
    base_identity: Vec<String>,
    served_model_name: String,
    listen: String,
    backend: &'static str,
    admin_key_file: String,
    api_key_file: String,
    disk_cache: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_adapters_per_batch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_sequences: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_step_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_budget: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_cache: Option<u64>,
    source: Vec<Source>,
}

#[derive(Serialize)]
struct Source {
    prefix: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    region: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    credentials_dir: Option<String>,
}

pub(super) fn engine_config(
    pool: &ServingPool,
    base: &BaseModel,
    base_digest: &Digest,
) -> Result<ConfigMap, ConfigError> {
    let capacity = &pool.spec.capacity;
    let config = EngineConfig {
        model: base.spec.source.uri.clone(),
        // The engine refuses to start on other weights, and to load adapters that were made for another base.
        model_digest: base_digest.to_string(),
        base_identity: [base_digest].into_iter().chain(&base.spec.identities).map(Digest::to_string).collect(),
        served_model_name: base.name_any(),
        listen: format!("0.0.0.0:{ENGINE_PORT}"),
        backend: match pool.spec.engine.backend {
            Backend::Cpu => "cpu",
        },
        admin_key_file: format!("{KEYS_FOLDER}/{}", names::ADMIN_KEY_ENTRY),
        api_key_file: format!("{KEYS_FOLDER}/{}", names::API_KEY_ENTRY),
        disk_cache: format!("{CACHE_FOLDER},{}", disk_cache_bytes(pool, base)),
        max_adapters_per_batch: capacity.max_adapters_per_batch,
        max_rank: capacity.max_rank,
        max_sequences: capacity.max_sequences,
        max_step_tokens: capacity.max_step_tokens,
        page_budget: capacity.page_budget,
        host_cache: capacity.host_cache_bytes,
        source: sources(base),
    };
    Ok(ConfigMap {
        metadata: metadata(pool, names::engine(&pool.name_any()), names::ENGINE_COMPONENT),
        data: Some([(CONFIG_FILE.to_owned(), toml::to_string(&config)?)].into()),
        ..ConfigMap::default()
    })
}

/// Bytes of the volume: the cache, a tenth more for downloads, which are complete before they replace what was there, and
/// the base twice, since an old one goes after the new one came.
pub(super) fn volume_bytes(pool: &ServingPool, base: &BaseModel) -> u64 {
    let cache = disk_cache_bytes(pool, base);
    let base_bytes = base.status.as_ref().and_then(|status| status.size_bytes).unwrap_or_default();
    cache.saturating_add(cache / 10).saturating_add(base_bytes.saturating_mul(2))
}

/// Bytes of the cache for adapters: what is asked for, else enough for the base and many adapters.
fn disk_cache_bytes(pool: &ServingPool, base: &BaseModel) -> u64 {
    let base_bytes = base.status.as_ref().and_then(|status| status.size_bytes).unwrap_or_default();
    pool.spec.capacity.disk_cache_bytes.unwrap_or(DISK_CACHE_BYTES.max(base_bytes.saturating_mul(2)))
}

/// The credentials Secret of each source, in the order of the configuration: the model first, then the allowed sources.
pub(super) fn credentials(base: &BaseModel) -> Vec<Option<&SecretRef>> {
    let allowed = base.spec.adapter_policy.allowed_sources.iter();
    let allowed = allowed.map(|source| source.access.credentials_secret_ref.as_ref());
    [base.spec.source.access.credentials_secret_ref.as_ref()].into_iter().chain(allowed).collect()
}

fn sources(base: &BaseModel) -> Vec<Source> {
    let model = &base.spec.source;
    let allowed = base.spec.adapter_policy.allowed_sources.iter();
    let allowed = allowed.map(|source| (&source.prefix, &source.access));
    let all = [(&model.uri, &model.access)].into_iter().chain(allowed).enumerate();
    all.map(|(index, (prefix, access))| Source {
        prefix: prefix.clone(),
        endpoint: access.endpoint.clone(),
        region: access.region.clone(),
        credentials_dir: access.credentials_secret_ref.as_ref().map(|_| format!("{SOURCES_FOLDER}/{index}")),
    })
    .collect()
}
