//! The Deployment of the gateway pods.

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, HTTPGetAction, KeyToPath, PodSpec, PodTemplateSpec, Probe, ResourceRequirements,
    VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use lorafleet_crds::{ServingPool, names};

use super::config_map::KEYS_FOLDER;
use super::engine_deployment::{mount, secret};
use super::{
    Defaults, GATEWAY_METRICS_PORT, GATEWAY_PORT, LAST_WORDS, container_security, labels, metadata, pod_security,
    selector,
};

const CLIENTS_FOLDER: &str = "/etc/lorafleet/clients";
/// Seconds that running streams have before a pod is killed.
const GRACE_S: i64 = 60;

pub(super) fn gateway(pool: &ServingPool, defaults: &Defaults) -> Deployment {
    let name = names::gateway(&pool.name_any());
    Deployment {
        metadata: metadata(pool, name.clone(), names::GATEWAY_COMPONENT),
        spec: Some(DeploymentSpec {
            replicas: Some(i32::try_from(pool.spec.gateway.replicas).unwrap_or(i32::MAX)),
            paused: Some(false),
            revision_history_limit: Some(3),
            selector: selector(pool, names::GATEWAY_COMPONENT),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_surge: Some(IntOrString::Int(1)),
                    max_unavailable: Some(IntOrString::Int(0)),
                }),
            }),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels(pool, names::GATEWAY_COMPONENT)),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod(pool, name, defaults)),
            },
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn pod(pool: &ServingPool, account: String, defaults: &Defaults) -> PodSpec {
    let mut keys = secret("keys".to_owned(), &names::engine_keys(&pool.name_any()));
    // The gateway must not be able to change what an engine holds: it never sees the admin key.
    if let Some(source) = keys.secret.as_mut() {
        let entry = names::API_KEY_ENTRY.to_owned();
        source.items = Some(vec![KeyToPath { key: entry.clone(), path: entry, mode: None }]);
    }
    let mut volumes = vec![keys];
    let mut mounts = vec![mount("keys", KEYS_FOLDER, true)];
    if let Some(clients) = &pool.spec.gateway.api_keys_secret_ref {
        volumes.push(secret("clients".to_owned(), &clients.name));
        mounts.push(mount("clients", CLIENTS_FOLDER, true));
    }
    let template = &pool.spec.gateway;
    // Both images usually come from one registry.
    let pull_secrets = [&template.image_pull_secrets, &pool.spec.engine.image_pull_secrets];
    PodSpec {
        node_selector: (!template.node_selector.is_empty()).then(|| template.node_selector.clone()),
        tolerations: (!template.tolerations.is_empty()).then(|| template.tolerations.clone()),
        image_pull_secrets: pull_secrets.into_iter().find(|secrets| !secrets.is_empty()).cloned(),
        service_account_name: Some(account),
        automount_service_account_token: Some(true),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(GRACE_S),
        security_context: Some(pod_security()),
        volumes: Some(volumes),
        containers: vec![container(pool, mounts, defaults)],
        ..PodSpec::default()
    }
}

fn container(pool: &ServingPool, mounts: Vec<VolumeMount>, defaults: &Defaults) -> Container {
    let template = &pool.spec.gateway;
    Container {
        name: "gateway".to_owned(),
        image: Some(template.image.clone().unwrap_or_else(|| defaults.gateway_image.clone())),
        image_pull_policy: Some(defaults.image_pull_policy.clone()),
        args: Some(arguments(pool)),
        ports: Some(vec![port("http", GATEWAY_PORT), port("metrics", GATEWAY_METRICS_PORT)]),
        resources: Some(template.resources.clone().unwrap_or_else(default_resources)),
        security_context: Some(container_security()),
        liveness_probe: Some(probe("/healthz", 10, 6)),
        readiness_probe: Some(probe("/readyz", 1, 2)),
        volume_mounts: Some(mounts),
        termination_message_policy: Some(LAST_WORDS.to_owned()),
        ..Container::default()
    }
}

fn arguments(pool: &ServingPool) -> Vec<String> {
    let mut arguments = vec![
        "run".to_owned(),
        format!("--namespace={}", pool.namespace().unwrap_or_default()),
        format!("--pool={}", pool.name_any()),
        format!("--listen=0.0.0.0:{GATEWAY_PORT}"),
        format!("--metrics-listen=0.0.0.0:{GATEWAY_METRICS_PORT}"),
        format!("--engine-key-file={KEYS_FOLDER}/{}", names::API_KEY_ENTRY),
    ];
    if pool.spec.gateway.api_keys_secret_ref.is_some() {
        arguments.push(format!("--api-keys-dir={CLIENTS_FOLDER}"));
    }
    arguments
}

/// Small, and without a limit on the processor: a throttled gateway is slow for everybody.
fn default_resources() -> ResourceRequirements {
    let requests =
        [("cpu", "50m"), ("memory", "64Mi")].map(|(name, value)| (name.to_owned(), Quantity(value.to_owned())));
    let limits = [("memory".to_owned(), Quantity("512Mi".to_owned()))];
    ResourceRequirements {
        requests: Some(requests.into()),
        limits: Some(limits.into()),
        ..ResourceRequirements::default()
    }
}

fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

fn probe(path: &str, period_s: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("metrics".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_s),
        timeout_seconds: Some(if period_s > 2 { 5 } else { 2 }),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}
