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
use super::observed::{Applied as AppliedOnce, PodSeen};
use super::plan::{MISSING, Plan, PodAction, PodStep, Reasoned, Step, TOUCHED, key};
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
    let mut writes = Vec::new();
    if let Some(objects) = &plan.objects {
        // A new field of Objects that is not applied here does not compile.
        let Objects { config, engine_service, engine, gateway_account, gateway_binding, gateway_service, gateway } =
            objects.as_ref();
        writes.push(apply_one(config, plan, context).await);
        writes.push(apply_one(engine_service, plan, context).await);
        writes.push(apply_one(engine, plan, context).await);
        writes.push(apply_one(gateway_account, plan, context).await);
        writes.push(apply_one(gateway_binding, plan, context).await);
        writes.push(apply_one(gateway_service, plan, context).await);
        writes.push(apply_one(gateway, plan, context).await);
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
    match found.is_none_or(|found| Keys::read(&found).is_some()) {
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

/// Whether an object of this name is there that is not the pool's: it is left as it is.
async fn is_foreign<K>(object: &K, api: &Api<K>) -> kube::Result<bool>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let owners = |meta: &ObjectMeta| {
        let owners = meta.owner_references.iter().flatten().filter(|owner| owner.controller == Some(true));
        owners.map(|owner| owner.uid.clone()).collect::<Vec<_>>()
    };
    let found = api.get_metadata_opt(&object.name_any()).await?;
    Ok(found.is_some_and(|found| owners(&found.metadata) != owners(object.meta())))
}

/// What came of it, if something was to be written.
async fn apply_one<K>(object: &K, plan: &Plan, context: &Context) -> Result<Option<(String, AppliedOnce)>, ApiError>
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
    if *why == MISSING && is_foreign(object, &api).await.map_err(ApiError::of(&doing))? {
        return Err(in_the_way(doing, "one of that name is there already, and it is not this pool's".to_owned()));
    }
    context.metrics.writes.with_label_values(&[K::kind(&()).as_ref()]).inc();
    let params = PatchParams::apply(MANAGER).force();
    let written = api.patch(&object.name_any(), &params, &Patch::Apply(object)).await.map_err(ApiError::of(doing))?;
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
