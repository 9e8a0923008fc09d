//! Pods that have a node and, for longer than is usual, none of their containers. Kubernetes says why in Events alone; what it
//! most often is, a Secret that is gone, can be looked for.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, Secret};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Api, ResourceExt};
use lorafleet_crds::{BaseModel, SecretRef};

use super::observed::Trouble;
use crate::context::Context;

/// How long Kubernetes may make a pod's containers before that is worth a word: it pulls their images.
const USUAL_S: i64 = 30;

/// Of those pods that are held up, by name: what they wait for. Secrets are looked for only while there are such pods, each
/// once.
pub(super) async fn held_up(
    engines: &[Arc<Pod>],
    gateways: &[Arc<Pod>],
    base: Option<&BaseModel>,
    context: &Context,
) -> HashMap<String, Trouble> {
    let now = Timestamp::now();
    let pods: Vec<&Pod> = engines.iter().chain(gateways).map(Arc::as_ref).filter(|pod| waits(pod, now)).collect();
    let mut missing = BTreeSet::new();
    for (namespace, name) in pods.iter().flat_map(|pod| secrets(pod)).collect::<BTreeSet<_>>() {
        match Api::<Secret>::namespaced(context.client.clone(), namespace).get_metadata_opt(name).await {
            Ok(Some(_)) => {}
            Ok(None) => drop(missing.insert(name)),
            // What is not known is not missing.
            Err(error) => tracing::warn!(%namespace, secret = %name, %error, "looking for a Secret that a pod mounts"),
        }
    }
    pods.into_iter().map(|pod| (pod.name_any(), trouble(pod, &missing, base))).collect()
}

/// Whether the pod has had its node for longer than is usual, and nothing in it has begun.
fn waits(pod: &Pod, now: Timestamp) -> bool {
    let Some(status) = pod.status.as_ref().filter(|_| pod.metadata.deletion_timestamp.is_none()) else { return false };
    let scheduled =
        status.conditions.iter().flatten().find(|said| said.type_ == "PodScheduled" && said.status == "True");
    let since = scheduled.and_then(|said| said.last_transition_time.as_ref());
    let begun = |container: &ContainerStatus| {
        container.state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    };
    let mut containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    since.is_some_and(|since| now.duration_since(since.0) > SignedDuration::from_secs(USUAL_S))
        && !containers.any(begun)
}

/// Namespace and names of the Secrets without which its containers are not made.
fn secrets(pod: &Pod) -> impl Iterator<Item = (&str, &str)> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let secrets = volumes.filter_map(|volume| volume.secret.as_ref()).filter(|secret| secret.optional != Some(true));
    secrets.filter_map(move |secret| Some((namespace, secret.secret_name.as_deref()?)))
}

fn trouble(pod: &Pod, missing: &BTreeSet<&str>, base: Option<&BaseModel>) -> Trouble {
    match secrets(pod).find(|(_, name)| missing.contains(name)) {
        Some((_, name)) => {
            let named = base.and_then(|base| named_by(base, name)).map(|by| format!(", which {by} names"));
            Trouble {
                reason: "CredentialsMissing".to_owned(),
                message: format!("it waits for the Secret '{name}'{}, and there is none", named.unwrap_or_default()),
            }
        }
        None => Trouble {
            reason: "ContainerCreating".to_owned(),
            message: format!("for more than {USUAL_S} s its containers have been being made: its Events say more"),
        },
    }
}

/// Which source of the base names this Secret.
fn named_by(base: &BaseModel, secret: &str) -> Option<String> {
    let (name, own) = (base.name_any(), &base.spec.source);
    let is = |known: Option<&SecretRef>| known.is_some_and(|known| known.name == secret);
    if is(own.access.credentials_secret_ref.as_ref()) {
        return Some(format!("the source of the BaseModel '{name}'"));
    }
    let mut allowed = base.spec.adapter_policy.allowed_sources.iter();
    let by = allowed.find(|source| is(source.access.credentials_secret_ref.as_ref()))?;
    Some(format!("the allowed source '{}' of the BaseModel '{name}'", by.prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> BaseModel {
        let text = "
            metadata: { name: smollm2 }
            spec:
              source: { uri: 's3://models/base', credentialsSecretRef: { name: s3 } }
              adapterPolicy: { allowedSources: [{ prefix: 's3://team', credentialsSecretRef: { name: store } }] }
        ";
        serde_norway::from_str(text).unwrap()
    }

    fn pod(scheduled: &str, containers: &str, init: &str) -> Pod {
        let volumes = "[{name: a, secret: {secretName: s3}}, {name: b, secret: {secretName: store}}, {name: c, secret: {secretName: other, optional: true}}, {name: d, emptyDir: {}}]";
        let common = "image: i, imageID: i, ready: false, restartCount: 0";
        let state = |state: &str| format!("[{{name: engine, {common}, state: {state}}}]");
        serde_norway::from_str(&format!(
            "{{metadata: {{name: p, namespace: demo}}, spec: {{containers: [], volumes: {volumes}}}, status: {{
                conditions: [{{type: PodScheduled, status: '{scheduled}', lastTransitionTime: '2026-01-01T00:00:00Z'}}],
                containerStatuses: {}, initContainerStatuses: {}}}}}",
            state(containers),
            state(init)
        ))
        .unwrap()
    }

    #[test]
    fn a_pod_is_held_up_while_nothing_of_it_has_begun() {
        let creating = "{waiting: {reason: ContainerCreating}}";
        let running = "{running: {}}";
        let done = "{terminated: {exitCode: 0}}";
        for (scheduled, containers, init, after_s, expected) in [
            ("True", creating, creating, 31, true),
            ("True", creating, creating, 30, false),
            ("False", creating, creating, 31, false),
            ("True", running, done, 31, false),
            ("True", "{waiting: {reason: PodInitializing}}", running, 31, false),
            ("True", creating, "{}", 31, true),
        ] {
            let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            let now = now + SignedDuration::from_secs(after_s);
            assert_eq!(
                waits(&pod(scheduled, containers, init), now),
                expected,
                "{scheduled} {containers} {init} {after_s}"
            );
        }
    }

    #[test]
    fn the_secret_that_is_gone_is_named_with_who_names_it() {
        let pod = pod("True", "{}", "{}");
        assert_eq!(secrets(&pod).collect::<Vec<_>>(), [("demo", "s3"), ("demo", "store")]);
        for (missing, expected) in [
            (
                "s3",
                "CredentialsMissing: it waits for the Secret 's3', which the source of the BaseModel 'smollm2' names, and there is none",
            ),
            (
                "store",
                "CredentialsMissing: it waits for the Secret 'store', which the allowed source 's3://team' of the BaseModel 'smollm2' names, and there is none",
            ),
            ("other", "ContainerCreating: for more than 30 s its containers have been being made: its Events say more"),
        ] {
            let Trouble { reason, message } = trouble(&pod, &BTreeSet::from([missing]), Some(&base()));
            assert_eq!(format!("{reason}: {message}"), expected);
        }
    }
}
