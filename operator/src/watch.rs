//! What the operator watches: one stream and one store per kind, and who is called when something changes.
//!
//! Only what is needed is kept: pods and children by label, children other than Deployments by their metadata, and never
//! `managedFields`. Secrets of users are not watched at all.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::core::error_boundary::InvalidObject;
use kube::core::{ApiResource, DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use lorafleet_crds::{BaseModel, LoraAdapter, ServingPool, names};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use crate::unreadable::Unreadable;

/// Everything that is known of the cluster without asking.
#[derive(Clone)]
pub struct Stores {
    pub base_models: Store<BaseModel>,
    pub adapters: Store<LoraAdapter>,
    pub pools: Store<ServingPool>,
    /// Of engines and gateways.
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
    pub unreadable: UnboundedSender<Unreadable>,
}

/// The other ends of [`Bells`].
pub struct Queues {
    pub model: UnboundedReceiver<ObjectRef<BaseModel>>,
    pub intake: UnboundedReceiver<ObjectRef<LoraAdapter>>,
    pub pool: UnboundedReceiver<ObjectRef<ServingPool>>,
    pub unreadable: UnboundedReceiver<Unreadable>,
}

pub fn bells() -> (Bells, Queues) {
    let (model, model_queue) = unbounded_channel();
    let (intake, intake_queue) = unbounded_channel();
    let (pool, pool_queue) = unbounded_channel();
    let (unreadable, unreadable_queue) = unbounded_channel();
    let queues = Queues { model: model_queue, intake: intake_queue, pool: pool_queue, unreadable: unreadable_queue };
    (Bells { model, intake, pool, unreadable }, queues)
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

/// What keeps the stores up to date. Without one of them the operator would go on with what it knew when that one ended.
#[derive(Default)]
pub struct Watches(JoinSet<()>);

impl Watches {
    /// Returns when one has ended, which none does but by a fault.
    pub async fn ended(&mut self) {
        let ended = self.0.join_next().await;
        tracing::error!(?ended, "a watch has ended");
    }
}

/// Starts all watches; returns once every store is filled.
pub async fn start(client: &Client, bells: &Bells) -> Result<(Stores, Watches), StoreLost> {
    let mut watches = Watches::default();
    let everything = watcher::Config::default();
    let ours = everything.clone().labels(&format!("{}={}", names::MANAGED_BY_LABEL, names::MANAGED_BY));
    let (base_models, base_writer) = store();
    let (adapters, adapter_writer) = store();
    let (pools, pool_writer) = store();
    let stores = Stores {
        pods: whole(&mut watches, client, ours.clone(), ring_pool_of(bells)),
        deployments: whole(&mut watches, client, ours.clone(), ring_pool_of(bells)),
        services: metadata(&mut watches, client, ours.clone(), bells),
        config_maps: metadata(&mut watches, client, ours.clone(), bells),
        secrets: metadata(&mut watches, client, ours.clone(), bells),
        service_accounts: metadata(&mut watches, client, ours.clone(), bells),
        role_bindings: metadata(&mut watches, client, ours, bells),
        base_models,
        adapters,
        pools,
    };
    let known = stores.clone();
    let ring = bells.clone();
    keep(&mut watches, ours_of(client, &everything), base_writer, guarded(bells), move |_, base| {
        known.base_changed(base, &ring)
    });
    let (known, ring) = (stores.clone(), bells.clone());
    keep(&mut watches, ours_of(client, &everything), adapter_writer, guarded(bells), move |_, adapter| {
        known.adapter_changed(adapter, &ring);
    });
    let (known, ring) = (stores.clone(), bells.clone());
    keep(&mut watches, ours_of(client, &everything), pool_writer, guarded(bells), move |before, pool| {
        if asks_otherwise(before, pool) {
            known.pool_changed(pool, &ring);
        }
    });
    stores.wait_until_ready().await?;
    Ok((stores, watches))
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

/// All objects of one of our kinds, each of which may be one that cannot be read.
fn ours_of<K>(
    client: &Client,
    config: &watcher::Config,
) -> impl Stream<Item = watcher::Result<watcher::Event<DeserializeGuard<K>>>> + Send + 'static
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    watcher(Api::<DeserializeGuard<K>>::all(client.clone()), config.clone())
}

/// Hands over what can be read, and says what cannot.
fn guarded<K: Resource<DynamicType = ()>>(bells: &Bells) -> impl Fn(DeserializeGuard<K>) -> Option<K> + Send + 'static {
    let unreadable = bells.unreadable.clone();
    move |DeserializeGuard(read)| match read {
        Ok(object) => Some(object),
        Err(InvalidObject { error, metadata }) => {
            let _ = unreadable.send(Unreadable { resource: ApiResource::erase::<K>(&()), metadata, error });
            None
        }
    }
}

fn whole<K>(
    watches: &mut Watches,
    client: &Client,
    config: watcher::Config,
    changed: impl Fn(Option<&K>, &K) + Send + Sync + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    keep(watches, watcher(Api::all(client.clone()), config), writer, Some, changed);
    reader
}

fn metadata<K>(
    watches: &mut Watches,
    client: &Client,
    config: watcher::Config,
    bells: &Bells,
) -> Store<PartialObjectMeta<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    keep(watches, watcher(Api::<PartialObjectMeta<K>>::all(client.clone()), config), writer, Some, ring_pool_of(bells));
    reader
}

/// Fills the store from the stream for as long as the process lives, and says of every object that changed or went what it
/// was before, if that is known, and what it is now. What `read` does not hand over is not there.
fn keep<G, K>(
    watches: &mut Watches,
    stream: impl Stream<Item = watcher::Result<watcher::Event<G>>> + Send + 'static,
    mut writer: Writer<K>,
    read: impl Fn(G) -> Option<K> + Send + 'static,
    changed: impl Fn(Option<&K>, &K) + Send + Sync + 'static,
) where
    G: Resource + Send + 'static,
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    let stream = stream.default_backoff().modify(|object| {
        object.managed_fields_mut().clear();
        object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
    });
    watches.0.spawn(async move {
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => {
                    if let Some(event) = readable(event, &read, &writer.as_reader()) {
                        take(event, &mut writer, &changed);
                    }
                }
                Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watching"),
            }
        }
    });
}

/// The event as it concerns what can be read: what was known and cannot be read any more has gone.
fn readable<G: Resource, K>(
    event: watcher::Event<G>,
    read: impl Fn(G) -> Option<K>,
    known: &Store<K>,
) -> Option<watcher::Event<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
    let reference = |object: &G| {
        let meta = object.meta();
        ObjectRef::new(meta.name.as_deref().unwrap_or_default()).within(meta.namespace.as_deref().unwrap_or_default())
    };
    let gone = |reference| known.get(&reference).map(|before| Delete(before.as_ref().clone()));
    match event {
        Init => Some(Init),
        InitDone => Some(InitDone),
        InitApply(object) => read(object).map(InitApply),
        Apply(object) => {
            let reference = reference(&object);
            read(object).map(Apply).or_else(|| gone(reference))
        }
        Delete(object) => gone(reference(&object)),
    }
}

fn take<K>(event: watcher::Event<K>, writer: &mut Writer<K>, changed: impl Fn(Option<&K>, &K))
where
    K: Resource<DynamicType = ()> + Clone,
{
    let before = match &event {
        watcher::Event::Apply(object) => writer.as_reader().get(&ObjectRef::from_obj(object)),
        _ => None,
    };
    // Nobody has told of those that went while the watch was away.
    let known = if matches!(event, watcher::Event::InitDone) { writer.as_reader().state() } else { Vec::new() };
    writer.apply_watcher_event(&event);
    match &event {
        // During a listing nothing is in the store yet; all that it holds is told at the end.
        watcher::Event::Init | watcher::Event::InitApply(_) => {}
        watcher::Event::InitDone => {
            let store = writer.as_reader();
            store.state().iter().for_each(|object| changed(None, object));
            let gone = known.iter().filter(|object| store.get(&ObjectRef::from_obj(object.as_ref())).is_none());
            gone.for_each(|object| changed(None, object));
        }
        watcher::Event::Apply(object) | watcher::Event::Delete(object) => {
            changed(before.as_deref(), object);
        }
    }
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

    #[tokio::test]
    async fn what_went_while_the_watch_was_away_is_told() {
        use watcher::Event::{Init, InitApply, InitDone};
        let (reader, mut writer) = store::<LoraAdapter>();
        let told = std::cell::RefCell::new(Vec::new());
        let list = [adapter("a", "a", "a"), adapter("b", "b", "b")];
        for listed in [&list[..], &list[..1]] {
            told.borrow_mut().clear();
            for event in [Init].into_iter().chain(listed.iter().cloned().map(InitApply)).chain([InitDone]) {
                take(event, &mut writer, |_, object: &LoraAdapter| told.borrow_mut().push(object.name_any()));
            }
            told.borrow_mut().sort();
            assert_eq!(*told.borrow(), ["a", "b"]);
        }
        assert_eq!(reader.state().len(), 1);
    }

    /// Else the operator would lead on with what it knew before.
    #[tokio::test]
    async fn a_watch_that_breaks_is_noticed() {
        let (_reader, writer) = store::<LoraAdapter>();
        let stream = futures::stream::iter([Ok(watcher::Event::Apply(adapter("a", "a", "a")))]);
        let mut watches = Watches::default();
        watches.0.spawn(std::future::pending());
        let stream = stream.chain(futures::stream::pending());
        keep(&mut watches, stream, writer, Some, |_, _: &LoraAdapter| panic!("as it shall"));
        tokio::time::timeout(std::time::Duration::from_secs(300), watches.ended()).await.unwrap();
    }

    /// A pool that no type here holds hides no other, and is told of; one that was known before has gone.
    #[tokio::test]
    async fn what_cannot_be_read_hides_nothing_else() {
        use watcher::Event::{Apply, Init, InitApply, InitDone};
        let pool = |name: &str, surge: i64| -> DeserializeGuard<ServingPool> {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "lorafleet.dev/v1alpha1", "kind": "ServingPool",
                "metadata": { "name": name, "namespace": "demo", "uid": name, "generation": 2 },
                "spec": { "baseModelRef": { "name": "base" }, "upgrade": { "maxSurge": surge } },
            }))
            .unwrap()
        };
        let (bells, mut queues) = bells();
        let (reader, writer) = store::<ServingPool>();
        let (told, mut changes) = unbounded_channel();
        let events = [
            Init,
            InitApply(pool("good", 1)),
            InitApply(pool("bad", 3_000_000_000)),
            InitDone,
            Apply(pool("later", 1)),
            Apply(pool("later", i64::MAX)),
        ];
        let stream = futures::stream::iter(events.map(Ok)).chain(futures::stream::pending());
        let mut watches = Watches::default();
        keep(&mut watches, stream, writer, guarded(&bells), move |_, pool: &ServingPool| {
            drop(told.send(pool.name_any()))
        });
        reader.wait_until_ready().await.unwrap();
        for name in ["good", "later", "later"] {
            assert_eq!(changes.recv().await.as_deref(), Some(name));
        }
        let names: Vec<String> = reader.state().iter().map(|pool| pool.name_any()).collect();
        assert_eq!(names, ["good"]);
        for name in ["bad", "later"] {
            let Unreadable { resource, metadata, error } = queues.unreadable.recv().await.unwrap();
            assert_eq!((resource.kind.as_str(), metadata.name.as_deref()), ("ServingPool", Some(name)));
            assert!(error.contains("integer"), "{error}");
        }
    }
}
