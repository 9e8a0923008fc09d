//! From the command line to three running controllers, and back down in order.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::runtime::controller::{Action, Config, applier};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource, ResourceExt};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::context::{ApiError, Context, Sightings};
use crate::election::Election;
use crate::job::{Jobs, Turns};
use crate::metrics::Metrics;
use crate::recheck::Rechecks;
use crate::settings::{Limits, Settings};
use crate::source::OpenDoors;
use crate::status::Refusals;
use crate::watch::{Queues, StoreLost, bells, start};
use crate::{http, intake, model, pool, unreadable};

/// Why the operator ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("connecting to the API server: {0}")]
    Client(#[source] Box<kube::Error>),
    #[error("making the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("making the client for engine pods: {0}")]
    Engines(#[from] reqwest::Error),
    #[error("serving metrics and health on {listen}: {source}")]
    Http { listen: std::net::SocketAddr, source: std::io::Error },
    #[error("reading the system's randomness: {0}")]
    Random(#[from] getrandom::Error),
    #[error(transparent)]
    Watch(#[from] StoreLost),
    #[error("another operator is the leader now")]
    NotLeader,
    #[error("a controller or a watch ended")]
    ControllerEnded,
}

/// Between two looks for what belongs to objects that are gone.
const TIDY_EVERY: Duration = Duration::from_secs(30);

/// Runs until `stop` resolves or something cannot go on. Safe to kill at any time: every step is observed anew.
pub async fn run(client: Client, settings: Settings, stop: impl Future<Output = ()>) -> Result<(), RunError> {
    let metrics = Arc::new(Metrics::new()?);
    let ready = Arc::new(AtomicBool::new(false));
    let listen = settings.listen;
    let served = tokio::spawn(http::serve(listen, metrics.clone(), ready.clone()));
    let mut stop = std::pin::pin!(stop);

    client.apiserver_version().await.map_err(|error| RunError::Client(Box::new(error)))?;
    ready.store(true, Ordering::Relaxed);
    let identity = match &settings.identity {
        Some(identity) => identity.clone(),
        None => random_identity()?,
    };
    let mut election = Election::new(client.clone(), &settings.namespace, identity.clone());
    let asked = tokio::select! {
        () = &mut stop => return Ok(()),
        asked = election.win() => asked,
    };
    tracing::info!(%identity, "leading");
    metrics.leader.set(1);

    let ended = tokio::select! {
        () = &mut stop => Ok(()),
        () = election.hold(asked) => return Err(RunError::NotLeader),
        served = served => Err(http_ended(listen, served)),
        ended = lead(client, settings, metrics, identity) => ended,
    };
    if let Err(error) = election.release().await {
        tracing::warn!(%error, "releasing the lease");
    }
    ended
}

fn http_ended(listen: std::net::SocketAddr, served: Result<std::io::Result<()>, tokio::task::JoinError>) -> RunError {
    let source = match served {
        Ok(Ok(())) => std::io::Error::other("the server ended"),
        Ok(Err(error)) => error,
        Err(error) => std::io::Error::other(error),
    };
    RunError::Http { listen, source }
}

fn random_identity() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(format!("operator-{:016x}", u64::from_le_bytes(bytes)))
}

/// What only the leader does.
async fn lead(client: Client, settings: Settings, metrics: Arc<Metrics>, identity: String) -> Result<(), RunError> {
    let limits = Limits::DEFAULT;
    let (bells, queues) = bells();
    let (stores, mut watches) = start(&client, &bells).await?;
    let reporter = Reporter { controller: "lorafleet-operator".to_owned(), instance: Some(identity) };
    let turns = Arc::new(Turns::new(settings.reads_max.into(), &limits));
    let look_turns = Arc::new(Turns::new(limits.looks_max, &limits));
    let look_every = Duration::from_secs(settings.source_check_s.into());
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        engines: pool::Engines::new(&limits, settings.reports_bytes_max)?,
        model_jobs: Jobs::new(turns.clone()),
        intake_jobs: Jobs::new(turns),
        model_rechecks: Rechecks::new(look_every, look_turns.clone()),
        adapter_rechecks: Rechecks::new(look_every, look_turns),
        open_doors: OpenDoors::default(),
        sightings: Sightings::default(),
        applied: pool::AppliedMemory::default(),
        rests: pool::Rests::default(),
        refusals: Refusals::default(),
        client,
        settings,
        limits,
        stores,
        bells,
        metrics,
    });
    let Queues { model, intake, pool, unreadable } = queues;
    let stores = &context.stores;
    tokio::select! {
        () = controller(stores.base_models.clone(), model, &context, model::reconcile) => {}
        () = controller(stores.adapters.clone(), intake, &context, intake::reconcile) => {}
        () = controller(stores.pools.clone(), pool, &context, pool::reconcile) => {}
        () = unreadable::say(context.client.clone(), unreadable) => {}
        () = tidy(&context) => {}
        () = watches.ended() => {}
    }
    Err(RunError::ControllerEnded)
}

/// Calls `reconcile` for every reference in the queue, one call per object at a time.
async fn controller<K, F>(
    store: Store<K>,
    queue: UnboundedReceiver<ObjectRef<K>>,
    context: &Arc<Context>,
    reconcile: impl Fn(Arc<K>, Arc<Context>) -> F,
) where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
    F: Future<Output = Result<Action, ApiError>> + Send + 'static,
{
    let queue =
        futures::stream::unfold(queue, |mut queue| async move { queue.recv().await.map(|object| (object, queue)) });
    let queue = queue.map(Ok::<_, std::convert::Infallible>);
    let config = Config::default().concurrency(context.limits.reconciles_max);
    let reconcile = |object: Arc<K>, context: Arc<Context>| Box::pin(reconcile(object, context));
    let passes = applier(reconcile, after_error, context.clone(), store, queue, config);
    // An object that is gone before its turn is no error worth a word.
    passes.for_each(|_| std::future::ready(())).await;
}

fn after_error<K: Resource<DynamicType = ()>>(object: Arc<K>, error: &ApiError, _: Arc<Context>) -> Action {
    let cause = error.source.as_ref();
    tracing::warn!(kind = %K::kind(&()), namespace = object.namespace(), name = object.name_any(), %error, ?cause, "reconciling");
    Action::requeue(Duration::from_secs(2))
}

fn uids<K: Resource<DynamicType = ()> + Clone + 'static>(store: &Store<K>) -> HashSet<String> {
    store.state().iter().filter_map(|object| object.uid()).collect()
}

/// Forgets what belongs to objects that are gone, and counts those that are there.
async fn tidy(context: &Context) {
    loop {
        tokio::time::sleep(TIDY_EVERY).await;
        let stores = &context.stores;
        let (bases, adapters) = (uids(&stores.base_models), uids(&stores.adapters));
        context.model_jobs.retain(|uid| bases.contains(uid));
        context.model_rechecks.retain(|uid| bases.contains(uid));
        context.intake_jobs.retain(|uid| adapters.contains(uid));
        context.adapter_rechecks.retain(|uid| adapters.contains(uid));
        context.sightings.retain(|uid| stores.pools.find(|pool| pool.uid().as_deref() == Some(uid)).is_some());
        context.applied.retain(|namespace, pool| stores.pools.get(&ObjectRef::new(pool).within(namespace)).is_some());
        context.refusals.tidy(Instant::now());
        context.count_objects();
    }
}
