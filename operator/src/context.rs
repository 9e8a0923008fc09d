//! What every controller has at hand.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::object::HasStatus;
use kube::core::{NamespaceResourceScope, Status};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, Resource, ResourceExt};
use lorafleet_artifact::Reason;
use lorafleet_crds::PoolPlacement;
use lorafleet_crds::condition::{Cause, ConditionType, find};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::conditions::{Conditioned, conditions, transitions};
use crate::job::Jobs;
use crate::metrics::Metrics;
use crate::owned::{difference, says};
use crate::recheck::Rechecks;
use crate::settings::{Limits, Settings};
use crate::source::OpenDoors;
use crate::status::{Refusals, is_refusal, reductions, refused};
use crate::watch::{Bells, Stores};
use crate::{intake, model, pool};

/// Shared by all reconciles.
pub struct Context {
    pub client: Client,
    pub settings: Settings,
    pub limits: Limits,
    pub stores: Stores,
    pub bells: Bells,
    pub metrics: Arc<Metrics>,
    pub recorder: Recorder,
    pub model_jobs: Jobs<model::Outcome>,
    pub intake_jobs: Jobs<intake::Outcome>,
    pub model_rechecks: Rechecks,
    pub adapter_rechecks: Rechecks,
    pub open_doors: OpenDoors,
    pub sightings: Sightings,
    pub engines: pool::Engines,
    pub applied: pool::AppliedMemory,
    pub rests: pool::Rests,
    pub refusals: Refusals,
}

/// A failed write or read of the API server. Tried again with growing waits.
#[derive(Debug, thiserror::Error)]
#[error("{doing}: {source}")]
pub struct ApiError {
    pub doing: String,
    #[source]
    pub source: Box<kube::Error>,
}

impl ApiError {
    pub fn of(doing: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let doing = doing.into();
        move |source| Self { doing, source: Box::new(source) }
    }
}

impl ApiError {
    /// What was being done, and the API server's own words if it is what refused.
    pub fn words(&self) -> String {
        match self.source.as_ref() {
            kube::Error::Api(status) => format!("{}: {}", self.doing, status.message),
            other => format!("{}: {other}", self.doing),
        }
    }
}

impl Context {
    /// Writes the status if it is another, but for what others say, and tells of conditions that changed. Returns whether the
    /// API server took it.
    pub async fn write_status<K>(&self, object: &K, manager: &str, status: &K::Status) -> Result<bool, ApiError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + HasStatus,
        K: Clone + DeserializeOwned + std::fmt::Debug,
        K::Status: Serialize + PartialEq + Conditioned,
    {
        let standing = object.status();
        if says(standing, status) {
            return Ok(true);
        }
        let old = standing.map(Conditioned::conditions).unwrap_or_default();
        let taken = self.put_status(object, manager, old, status).await?;
        if taken {
            self.tell(object, old, status.conditions()).await;
        }
        Ok(taken)
    }

    /// Writes a status with server-side apply, as the one owner of what it holds. Where the API server refuses it, a status
    /// that says so is written instead, whose conditions follow on the `old` ones. Returns whether it was written as it is.
    async fn put_status<K>(
        &self,
        object: &K,
        manager: &str,
        old: &[Condition],
        status: &K::Status,
    ) -> Result<bool, ApiError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + HasStatus,
        K: Clone + DeserializeOwned + std::fmt::Debug,
        K::Status: Serialize,
    {
        let status = serde_json::to_value(status)
            .map_err(|error| ApiError::of("writing a status as JSON")(kube::Error::SerdeError(error)))?;
        let uid = object.meta().uid.clone().unwrap_or_default();
        if self.refusals.stands(&uid, &status, Instant::now()) {
            return Ok(false);
        }
        let (kind, name) = (K::kind(&()), object.meta().name.as_deref().unwrap_or_default());
        let doing = || {
            let namespace = object.meta().namespace.as_deref().unwrap_or_default();
            ApiError::of(format!("writing the status of {kind} {namespace}/{name}"))
        };
        match self.patch_status(object, manager, &status).await {
            Ok(written) => {
                if self.take_away(&written, manager, &status).await.map_err(doing())? {
                    self.refusals.forget(&uid);
                } else {
                    self.refusals.note(&uid, &status, Instant::now());
                }
                Ok(true)
            }
            Err(kube::Error::Api(answer)) if is_refusal(&answer) => {
                tracing::warn!(%kind, name, answer = %answer.message, "the API server refused a status");
                self.write_refused(object, manager, old, &status, &answer).await.map_err(doing())?;
                self.refusals.note(&uid, &status, Instant::now());
                Ok(false)
            }
            Err(error) => Err(doing()(error)),
        }
    }

    /// Takes away what somebody else has put among the operator's fields, which an apply leaves there. Returns whether the
    /// status is now as it shall be, or will be looked at again at once.
    async fn take_away<K>(&self, written: &K, manager: &str, wanted: &Value) -> kube::Result<bool>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + HasStatus,
        K: Clone + DeserializeOwned + std::fmt::Debug,
        K::Status: Serialize,
    {
        let surplus = |object: &K| -> kube::Result<Option<Value>> {
            let standing = serde_json::to_value(object.status()).map_err(kube::Error::SerdeError)?;
            Ok(difference(&standing, wanted))
        };
        let Some(patch) = surplus(written)? else { return Ok(true) };
        let (kind, name) = (K::kind(&()), written.name_any());
        let fields: Vec<&String> = patch.as_object().into_iter().flat_map(|patch| patch.keys()).collect();
        tracing::warn!(%kind, name, ?fields, "taking away what somebody else has written into a status");
        // Lists are written as a whole: only over what was seen.
        let patch = serde_json::json!({
            "metadata": { "resourceVersion": written.resource_version() },
            "status": patch,
        });
        self.metrics.writes.with_label_values(&[&format!("{kind}Status")]).inc();
        let api = Api::<K>::namespaced(self.client.clone(), &written.namespace().unwrap_or_default());
        let params = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
        match api.patch_status(&name, &params, &Patch::Merge(&patch)).await {
            Ok(left) => Ok(surplus(&left)?.is_none()),
            // Somebody has written meanwhile, and that is an event.
            Err(kube::Error::Api(answer)) if answer.code == 409 => Ok(true),
            Err(kube::Error::Api(answer)) if is_refusal(&answer) => {
                tracing::warn!(%kind, name, answer = %answer.message, "the API server refused to take it away");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Writes that the whole was refused, and of it as much as the API server takes.
    async fn write_refused<K>(
        &self,
        object: &K,
        manager: &str,
        old: &[Condition],
        status: &Value,
        answer: &Status,
    ) -> kube::Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let said = conditions(old, &refused(answer), object.meta().generation, Timestamp::now());
        let mut written = Ok(());
        for less in reductions(status, answer, &said) {
            written = self.patch_status(object, manager, &less).await.map(drop);
            if !matches!(&written, Err(kube::Error::Api(again)) if is_refusal(again)) {
                break;
            }
        }
        self.tell(object, old, &said).await;
        written
    }

    async fn patch_status<K>(&self, object: &K, manager: &str, status: &Value) -> kube::Result<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let (namespace, name) = (object.meta().namespace.as_deref(), object.meta().name.as_deref());
        let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
        let patch = serde_json::json!({
            "apiVersion": K::api_version(&()),
            "kind": K::kind(&()),
            // Refused if the object was deleted and made anew meanwhile.
            "metadata": { "name": name, "uid": object.meta().uid },
            "status": status,
        });
        self.metrics.writes.with_label_values(&[&format!("{}Status", K::kind(&()))]).inc();
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        api.patch_status(name, &PatchParams::apply(manager).force(), &Patch::Apply(&patch)).await
    }

    /// An Event for each condition that changed. One that cannot be written is logged and lost: Events are for people.
    async fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, old: &[Condition], new: &[Condition]) {
        let reference = object.object_ref(&());
        for condition in transitions(old, new).filter(|condition| worth_an_event(condition, old)) {
            let good = condition.status == "True";
            let event = Event {
                type_: if good || passes_by_itself(&condition.reason) { EventType::Normal } else { EventType::Warning },
                reason: if good { condition.type_.clone() } else { condition.reason.clone() },
                note: Some(note(&condition.message).to_owned()).filter(|note| !note.is_empty()),
                action: "Reconcile".to_owned(),
                secondary: None,
            };
            if let Err(error) = self.recorder.publish(&event, &reference).await {
                tracing::warn!(%error, "writing an event");
            }
        }
    }

    /// Counts the objects by the status of their condition Ready, and the pods that each pool asks for.
    pub fn count_objects(&self) {
        self.metrics.objects.reset();
        self.metrics.desired_replicas.reset();
        let stores = &self.stores;
        let ready = |conditions: Option<&Vec<Condition>>| {
            let ready = conditions.and_then(|conditions| find(conditions, ConditionType::Ready));
            ready.map_or("Unknown".to_owned(), |ready| ready.status.clone())
        };
        let count = |kind: &str, ready: String| self.metrics.objects.with_label_values(&[kind, &ready]).inc();
        for base in stores.base_models.state() {
            count("BaseModel", ready(base.status.as_ref().map(|status| &status.conditions)));
        }
        for adapter in stores.adapters.state() {
            count("LoraAdapter", ready(adapter.status.as_ref().map(|status| &status.conditions)));
        }
        for pool in stores.pools.state() {
            count("ServingPool", ready(pool.status.as_ref().map(|status| &status.conditions)));
            let labels = [pool.namespace().unwrap_or_default(), pool.name_any()];
            self.metrics.desired_replicas.with_label_values(&labels).set(pool.spec.replicas.into());
        }
    }

    /// Counts one reconcile.
    pub fn measured<T, E>(&self, controller: &str, started: Instant, result: &Result<T, E>) {
        let word = if result.is_ok() { "ok" } else { "error" };
        self.metrics.reconciles.with_label_values(&[controller, word]).inc();
        self.metrics.reconcile_seconds.with_label_values(&[controller]).observe(started.elapsed().as_secs_f64());
    }
}

/// As much of a message as the note of an Event may have, which is counted in bytes.
fn note(message: &str) -> &str {
    message.get(..message.floor_char_boundary(1024)).unwrap_or_default()
}

/// `Ready` repeats whatever is in the way; of the others only what was reached is worth a word.
fn worth_an_event(condition: &Condition, old: &[Condition]) -> bool {
    match condition.type_.as_str() {
        // It has a name by now that another object had.
        "SourceAllowed" if condition.status == "True" => {
            let before = find(old, ConditionType::SourceAllowed);
            before.is_some_and(|before| before.reason == Cause::NameConflict.to_string())
        }
        "Ready" => condition.reason != Cause::InProgress.to_string(),
        // What is pinned goes on being served, so that Ready says nothing of it.
        "Verified" if condition.reason == Reason::SourceChanged.as_str() => true,
        "Resolved" | "Verified" | "RolledOut" => condition.status == "True",
        _ => false,
    }
}

/// Nobody has to do anything about it.
fn passes_by_itself(reason: &str) -> bool {
    use Cause::{BaseNotReady, Deleting, GatewayNotReady, InProgress, Loading, NoReadyPod, PodsNotReady, Waiting};
    [BaseNotReady, Deleting, GatewayNotReady, InProgress, Loading, NoReadyPod, PodsNotReady, Waiting]
        .iter()
        .any(|cause| cause.to_string() == reason)
}

/// What the pools saw of each adapter on their last pass since this operator leads.
///
/// Pools write it, intake prints it: the adapter's status has one writer.
#[derive(Default)]
pub struct Sightings(Mutex<HashMap<String, HashMap<String, PoolPlacement>>>);

impl Sightings {
    /// Keeps what the pool saw, by uid of the adapter; returns whether something changed for this adapter.
    pub fn put(&self, pool_uid: &str, seen: HashMap<String, PoolPlacement>) -> impl Fn(&str) -> bool + use<> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.insert(pool_uid.to_owned(), seen.clone());
        // That a pool has looked at all is news for every adapter of its base.
        move |uid| before.as_ref().is_none_or(|before| before.get(uid) != seen.get(uid))
    }

    /// What the pool saw of the adapter: `None` if it has not looked yet, `Some(None)` if it does not select it.
    pub fn of(&self, pool_uid: &str, adapter_uid: &str) -> Option<Option<PoolPlacement>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(pool_uid).map(|seen| seen.get(adapter_uid).cloned())
    }

    /// Forgets pools that are gone.
    pub fn retain(&self, alive: impl Fn(&str) -> bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|uid, _| alive(uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_where_a_character_ends() {
        for (message, bytes) in [("too long".to_owned(), 8), ("a".repeat(2000), 1024), ("\u{20ac}".repeat(2000), 1023)]
        {
            assert_eq!(note(&message).len(), bytes);
        }
    }
}
