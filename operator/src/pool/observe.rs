//! The one reader of a pool's world: the stores, the keys, and each pod's report at most once.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, Secret};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Resource, ResourceExt};
use lorafleet_crds::{ServingPool, names};
use serde_json::Value;

use super::apply::{AppliedMemory, controller};
use super::held_up::held_up;
use super::observed::{Answer, ChildSeen, DeploymentSeen, Observed, PodSeen, Trouble};
use crate::build::{Defaults, Keys};
use crate::context::{ApiError, Context};

/// Longest piece of a container's log that a status repeats.
const LAST_WORDS_CHARACTERS_MAX: usize = 400;

/// What one pass sees, and the keys with which pods are told something.
pub struct Seen {
    pub observed: Observed,
    pub keys: Option<Keys>,
}

pub async fn observe(pool: &ServingPool, context: &Context) -> Result<Seen, ApiError> {
    let stores = &context.stores;
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    let base_name = &pool.spec.base_model_ref.name;
    let base = stores.base_models.get(&ObjectRef::new(base_name).within(&namespace));
    let mut adapters = stores.adapters_of(Some(&namespace), base_name);
    adapters.sort_by_key(|adapter| (adapter.creation_timestamp(), adapter.name_any()));
    let keys = keys(pool, context).await?;
    let (keys_exist, keys_lack) = (keys.is_some(), keys.as_ref().and_then(|keys| keys.as_ref().err().cloned()));
    let keys = keys.and_then(Result::ok);
    let pods_there = pods_of(pool, context);
    let held_up = held_up(&pods_there.engine, &pods_there.gateway, base.as_deref(), context).await;
    let gateway_trouble = gateway_trouble(&pods_there.gateway, &held_up);
    let mut pods = pods(pool, pods_there.engine, context, keys.as_ref()).await;
    for pod in &mut pods {
        pod.trouble = pod.trouble.take().or_else(|| held_up.get(&pod.name).cloned());
    }
    let progress = |name: String| {
        let deployment = stores.deployments.get(&ObjectRef::new(&name).within(&namespace));
        deployment.map(|deployment| progress(&deployment)).unwrap_or_default()
    };
    let mut gateway = progress(names::gateway(&name));
    gateway.trouble = gateway.trouble.or(gateway_trouble);
    let observed = Observed {
        pool: pool.clone(),
        base: base.map(|base| base.as_ref().clone()),
        adapters: adapters.iter().map(|adapter| adapter.as_ref().clone()).collect(),
        pods,
        children: children(context, pool),
        keys_exist,
        keys_lack: keys_lack.map(str::to_owned),
        api_keys_missing: api_keys_missing(pool, context).await,
        engine: progress(names::engine(&name)),
        gateway,
        defaults: Defaults::from(&context.settings),
    };
    Ok(Seen { observed, keys })
}

/// The keys of the pool's pods, or the entry that the Secret lacks; none if there is no Secret. It is only read again when the watch says that it changed.
async fn keys(pool: &ServingPool, context: &Context) -> Result<Option<Result<Keys, &'static str>>, ApiError> {
    let (namespace, name) = (pool.namespace().unwrap_or_default(), names::engine_keys(&pool.name_any()));
    let known = context.stores.secrets.get(&ObjectRef::new(&name).within(&namespace));
    let version = known.and_then(|secret| secret.metadata.resource_version.clone()).unwrap_or_default();
    if let Some(keys) = context.applied.keys(&namespace, &name, &version) {
        return Ok(Some(Ok(keys)));
    }
    let secrets = Api::<Secret>::namespaced(context.client.clone(), &namespace);
    let secret = secrets.get_opt(&name).await.map_err(ApiError::of(format!("reading the keys {namespace}/{name}")))?;
    let keys = secret.as_ref().map(Keys::read);
    if let (Some(Ok(keys)), Some(secret)) = (&keys, &secret) {
        context.applied.remember_keys(&namespace, &name, &secret.resource_version().unwrap_or_default(), keys.clone());
    }
    Ok(keys)
}

/// Whether the Secret with the clients' keys is named and does not exist. Its metadata is all that is asked for: what clients
/// send is the gateways' to know. Kubernetes says nothing of a Secret that went while a pod has it mounted.
async fn api_keys_missing(pool: &ServingPool, context: &Context) -> bool {
    let Some(secret) = pool.spec.gateway.api_keys_secret_ref.as_ref().filter(|_| pool.spec.gateway.replicas > 0) else {
        return false;
    };
    let namespace = pool.namespace().unwrap_or_default();
    let secrets = Api::<Secret>::namespaced(context.client.clone(), &namespace);
    match secrets.get_metadata_opt(&secret.name).await {
        Ok(found) => found.is_none(),
        // What is not known is not missing, and no reason to leave the pods alone.
        Err(error) => {
            tracing::warn!(%namespace, secret = %secret.name, %error, "looking for the Secret with the clients' keys");
            false
        }
    }
}

/// All engine pods of the pool by name, each asked at most once.
async fn pods(pool: &ServingPool, pods: Vec<Arc<Pod>>, context: &Context, keys: Option<&Keys>) -> Vec<PodSeen> {
    let uid = pool.uid().unwrap_or_default();
    let pools = context.stores.pools.state();
    context.engines.share_among(
        pools.iter().filter_map(|pool| pool.uid()),
        &uid,
        pods.iter().filter_map(|pod| pod.uid()),
    );
    let questions: Vec<_> = pods.into_iter().map(|pod| ask(pod, &uid, context, keys)).collect();
    let mut seen: Vec<PodSeen> =
        futures::stream::iter(questions).buffer_unordered(context.limits.pods_asked_max).collect().await;
    seen.sort_by(|a, b| a.name.cmp(&b.name));
    seen
}

/// Pods of the pool's two Deployments.
struct PodsThere {
    engine: Vec<Arc<Pod>>,
    gateway: Vec<Arc<Pod>>,
}

/// All of them, but for those that have ended for good and only wait to be cleared away. The store is gone through once.
fn pods_of(pool: &ServingPool, context: &Context) -> PodsThere {
    let (namespace, name) = (pool.metadata.namespace.as_deref(), pool.name_any());
    let of = |pod: &Pod, component| belongs(pod, &name, component);
    let there = context.stores.pods.state_filter(|pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        pod.metadata.namespace.as_deref() == namespace
            && pod.labels().get(names::POOL_LABEL) == Some(&name)
            && !matches!(phase, Some("Failed" | "Succeeded"))
    });
    let (engine, others): (Vec<_>, Vec<_>) = there.into_iter().partition(|pod| of(pod, names::ENGINE_COMPONENT));
    let gateway = others.into_iter().filter(|pod| of(pod, names::GATEWAY_COMPONENT)).collect();
    PodsThere { engine, gateway }
}

/// Labels are anybody's to set. A pod that a Deployment made has a ReplicaSet of its as owner, whose name ends as the label of
/// the template says.
fn belongs(pod: &Pod, pool: &str, component: &str) -> bool {
    let label = |label: &str| pod.labels().get(label).map(String::as_str);
    let deployment = if component == names::GATEWAY_COMPONENT { names::gateway(pool) } else { names::engine(pool) };
    let replica_set = label("pod-template-hash").map(|hash| format!("{deployment}-{hash}"));
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let made = owners.any(|owner| {
        owner.controller == Some(true) && owner.kind == "ReplicaSet" && Some(&owner.name) == replica_set.as_ref()
    });
    made && label(names::POOL_LABEL) == Some(pool) && label(names::COMPONENT_LABEL) == Some(component)
}

/// Of the first gateway pod that does not run, by name.
fn gateway_trouble(pods: &[Arc<Pod>], held_up: &HashMap<String, Trouble>) -> Option<String> {
    let mut pods: Vec<PodSeen> = pods.iter().map(|pod| pod_seen(pod)).collect();
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    let pods = pods.into_iter().filter(|pod| !pod.takes_traffic() && !pod.deleting);
    let mut troubles = pods.filter_map(|pod| {
        let trouble = pod.trouble.or_else(|| held_up.get(&pod.name).cloned())?;
        Some((pod.name, trouble))
    });
    troubles.next().map(|(pod, Trouble { reason, message })| format!("pod {pod}: {reason}: {message}"))
}

async fn ask(pod: Arc<Pod>, pool: &str, context: &Context, keys: Option<&Keys>) -> PodSeen {
    let mut seen = pod_seen(&pod);
    let started = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    let (Some(address), Some(keys), true, false) = (&seen.address, keys, started, seen.deleting) else { return seen };
    let answer = context.engines.report(pool, &pod.uid().unwrap_or_default(), address, &keys.admin).await;
    let word = if answer.is_ok() { "ok" } else { "error" };
    context.metrics.engine_requests.with_label_values(&["report", word]).inc();
    seen.answer = match (answer, &seen.trouble) {
        (Ok(report), _) => Answer::Report(report),
        // It is there, and what it says is the trouble.
        (Err(error), _) if error.is_an_answer() => Answer::Unreachable(error.to_string()),
        (Err(_), Some(trouble)) => Answer::Unreachable(format!("{}: {}", trouble.reason, trouble.message)),
        // Its port is not open yet: it is starting, as far as Kubernetes knows.
        (Err(_), None) if !seen.ready => Answer::NotAsked,
        (Err(error), None) => Answer::Unreachable(error.to_string()),
    };
    seen
}

fn pod_seen(pod: &Pod) -> PodSeen {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let ready = conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    PodSeen {
        name: pod.name_any(),
        ready,
        deleting: pod.metadata.deletion_timestamp.is_some(),
        starting: status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten().any(starts),
        trouble: trouble(pod),
        address: status.and_then(|status| status.pod_ip.clone()).filter(|address| !address.is_empty()),
        answer: Answer::NotAsked,
    }
}

/// It runs, and its first probe has not gone well yet.
fn starts(container: &ContainerStatus) -> bool {
    container.started != Some(true) && container.state.as_ref().is_some_and(|state| state.running.is_some())
}

/// Why the pod does not run, in Kubernetes' words and the container's own last ones.
fn trouble(pod: &Pod) -> Option<Trouble> {
    let status = pod.status.as_ref()?;
    // Containers that others have put before ours end well, or go on beside them.
    let before = status.init_container_statuses.iter().flatten().filter(|container| !container.ready);
    let states = before.chain(status.container_statuses.iter().flatten()).filter_map(container_trouble);
    let scheduling = status
        .conditions
        .iter()
        .flatten()
        .filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    let scheduling = scheduling.map(|condition| Trouble {
        reason: condition.reason.clone().unwrap_or_else(|| "Unscheduled".to_owned()),
        message: condition.message.clone().unwrap_or_default(),
    });
    states.chain(scheduling).next()
}

fn container_trouble(container: &ContainerStatus) -> Option<Trouble> {
    let state = container.state.as_ref()?;
    // Between two crashes it waits or runs for a moment: the last end is the reason to name, not the waiting.
    let last = container.last_state.as_ref().and_then(ended).filter(|_| !container.ready);
    match waiting(state) {
        Some(Trouble { reason, message }) => {
            let message = last.map_or(message, |last| format!("{}, {}", last.reason, last.message));
            Some(Trouble { reason, message })
        }
        None => ended(state).or(last),
    }
}

fn waiting(state: &ContainerState) -> Option<Trouble> {
    let waiting = state.waiting.as_ref()?;
    let reason = waiting.reason.clone().unwrap_or_default();
    let usual = matches!(reason.as_str(), "" | "ContainerCreating" | "PodInitializing");
    (!usual).then(|| Trouble { reason, message: waiting.message.clone().unwrap_or_default() })
}

fn ended(state: &ContainerState) -> Option<Trouble> {
    let ended = state.terminated.as_ref()?;
    let reason = ended.reason.clone().unwrap_or_else(|| "Terminated".to_owned());
    let said = ended.message.as_deref().and_then(last_words).unwrap_or_default();
    Some(Trouble { reason, message: format!("exit code {} {said}", ended.exit_code).trim_end().to_owned() })
}

/// The last line of a log that tells of an error: one in JSON of that level, or one that is no JSON, such as a panic's.
fn last_words(log: &str) -> Option<String> {
    log.lines().map(str::trim).filter(|line| !line.is_empty()).rev().find_map(|line| {
        let Ok(Value::Object(line)) = serde_json::from_str(line) else { return Some(bounded(line)) };
        line.get("level").filter(|level| *level == "ERROR")?;
        let fields = line.get("fields").and_then(Value::as_object).unwrap_or(&line);
        let said: Vec<_> = ["message", "error"].iter().filter_map(|name| fields.get(*name)?.as_str()).collect();
        Some(bounded(&said.join(": ")))
    })
}

fn bounded(words: &str) -> String {
    words.chars().take(LAST_WORDS_CHARACTERS_MAX).collect()
}

fn progress(deployment: &Deployment) -> DeploymentSeen {
    let status = deployment.status.clone().unwrap_or_default();
    let count = |number: Option<i32>| u32::try_from(number.unwrap_or_default()).unwrap_or_default();
    let mut conditions = status.conditions.iter().flatten();
    let failure = conditions.find(|condition| condition.type_ == "ReplicaFailure" && condition.status == "True");
    DeploymentSeen {
        generation: deployment.metadata.generation.unwrap_or_default(),
        observed: status.observed_generation == deployment.metadata.generation,
        pods: count(status.replicas),
        updated: count(status.updated_replicas),
        ready: count(status.ready_replicas),
        trouble: failure.and_then(|failure| failure.message.as_deref()).map(bounded),
    }
}

/// The pool's objects that exist, with what this operator remembers of writing them.
fn children(context: &Context, pool: &ServingPool) -> BTreeMap<String, ChildSeen> {
    let stores = &context.stores;
    let (engine, gateway) = (names::engine(&pool.name_any()), names::gateway(&pool.name_any()));
    let mut seen = BTreeMap::new();
    let memory = &context.applied;
    add(&mut seen, memory, &stores.config_maps, "ConfigMap", pool, &engine);
    add(&mut seen, memory, &stores.services, "Service", pool, &engine);
    add(&mut seen, memory, &stores.services, "Service", pool, &gateway);
    add(&mut seen, memory, &stores.deployments, "Deployment", pool, &engine);
    add(&mut seen, memory, &stores.deployments, "Deployment", pool, &gateway);
    add(&mut seen, memory, &stores.service_accounts, "ServiceAccount", pool, &gateway);
    add(&mut seen, memory, &stores.role_bindings, "RoleBinding", pool, &gateway);
    seen
}

fn add<K>(
    seen: &mut BTreeMap<String, ChildSeen>,
    memory: &AppliedMemory,
    store: &Store<K>,
    kind: &str,
    pool: &ServingPool,
    name: &str,
) where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let namespace = pool.namespace().unwrap_or_default();
    let Some(object) = store.get(&ObjectRef::new(name).within(&namespace)) else { return };
    let key = format!("{kind}/{name}");
    let child = ChildSeen {
        resource_version: object.resource_version().unwrap_or_default(),
        uid: object.uid(),
        foreign: controller(object.meta()) != pool.uid().as_deref(),
        applied: memory.get(&namespace, &key),
    };
    seen.insert(key, child);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble_of(status: &str) -> Option<(String, String)> {
        let pod = serde_norway::from_str(&format!("{{status: {{containerStatuses: [{status}]}}}}")).unwrap();
        trouble(&pod).map(|trouble| (trouble.reason, trouble.message))
    }

    #[test]
    fn a_pod_belongs_to_the_pool_whose_deployment_made_it() {
        let pod = |owner: &str, kind: &str, component: &str| -> Pod {
            let labels = format!(
                "{{lorafleet.dev/pool: chat, app.kubernetes.io/component: {component}, pod-template-hash: 5f7}}"
            );
            let owner = format!("{{apiVersion: apps/v1, kind: {kind}, name: {owner}, uid: u, controller: true}}");
            serde_norway::from_str(&format!("{{metadata: {{labels: {labels}, ownerReferences: [{owner}]}}}}")).unwrap()
        };
        for (owner, kind, component, expected) in [
            ("chat-engine-5f7", "ReplicaSet", "engine", true),
            ("chat-engine-6a8", "ReplicaSet", "engine", false),
            ("mine-5f7", "ReplicaSet", "engine", false),
            ("chat-engine-5f7", "Job", "engine", false),
            ("chat-engine-5f7", "ReplicaSet", "gateway", false),
        ] {
            assert_eq!(belongs(&pod(owner, kind, component), "chat", "engine"), expected, "{owner} {kind} {component}");
        }
        assert!(belongs(&pod("chat-gateway-5f7", "ReplicaSet", "gateway"), "chat", "gateway"));
    }

    #[test]
    fn the_last_words_of_a_container_stand_for_its_trouble() {
        let container = |state: &str, last: &str| {
            let common = "name: engine, image: i, imageID: i, ready: false, restartCount: 3";
            trouble_of(&format!("{{{common}, state: {state}, lastState: {last}}}"))
        };
        let log = r#"{"level":"INFO","fields":{"message":"starting"}}\n{"level":"ERROR","fields":{"message":"no start","error":"32 is less than 512"}}\n{"level":"INFO","fields":{"message":"bye"}}\n"#;
        let ended =
            format!("{{terminated: {{exitCode: 1, reason: Error, message: \"{}\"}}}}", log.replace('"', "\\\""));
        let said = |reason: &str, message: &str| Some((reason.to_owned(), message.to_owned()));
        let words = "exit code 1 no start: 32 is less than 512";
        assert_eq!(container(&ended, "{}"), said("Error", words));
        assert_eq!(container("{running: {}}", &ended), said("Error", words));
        let back_off = "{waiting: {reason: CrashLoopBackOff, message: back-off 10s}}";
        assert_eq!(container(back_off, &ended), said("CrashLoopBackOff", &format!("Error, {words}")));
        let killed = "{terminated: {exitCode: 137, reason: OOMKilled, message: '{\"level\":\"INFO\"}'}}";
        assert_eq!(container(back_off, killed), said("CrashLoopBackOff", "OOMKilled, exit code 137"));
        assert_eq!(container("{waiting: {reason: ContainerCreating}}", "{}"), None);
        let pull = "{waiting: {reason: ErrImagePull, message: not found}}";
        assert_eq!(container(pull, "{}"), said("ErrImagePull", "not found"));
    }
}
