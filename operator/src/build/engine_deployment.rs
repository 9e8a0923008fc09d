//! The Deployment of the engine pods.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapVolumeSource, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, HTTPGetAction, PodSpec,
    PodTemplateSpec, Probe, SecretVolumeSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use lorafleet_artifact::Digest;
use lorafleet_crds::{BaseModel, ServingPool, names};

use super::config_map::{
    CACHE_FOLDER, CONFIG_FILE, CONFIG_FOLDER, KEYS_FOLDER, SOURCES_FOLDER, credentials, volume_bytes,
};
use super::{Defaults, ENGINE_PORT, LAST_WORDS, container_security, labels, metadata, pod_security, selector};
use crate::hash::short_hash;

/// Seconds that running requests have before a pod is killed.
const GRACE_S: i64 = 60;
/// Seconds that an engine may take to fetch and load its base, in probes of two seconds.
const START_PROBES: i32 = 900;

pub(super) fn engine(
    pool: &ServingPool,
    base: &BaseModel,
    base_digest: &Digest,
    config: &ConfigMap,
    defaults: &Defaults,
) -> Deployment {
    // A pod reads its configuration and its base at start only, so a change of either is a change of the pod.
    let annotations = BTreeMap::from([
        ("lorafleet.dev/config-hash".to_owned(), short_hash(&config.data)),
        ("lorafleet.dev/base-digest".to_owned(), base_digest.to_string()),
    ]);
    let upgrade = &pool.spec.upgrade;
    Deployment {
        metadata: metadata(pool, names::engine(&pool.name_any()), names::ENGINE_COMPONENT),
        spec: Some(DeploymentSpec {
            replicas: Some(i32::try_from(pool.spec.replicas).unwrap_or(i32::MAX)),
            // Stated, so that one that somebody has paused goes on: nothing of the pool would reach a pod any more.
            paused: Some(false),
            revision_history_limit: Some(3),
            progress_deadline_seconds: Some(START_PROBES * 2 + 60),
            selector: selector(pool, names::ENGINE_COMPONENT),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_surge: Some(upgrade.max_surge.clone().unwrap_or(IntOrString::Int(1))),
                    max_unavailable: Some(upgrade.max_unavailable.clone().unwrap_or(IntOrString::Int(0))),
                }),
            }),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels(pool, names::ENGINE_COMPONENT)),
                    annotations: Some(annotations),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod(pool, base, defaults)),
            },
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn pod(pool: &ServingPool, base: &BaseModel, defaults: &Defaults) -> PodSpec {
    let template = &pool.spec.engine;
    let (volumes, mounts) = volumes(pool, base);
    PodSpec {
        automount_service_account_token: Some(false),
        service_account_name: template.service_account_name.clone(),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(GRACE_S),
        security_context: Some(pod_security()),
        node_selector: (!template.node_selector.is_empty()).then(|| template.node_selector.clone()),
        tolerations: (!template.tolerations.is_empty()).then(|| template.tolerations.clone()),
        image_pull_secrets: (!template.image_pull_secrets.is_empty()).then(|| template.image_pull_secrets.clone()),
        volumes: Some(volumes),
        containers: vec![container(pool, mounts, defaults)],
        ..PodSpec::default()
    }
}

fn container(pool: &ServingPool, mounts: Vec<VolumeMount>, defaults: &Defaults) -> Container {
    let template = &pool.spec.engine;
    let scratch = EnvVar { name: "TMPDIR".to_owned(), value: Some("/tmp".to_owned()), ..EnvVar::default() };
    let own = [scratch].into_iter().filter(|own| !template.env.iter().any(|given| given.name == own.name));
    let config = format!("{CONFIG_FOLDER}/{CONFIG_FILE}");
    Container {
        name: "engine".to_owned(),
        image: Some(template.image.clone().unwrap_or_else(|| defaults.engine_image.clone())),
        image_pull_policy: Some(defaults.image_pull_policy.clone()),
        args: Some(["serve", "--managed", "--config", &config].map(str::to_owned).into()),
        env: Some(own.chain(template.env.iter().cloned()).collect()),
        ports: Some(vec![ContainerPort {
            name: Some("http".to_owned()),
            container_port: ENGINE_PORT,
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        resources: template.resources.clone(),
        security_context: Some(container_security()),
        startup_probe: Some(probe("/healthz", 2, START_PROBES)),
        liveness_probe: Some(probe("/healthz", 10, 6)),
        readiness_probe: Some(probe("/readyz", 1, 2)),
        volume_mounts: Some(mounts),
        termination_message_policy: Some(LAST_WORDS.to_owned()),
        ..Container::default()
    }
}

fn probe(path: &str, period_s: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("http".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_s),
        timeout_seconds: Some(if period_s > 2 { 5 } else { 2 }),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}

fn volumes(pool: &ServingPool, base: &BaseModel) -> (Vec<Volume>, Vec<VolumeMount>) {
    let pool_name = pool.name_any();
    let config = ConfigMapVolumeSource { name: names::engine(&pool_name), ..ConfigMapVolumeSource::default() };
    let mut volumes = vec![
        Volume { name: "config".to_owned(), config_map: Some(config), ..Volume::default() },
        secret("keys".to_owned(), &names::engine_keys(&pool_name)),
        scratch("cache", volume_bytes(pool, base)),
        scratch("tmp", 64 << 20),
    ];
    let mut mounts = vec![
        mount("config", CONFIG_FOLDER, true),
        mount("keys", KEYS_FOLDER, true),
        mount("cache", CACHE_FOLDER, false),
        mount("tmp", "/tmp", false),
    ];
    for (index, secret_ref) in credentials(base).into_iter().enumerate() {
        if let Some(secret_ref) = secret_ref {
            volumes.push(secret(format!("source-{index}"), &secret_ref.name));
            mounts.push(mount(&format!("source-{index}"), &format!("{SOURCES_FOLDER}/{index}"), true));
        }
    }
    (volumes, mounts)
}

pub(super) fn secret(name: String, secret: &str) -> Volume {
    let source = SecretVolumeSource {
        secret_name: Some(secret.to_owned()),
        default_mode: Some(0o440),
        ..SecretVolumeSource::default()
    };
    Volume { name, secret: Some(source), ..Volume::default() }
}

fn scratch(name: &str, bytes: u64) -> Volume {
    let source =
        EmptyDirVolumeSource { size_limit: Some(Quantity(bytes.to_string())), ..EmptyDirVolumeSource::default() };
    Volume { name: name.to_owned(), empty_dir: Some(source), ..Volume::default() }
}

pub(super) fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}
