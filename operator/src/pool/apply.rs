//! The one writer of a pool's world: objects by server-side apply in a fixed order, then the pods.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::core::{NamespaceResourceScope, Status};
use kube::{Api, Resource, ResourceExt};
use lorafleet_crds::ServingPool;
use lorafleet_crds::condition::Cause;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::MANAGER;
use super::engine::EngineError;
use super::observe::Seen;
use super::observed::{Applied as AppliedOnce, ChildSeen, PodSeen};
use super::plan::{MISSING, NOT_OWN, Plan, PodAction, PodStep, Reasoned, Step, TOUCHED, key};
use crate::build::{Keys, Objects, keys_secret};
use crate::context::{ApiError, Context};

/// What came of a plan.
#[derive(Debug, Default)]
pub struct Applied {
    /// The first object that could not be written, and why.
    pub unwritten: Option<Reasoned>,
    /// What was written, by `Kind/name`.
    pub written: BTreeMap<String, AppliedOnce>,
    /// Pods that could not be told, and why.
    pub untold: Vec<(String, Reasoned)>,
}

/// Goes on past what fails: a Deployment that the API server refuses neither keeps pods that run from being told, nor
/// the pool from saying so.
pub async fn apply(pool: &ServingPool, seen: &Seen, plan: &Plan, context: &Context) -> Applied {
    let keys_made = if plan.make_keys { make_keys(pool, context).await } else { Ok(()) };
    let (children, mut writes) = (&seen.observed.children, Vec::new());
    if let Some(objects) = &plan.objects {
        // A new field of Objects that is not applied here does not compile.
        let Objects { config, engine_service, engine, gateway_account, gateway_binding, gateway_service, gateway } =
            objects.as_ref();
        let config = apply_one(config, children, plan, context).await;
        let account = apply_one(gateway_account, children, plan, context).await;
        // Pods are made of what is the pool's alone: none runs with a configuration or with rights that are somebody else's.
        let (has_config, has_account) = (config.is_ok(), account.is_ok());
        writes.extend([config, account]);
        if has_config {
            writes.push(apply_one(engine, children, plan, context).await);
        }
        if has_account {
            writes.push(apply_one(gateway_binding, children, plan, context).await);
            writes.push(apply_one(gateway, children, plan, context).await);
        }
        writes.push(apply_one(engine_service, children, plan, context).await);
        writes.push(apply_one(gateway_service, children, plan, context).await);
    }
    let (mut written, mut failed) = (BTreeMap::new(), Vec::from_iter(keys_made.err()));
    for write in writes {
        match write {
            Ok(applied) => written.extend(applied),
            Err(error) => failed.push(error),
        }
    }
    failed.iter().for_each(|error| tracing::warn!(%error, "not written"));
    let unwritten = failed.first().map(|error| Reasoned::new(Cause::ApplyFailed, error.words()));
    Applied { unwritten, written, untold: tell_pods(seen, plan, context).await }
}

/// Makes the keys, unless somebody was faster. Keys that exist are never replaced, and what exists and holds none neither.
async fn make_keys(pool: &ServingPool, context: &Context) -> Result<(), ApiError> {
    let namespace = pool.namespace().unwrap_or_default();
    let doing = format!("making the keys of pool {namespace}/{}", pool.name_any());
    let keys = match Keys::random() {
        Ok(keys) => keys,
        Err(error) => return Err(ApiError::of(doing)(kube::Error::Service(error.to_string().into()))),
    };
    context.metrics.writes.with_label_values(&["Secret"]).inc();
    let (secrets, secret) = (Api::<Secret>::namespaced(context.client.clone(), &namespace), keys_secret(pool, &keys));
    match secrets.create(&PostParams::default(), &secret).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        written => return written.map(drop).map_err(ApiError::of(doing)),
    }
    let name = secret.name_any();
    let found = secrets.get_opt(&name).await.map_err(ApiError::of(&doing))?;
    match found.is_none_or(|found| Keys::read(&found).is_ok()) {
        true => Ok(()),
        false => Err(in_the_way(
            doing,
            format!("the Secret '{name}' is there and holds no keys: delete it, and it is made anew"),
        )),
    }
}

/// Something of somebody else's has the name that an object of the pool has.
fn in_the_way(doing: String, message: String) -> ApiError {
    ApiError::of(doing)(kube::Error::Api(Status::failure(&message, "AlreadyExists").with_code(409).boxed()))
}

/// Uid of the one owner that controls an object.
pub fn controller(meta: &ObjectMeta) -> Option<&str> {
    let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    owner.map(|owner| owner.uid.as_str())
}

/// Whether what has the name may be written: it is the pool's, or nobody's and made for it. Of a ServiceAccount or RoleBinding
/// cannot be seen what it is allowed, or allows: one that the pool does not control is never taken over.
fn may_be_written(kind: &str, found: &ObjectMeta, wanted: &ObjectMeta) -> bool {
    match controller(found) {
        Some(owner) => Some(owner) == controller(wanted),
        None if matches!(kind, "ServiceAccount" | "RoleBinding") => false,
        None => {
            let has = |(name, value)| found.labels.as_ref().and_then(|labels| labels.get(name)) == Some(value);
            wanted.labels.as_ref().is_some_and(|labels| labels.iter().all(has))
        }
    }
}

/// Writes the object over what is known of it by its uid, or makes it: then nobody else may have written to it before.
async fn write<K>(object: &K, uid: Option<String>, api: &Api<K>) -> kube::Result<K>
where
    K: Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
{
    let (name, params) = (object.name_any(), PatchParams::apply(MANAGER));
    let mut object = object.clone();
    object.meta_mut().uid.clone_from(&uid);
    let params = if uid.is_some() { params.force() } else { params };
    let written = api.patch(&name, &params, &Patch::Apply(&object)).await?;
    let others = |written: &K| {
        written.managed_fields().iter().any(|entry| entry.manager.as_deref().is_some_and(|manager| manager != MANAGER))
    };
    if uid.is_none() && others(&written) {
        // Somebody was faster. Applying nothing gives back what was added to his.
        let nothing = serde_json::json!({
            "apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": { "name": name, "uid": written.uid() },
        });
        api.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&nothing)).await?;
        return Err(kube::Error::Api(Status::failure(NOT_THE_POOLS, "AlreadyExists").with_code(409).boxed()));
    }
    Ok(written)
}

const NOT_THE_POOLS: &str = "one of that name is there already, and it is not this pool's: rename the pool, or delete that object, which is then made anew";

/// What came of it, if something was to be written.
async fn apply_one<K>(
    object: &K,
    children: &BTreeMap<String, ChildSeen>,
    plan: &Plan,
    context: &Context,
) -> Result<Option<(String, AppliedOnce)>, ApiError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Serialize
        + DeserializeOwned
        + std::fmt::Debug,
{
    let key = key(object);
    let Some(Step::Apply { hash, why }) = plan.steps.get(&key) else { return Ok(None) };
    let namespace = object.namespace().unwrap_or_default();
    // Whoever writes the status of an object touches it too: that happens all the time, and is no news.
    if *why == TOUCHED {
        tracing::debug!(%namespace, object = %key, why, "applying");
    } else {
        tracing::info!(%namespace, object = %key, why, "applying");
    }
    let (api, doing) =
        (Api::<K>::namespaced(context.client.clone(), &namespace), format!("applying {key} in {namespace}"));
    let mut uid = children.get(&key).and_then(|child| child.uid.clone());
    if [MISSING, NOT_OWN].contains(why) {
        let found = api.get_metadata_opt(&object.name_any()).await.map_err(ApiError::of(&doing))?;
        if found.as_ref().is_some_and(|found| !may_be_written(&K::kind(&()), &found.metadata, object.meta())) {
            return Err(in_the_way(doing, NOT_THE_POOLS.to_owned()));
        }
        uid = found.and_then(|found| found.metadata.uid);
    }
    context.metrics.writes.with_label_values(&[K::kind(&()).as_ref()]).inc();
    let written = write(object, uid, &api).await.map_err(ApiError::of(doing))?;
    let applied = AppliedOnce {
        hash: hash.clone(),
        resource_version: written.resource_version().unwrap_or_default(),
        generation: written.meta().generation,
    };
    context.applied.remember(&namespace, &key, applied.clone());
    Ok(Some((key, applied)))
}

/// Tells each pod that shall be told; returns those that did not take it.
async fn tell_pods(seen: &Seen, plan: &Plan, context: &Context) -> Vec<(String, Reasoned)> {
    let Some(keys) = &seen.keys else { return Vec::new() };
    let tellings: Vec<_> = plan.pods.iter().map(|step| tell(step, &seen.observed.pods, keys, context)).collect();
    futures::stream::iter(tellings)
        .buffer_unordered(context.limits.pods_asked_max)
        .filter_map(std::future::ready)
        .collect()
        .await
}

async fn tell(step: &PodStep, pods: &[PodSeen], keys: &Keys, context: &Context) -> Option<(String, Reasoned)> {
    let PodAction::Put { placement, why } = &step.action else { return None };
    let address = pods.iter().find(|pod| pod.name == step.pod)?.address.as_ref()?;
    tracing::info!(pod = %step.pod, generation = placement.generation, %why, "placing");
    let told = context.engines.place(address, &keys.admin, placement).await;
    let word = if told.is_ok() { "ok" } else { "error" };
    context.metrics.engine_requests.with_label_values(&["placement", word]).inc();
    told.err().map(|error| {
        let cause = match error {
            EngineError::Refused { .. } => Cause::PlacementRefused,
            _ => Cause::PodUnreachable,
        };
        (step.pod.clone(), Reasoned::new(cause, error.to_string()))
    })
}

/// What was written and read before. Losing it costs one write without effect per object, and nothing else.
#[derive(Default)]
pub struct AppliedMemory {
    objects: Mutex<HashMap<String, AppliedOnce>>,
    keys: Mutex<HashMap<String, (String, Keys)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AppliedMemory {
    pub fn get(&self, namespace: &str, key: &str) -> Option<AppliedOnce> {
        lock(&self.objects).get(&format!("{namespace}/{key}")).cloned()
    }

    fn remember(&self, namespace: &str, key: &str, applied: AppliedOnce) {
        lock(&self.objects).insert(format!("{namespace}/{key}"), applied);
    }

    /// The keys as they were read at this version of the Secret.
    pub fn keys(&self, namespace: &str, name: &str, version: &str) -> Option<Keys> {
        let keys = lock(&self.keys);
        let (known, keys) = keys.get(&format!("{namespace}/{name}"))?;
        (known == version).then(|| keys.clone())
    }

    pub fn remember_keys(&self, namespace: &str, name: &str, version: &str, keys: Keys) {
        lock(&self.keys).insert(format!("{namespace}/{name}"), (version.to_owned(), keys));
    }

    /// Forgets what belongs to pools that are gone.
    pub fn retain(&self, alive: impl Fn(&str, &str) -> bool) {
        // Keys are `namespace/...`, and the last part is the pool's name with an ending.
        let keep = |key: &str| {
            let (namespace, object) = key.split_once('/').unwrap_or_default();
            let name = object.rsplit('/').next().unwrap_or_default();
            ["-engine-keys", "-engine", "-gateway"]
                .iter()
                .filter_map(|ending| name.strip_suffix(ending))
                .any(|pool| alive(namespace, pool))
        };
        lock(&self.objects).retain(|key, _| keep(key));
        lock(&self.keys).retain(|key, _| keep(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_the_pools_is_written() {
        let meta = |text: &str| serde_norway::from_str::<ObjectMeta>(text).unwrap();
        let owner = |uid: &str| {
            format!("ownerReferences: [{{apiVersion: v1, kind: K, name: n, uid: {uid}, controller: true}}]")
        };
        let wanted = meta(&format!("{{labels: {{a: x, b: y}}, {}}}", owner("pool")));
        for (found, written, account) in [
            (format!("{{{}}}", owner("pool")), true, true),
            (format!("{{labels: {{a: x, b: y}}, {}}}", owner("other")), false, false),
            ("{labels: {a: x, b: y, c: z}}".to_owned(), true, false),
            ("{labels: {a: x, b: other}}".to_owned(), false, false),
            ("{}".to_owned(), false, false),
            // An owner that does not control it is no claim on it.
            (owner("other").replace("true", "false"), false, false),
        ] {
            let found = meta(&found);
            assert_eq!(may_be_written("Deployment", &found, &wanted), written, "{found:?}");
            assert_eq!(may_be_written("ServiceAccount", &found, &wanted), account, "{found:?}");
            assert_eq!(may_be_written("RoleBinding", &found, &wanted), account, "{found:?}");
        }
    }
}
