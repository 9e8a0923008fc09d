//! The objects of a pool, one file per kind: pure functions of the pool, its base and the settings.

mod config_map;
mod engine_deployment;
mod gateway_deployment;
mod role_binding;
mod secret;
mod service;
mod service_account;

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Capabilities;
use k8s_openapi::api::core::v1::{
    ConfigMap, PodSecurityContext, SeccompProfile, SecurityContext, Service, ServiceAccount,
};
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use lorafleet_artifact::Digest;
use lorafleet_crds::names::{
    self, COMPONENT_LABEL, INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL, NAME_LABEL, POOL_LABEL,
};
use lorafleet_crds::{BaseModel, ServingPool};

pub use config_map::ConfigError;
pub use secret::{Keys, keys_secret};

use crate::settings::Settings;

/// Port of the engine, named `http`.
pub const ENGINE_PORT: i32 = 8000;
/// Ports of the gateway, named `http` and `metrics`.
pub const GATEWAY_PORT: i32 = 8080;
pub const GATEWAY_METRICS_PORT: i32 = 8081;

/// Where a container that ends with an error leaves its reason: the end of its log, which the pool's status then repeats.
const LAST_WORDS: &str = "FallbackToLogsOnError";

/// User and group of every container that the operator makes.
const USER: i64 = 65532;

/// All objects of one pool but the keys, which are made once and never applied again.
#[derive(Clone, Debug, PartialEq)]
pub struct Objects {
    pub config: ConfigMap,
    pub engine_service: Service,
    pub engine: Deployment,
    pub gateway_account: ServiceAccount,
    pub gateway_binding: RoleBinding,
    pub gateway_service: Service,
    pub gateway: Deployment,
}

/// What the images, policies and names are, where a pool does not say so itself.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Defaults {
    pub engine_image: String,
    pub gateway_image: String,
    pub image_pull_policy: String,
    pub gateway_cluster_role: String,
}

impl From<&Settings> for Defaults {
    fn from(settings: &Settings) -> Self {
        Self {
            engine_image: settings.engine_image.clone(),
            gateway_image: settings.gateway_image.clone(),
            image_pull_policy: settings.image_pull_policy.clone(),
            gateway_cluster_role: settings.gateway_cluster_role.clone(),
        }
    }
}

/// # Errors
/// If the engine's configuration cannot be written as TOML.
pub fn objects(
    pool: &ServingPool,
    base: &BaseModel,
    base_digest: &Digest,
    defaults: &Defaults,
) -> Result<Objects, ConfigError> {
    let config = config_map::engine_config(pool, base, base_digest)?;
    Ok(Objects {
        engine_service: service::engine(pool),
        engine: engine_deployment::engine(pool, base, base_digest, &config, defaults),
        config,
        gateway_account: service_account::gateway(pool),
        gateway_binding: role_binding::gateway(pool, defaults),
        gateway_service: service::gateway(pool),
        gateway: gateway_deployment::gateway(pool, defaults),
    })
}

/// Label selector of a pool's engine pods, as `scale` wants it.
pub fn engine_selector(pool: &ServingPool) -> String {
    let labels = selector_labels(pool, names::ENGINE_COMPONENT);
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

fn metadata(pool: &ServingPool, name: String, component: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: pool.metadata.namespace.clone(),
        labels: Some(labels(pool, component)),
        owner_references: Some(pool.controller_owner_ref(&()).into_iter().collect()),
        ..ObjectMeta::default()
    }
}

/// Labels that never change, since selectors cannot.
fn selector_labels(pool: &ServingPool, component: &str) -> BTreeMap<String, String> {
    [(POOL_LABEL, pool.name_any().as_str()), (COMPONENT_LABEL, component)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn labels(pool: &ServingPool, component: &str) -> BTreeMap<String, String> {
    let pool_name = pool.name_any();
    let more = [(NAME_LABEL, "lorafleet"), (INSTANCE_LABEL, pool_name.as_str()), (MANAGED_BY_LABEL, MANAGED_BY)];
    let mut labels = selector_labels(pool, component);
    labels.extend(more.map(|(key, value)| (key.to_owned(), value.to_owned())));
    labels
}

fn selector(pool: &ServingPool, component: &str) -> LabelSelector {
    LabelSelector { match_labels: Some(selector_labels(pool, component)), ..LabelSelector::default() }
}

/// What Kubernetes' restricted standard asks of a pod.
fn pod_security() -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        fs_group: Some(USER),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
        ..PodSecurityContext::default()
    }
}

/// And of a container.
fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Capabilities::default() }),
        ..SecurityContext::default()
    }
}
