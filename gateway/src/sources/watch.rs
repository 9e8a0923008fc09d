//! Watches on the API server. While it is away the stores keep what they had.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::serde::de::DeserializeOwned;
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::runtime::reflector::{Store, store};
use kube::runtime::watcher::{self, DefaultBackoff};
use kube::runtime::{WatchStreamExt as _, reflector};
use kube::{Api, Resource};
use lorafleet_crds::{LoraAdapter, ServingPool};
use tokio::sync::Notify;

use super::assemble::Objects;
use super::objects::{Base, Pool};
use super::{Sources, assemble};

/// Time between two questions whether the API server is there; a quiet watch does not tell.
const HEARTBEAT: Duration = Duration::from_secs(5);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);

/// What the API server has shown.
#[derive(Clone)]
pub struct Stores {
    // Guarded, so that one object of another version does not stop the view of all others.
    pools: Store<DeserializeGuard<Pool>>,
    bases: Store<DeserializeGuard<Base>>,
    adapters: Store<DeserializeGuard<LoraAdapter>>,
    slices: Store<EndpointSlice>,
}

/// When the API server last answered.
#[derive(Clone)]
struct LastAnswer(Arc<RwLock<Instant>>);

impl LastAnswer {
    fn now(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn age(&self) -> Duration {
        self.0.read().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

impl Stores {
    /// Returns when every kind that the gateway cannot do without has been listed once.
    pub async fn listed(&self) {
        // A store fails only if its watch has ended, which none does.
        // The bases only sharpen the choice of a pod: a gateway that may not read them works all the same.
        let _ = tokio::join!(
            self.pools.wait_until_ready(),
            self.adapters.wait_until_ready(),
            self.slices.wait_until_ready()
        );
    }

    pub fn objects(&self, sources: &Sources) -> Objects {
        Objects {
            namespace: sources.namespace.clone(),
            pool: readable(&self.pools).next(),
            bases: readable(&self.bases).collect(),
            adapters: readable(&self.adapters).collect(),
            slices: self.slices.state(),
        }
    }

    pub fn endpoints(&self) -> std::collections::BTreeMap<String, assemble::Endpoint> {
        assemble::endpoints(&self.slices.state())
    }
}

fn readable<K>(store: &Store<DeserializeGuard<K>>) -> impl Iterator<Item = K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.state().into_iter().filter_map(|object| object.0.as_ref().ok().cloned())
}

/// Starts all watches. The second value is notified after every change.
pub fn start(sources: &Sources) -> (Stores, Arc<Notify>) {
    let changed = Arc::new(Notify::new());
    let last_answer = LastAnswer(Arc::new(RwLock::new(Instant::now())));
    let namespace = sources.namespace.as_str();
    let own_pool = watcher::Config::default().fields(&format!("metadata.name={}", sources.pool));
    let engines = format!("kubernetes.io/service-name={}-engine", sources.pool);
    let pools: Api<DeserializeGuard<Pool>> = Api::namespaced(sources.client.clone(), namespace);
    let bases = Api::namespaced(sources.client.clone(), namespace);
    let adapters = Api::namespaced(sources.client.clone(), namespace);
    let slices = Api::namespaced(sources.client.clone(), namespace);
    let watch = Watch { sources, changed: &changed, last_answer: &last_answer };
    let stores = Stores {
        pools: watch.start("ServingPool", pools, own_pool),
        bases: watch.start("BaseModel", bases, watcher::Config::default()),
        adapters: watch.start("LoraAdapter", adapters, watcher::Config::default()),
        slices: watch.start("EndpointSlice", slices, watcher::Config::default().labels(&engines)),
    };
    sources.vital.spawn("heartbeat", heartbeat(sources.clone(), last_answer));
    (stores, changed)
}

struct Watch<'a> {
    sources: &'a Sources,
    changed: &'a Arc<Notify>,
    last_answer: &'a LastAnswer,
}

impl Watch<'_> {
    fn start<K>(&self, kind: &'static str, api: Api<K>, config: watcher::Config) -> Store<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    {
        let (reader, writer) = store();
        let events = watcher::watcher(api, config).backoff(DefaultBackoff::default());
        // What is not read need not be held.
        let events = events.modify(|object: &mut K| object.meta_mut().managed_fields = None);
        let events = reflector(writer, events);
        let changed = Arc::clone(self.changed);
        let last_answer = self.last_answer.clone();
        let metrics = Arc::clone(&self.sources.metrics);
        self.sources.vital.spawn(kind, async move {
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => last_answer.now(),
                    Ok(_) => {
                        last_answer.now();
                        changed.notify_one();
                    }
                    Err(error) => {
                        metrics.watch_failures.with_label_values(&[kind]).inc();
                        tracing::warn!(kind, %error, "a watch failed: the last view stays");
                    }
                }
            }
        });
        reader
    }
}

async fn heartbeat(sources: Sources, last_answer: LastAnswer) {
    let pools: Api<ServingPool> = Api::namespaced(sources.client.clone(), &sources.namespace);
    loop {
        // Any answer counts, also that the pool does not exist.
        match tokio::time::timeout(HEARTBEAT_TIMEOUT, pools.get_metadata_opt(&sources.pool)).await {
            Ok(Ok(_) | Err(kube::Error::Api(_))) => last_answer.now(),
            Ok(Err(error)) => tracing::debug!(%error, "the API server does not answer"),
            Err(_) => tracing::debug!("the API server does not answer in time"),
        }
        sources.metrics.api_stale_seconds.set(last_answer.age().as_secs_f64());
        tokio::time::sleep(HEARTBEAT).await;
    }
}
