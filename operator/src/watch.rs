//! What the operator watches: one stream and one store per kind, and who is called when something changes.
//!
//! Only what is needed is kept: pods and children by label, children other than Deployments by their metadata, and never
//! `managedFields`. Secrets of users are not watched at all.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use lorafleet_crds::{BaseModel, LoraAdapter, ServingPool, names};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Everything that is known of the cluster without asking.
#[derive(Clone)]
pub struct Stores {
    pub base_models: Store<BaseModel>,
    pub adapters: Store<LoraAdapter>,
    pub pools: Store<ServingPool>,
    /// Engine pods only.
    pub pods: Store<Pod>,
    pub deployments: Store<Deployment>,
    pub services: Store<PartialObjectMeta<Service>>,
    pub config_maps: Store<PartialObjectMeta<ConfigMap>>,
    pub secrets: Store<PartialObjectMeta<Secret>>,
    pub service_accounts: Store<PartialObjectMeta<ServiceAccount>>,
    pub role_bindings: Store<PartialObjectMeta<RoleBinding>>,
}

/// Calls the controllers. The queues hold references only, and the controllers take equal ones together.
#[derive(Clone)]
pub struct Bells {
    pub model: UnboundedSender<ObjectRef<BaseModel>>,
    pub intake: UnboundedSender<ObjectRef<LoraAdapter>>,
    pub pool: UnboundedSender<ObjectRef<ServingPool>>,
}

/// The other ends of [`Bells`].
pub struct Queues {
    pub model: UnboundedReceiver<ObjectRef<BaseModel>>,
    pub intake: UnboundedReceiver<ObjectRef<LoraAdapter>>,
    pub pool: UnboundedReceiver<ObjectRef<ServingPool>>,
}

pub fn bells() -> (Bells, Queues) {
    let (model, model_queue) = unbounded_channel();
    let (intake, intake_queue) = unbounded_channel();
    let (pool, pool_queue) = unbounded_channel();
    (Bells { model, intake, pool }, Queues { model: model_queue, intake: intake_queue, pool: pool_queue })
}

impl Bells {
    // A controller that has ended takes its queue with it, and the process ends with the controller: nothing to ring.
    pub fn ring_model(&self, base: ObjectRef<BaseModel>) {
        let _ = self.model.send(base);
    }

    pub fn ring_intake(&self, adapter: ObjectRef<LoraAdapter>) {
        let _ = self.intake.send(adapter);
    }

    pub fn ring_pool(&self, pool: ObjectRef<ServingPool>) {
        let _ = self.pool.send(pool);
    }
}

/// Starts all watches; returns once every store is filled.
pub async fn start(client: &Client, bells: &Bells) -> Result<Stores, StoreLost> {
    let everything = watcher::Config::default();
    let ours = everything.clone().labels(&format!("{}={}", names::MANAGED_BY_LABEL, names::MANAGED_BY));
    let engines = ours.clone().labels(&format!(
        "{}={},{}={}",
        names::MANAGED_BY_LABEL,
        names::MANAGED_BY,
        names::COMPONENT_LABEL,
        names::ENGINE_COMPONENT
    ));
    let (base_models, base_writer) = store();
    let (adapters, adapter_writer) = store();
    let (pools, pool_writer) = store();
    let stores = Stores {
        pods: whole(client, engines, ring_pool_of(bells)),
        deployments: whole(client, ours.clone(), ring_pool_of(bells)),
        services: metadata(client, ours.clone(), bells),
        config_maps: metadata(client, ours.clone(), bells),
        secrets: metadata(client, ours.clone(), bells),
        service_accounts: metadata(client, ours.clone(), bells),
        role_bindings: metadata(client, ours, bells),
        base_models,
        adapters,
        pools,
    };
    let known = stores.clone();
    let ring = bells.clone();
    keep(watcher(Api::all(client.clone()), everything.clone()), base_writer, move |_, base| {
        known.base_changed(base, &ring)
    });
    let (known, ring) = (stores.clone(), bells.clone());
    keep(watcher(Api::all(client.clone()), everything.clone()), adapter_writer, move |_, adapter| {
        known.adapter_changed(adapter, &ring);
    });
    let (known, ring) = (stores.clone(), bells.clone());
    keep(watcher(Api::all(client.clone()), everything), pool_writer, move |before, pool| {
        if asks_otherwise(before, pool) {
            known.pool_changed(pool, &ring);
        }
    });
    stores.wait_until_ready().await?;
    Ok(stores)
}

/// A watch ended before its store was filled.
#[derive(Debug, thiserror::Error)]
#[error("the watch of {0} ended before everything was listed")]
pub struct StoreLost(&'static str);

impl Stores {
    async fn wait_until_ready(&self) -> Result<(), StoreLost> {
        let Self {
            base_models,
            adapters,
            pools,
            pods,
            deployments,
            services,
            config_maps,
            secrets,
            service_accounts,
            role_bindings,
        } = self;
        base_models.wait_until_ready().await.map_err(|_| StoreLost("base models"))?;
        adapters.wait_until_ready().await.map_err(|_| StoreLost("adapters"))?;
        pools.wait_until_ready().await.map_err(|_| StoreLost("pools"))?;
        pods.wait_until_ready().await.map_err(|_| StoreLost("pods"))?;
        deployments.wait_until_ready().await.map_err(|_| StoreLost("deployments"))?;
        services.wait_until_ready().await.map_err(|_| StoreLost("services"))?;
        config_maps.wait_until_ready().await.map_err(|_| StoreLost("config maps"))?;
        secrets.wait_until_ready().await.map_err(|_| StoreLost("secrets"))?;
        service_accounts.wait_until_ready().await.map_err(|_| StoreLost("service accounts"))?;
        role_bindings.wait_until_ready().await.map_err(|_| StoreLost("role bindings"))
    }

    /// Pools of this namespace that serve this base.
    pub fn pools_of(&self, namespace: Option<&str>, base: &str) -> Vec<Arc<ServingPool>> {
        self.pools.state_filter(|pool| {
            pool.metadata.namespace.as_deref() == namespace && pool.spec.base_model_ref.name == base
        })
    }

    /// Adapters of this namespace for this base.
    pub fn adapters_of(&self, namespace: Option<&str>, base: &str) -> Vec<Arc<LoraAdapter>> {
        self.adapters.state_filter(|adapter| {
            adapter.metadata.namespace.as_deref() == namespace && adapter.spec.base_model_ref.name == base
        })
    }

    fn base_changed(&self, base: &BaseModel, bells: &Bells) {
        bells.ring_model(ObjectRef::from_obj(base));
        let (namespace, name) = (base.metadata.namespace.as_deref(), base.name_any());
        self.pools_of(namespace, &name).iter().for_each(|pool| bells.ring_pool(ObjectRef::from_obj(pool.as_ref())));
        self.adapters_of(namespace, &name)
            .iter()
            .for_each(|adapter| bells.ring_intake(ObjectRef::from_obj(adapter.as_ref())));
    }

    fn adapter_changed(&self, adapter: &LoraAdapter, bells: &Bells) {
        bells.ring_intake(ObjectRef::from_obj(adapter));
        let (namespace, base) = (adapter.metadata.namespace.as_deref(), &adapter.spec.base_model_ref.name);
        self.pools_of(namespace, base).iter().for_each(|pool| bells.ring_pool(ObjectRef::from_obj(pool.as_ref())));
        for other in self.adapters_of(namespace, base) {
            if concerns(adapter, &other) {
                bells.ring_intake(ObjectRef::from_obj(other.as_ref()));
            }
        }
    }

    fn pool_changed(&self, pool: &ServingPool, bells: &Bells) {
        bells.ring_pool(ObjectRef::from_obj(pool));
        let (namespace, base) = (pool.metadata.namespace.as_deref(), &pool.spec.base_model_ref.name);
        self.adapters_of(namespace, base)
            .iter()
            .for_each(|adapter| bells.ring_intake(ObjectRef::from_obj(adapter.as_ref())));
    }
}

/// Whether the change of one adapter matters to another: it takes its name, or gives it free. A name that the spec has
/// given up stands in the status still.
fn concerns(changed: &LoraAdapter, other: &LoraAdapter) -> bool {
    let gave_up = changed.status.as_ref().and_then(|status| status.served_name.as_deref());
    changed.metadata.uid != other.metadata.uid
        && (other.served_name() == changed.served_name() || Some(other.served_name()) == gave_up)
}

/// Whether anything but the status changed: who writes a pool's status is its own controller, which looks again by itself,
/// and no adapter of thousands has to hear of it.
fn asks_otherwise<K: Resource>(before: Option<&K>, now: &K) -> bool {
    let asked = |object: &K| {
        let meta = object.meta();
        let going = meta.deletion_timestamp.is_some();
        (meta.uid.clone(), meta.generation, going, meta.labels.clone(), meta.annotations.clone())
    };
    before.is_none_or(|before| asked(before) != asked(now))
}

/// The pool that an object of ours belongs to, by its label.
fn ring_pool_of<K: Resource>(bells: &Bells) -> impl Fn(Option<&K>, &K) + Send + Sync + 'static {
    let bells = bells.clone();
    move |_, object| {
        let (Some(namespace), Some(pool)) = (&object.meta().namespace, object.labels().get(names::POOL_LABEL)) else {
            return;
        };
        bells.ring_pool(ObjectRef::new(pool).within(namespace));
    }
}

fn whole<K>(
    client: &Client,
    config: watcher::Config,
    changed: impl Fn(Option<&K>, &K) + Send + Sync + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    keep(watcher(Api::all(client.clone()), config), writer, changed);
    reader
}

fn metadata<K>(client: &Client, config: watcher::Config, bells: &Bells) -> Store<PartialObjectMeta<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    keep(watcher(Api::<PartialObjectMeta<K>>::all(client.clone()), config), writer, ring_pool_of(bells));
    reader
}

/// Fills the store from the stream for as long as the process lives, and says of every object that changed or went what it
/// was before, if that is known, and what it is now.
fn keep<K>(
    stream: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
    mut writer: kube::runtime::reflector::store::Writer<K>,
    changed: impl Fn(Option<&K>, &K) + Send + Sync + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    let stream = stream.default_backoff().modify(|object| {
        object.managed_fields_mut().clear();
        object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
    });
    tokio::spawn(async move {
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => {
                    let before = match &event {
                        watcher::Event::Apply(object) => writer.as_reader().get(&ObjectRef::from_obj(object)),
                        _ => None,
                    };
                    writer.apply_watcher_event(&event);
                    match &event {
                        // During a listing nothing is in the store yet; all that it holds is told at the end.
                        watcher::Event::Init | watcher::Event::InitApply(_) => {}
                        watcher::Event::InitDone => {
                            writer.as_reader().state().iter().for_each(|object| changed(None, object));
                        }
                        watcher::Event::Apply(object) | watcher::Event::Delete(object) => {
                            changed(before.as_deref(), object);
                        }
                    }
                }
                Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watching"),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(name: &str, served: &str, status: &str) -> LoraAdapter {
        serde_json::from_value(serde_json::json!({
            "metadata": { "name": name, "uid": name },
            "spec": { "baseModelRef": { "name": "base" }, "source": { "uri": "s3://a/b" }, "servedName": served },
            "status": { "servedName": status },
        }))
        .unwrap()
    }

    #[test]
    fn a_status_is_no_news_to_others() {
        let pool = |generation: i64, label: &str, deleted: Option<&str>, ready: u32| -> ServingPool {
            serde_json::from_value(serde_json::json!({
                "metadata": {
                    "name": "chat", "uid": "1", "generation": generation, "labels": { "a": label },
                    "deletionTimestamp": deleted, "resourceVersion": ready.to_string(),
                },
                "spec": { "baseModelRef": { "name": "base" } },
                "status": { "readyReplicas": ready },
            }))
            .unwrap()
        };
        let before = pool(1, "b", None, 1);
        for (now, news) in [
            (pool(1, "b", None, 1), false),
            (pool(1, "b", None, 2), false),
            (pool(2, "b", None, 1), true),
            (pool(1, "c", None, 1), true),
            (pool(1, "b", Some("2026-01-01T00:00:00Z"), 1), true),
        ] {
            assert_eq!(asks_otherwise(Some(&before), &now), news, "{now:?}");
        }
        assert!(asks_otherwise(None, &before));
    }

    #[test]
    fn who_waits_for_a_name_hears_that_it_is_free() {
        let waiting = adapter("b", "support", "support");
        for (served, status, matters) in [
            ("support", "support", true),
            ("other", "support", true),
            ("support", "other", true),
            ("other", "other", false),
        ] {
            assert_eq!(concerns(&adapter("a", served, status), &waiting), matters, "{served} {status}");
        }
        assert!(!concerns(&waiting, &waiting));
    }
}
