//! Requests in progress: how many there may be, and how many each pod and model has.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Code, Refusal};
use crate::limits::Limits;

/// Shared counters; every guard gives back what it took when it is dropped.
pub struct InFlight {
    places: Arc<Semaphore>,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    queued: u32,
    pods: BTreeMap<String, u32>,
    models: BTreeMap<String, u32>,
    clients: BTreeMap<String, u32>,
}

/// What a count belongs to.
#[derive(Clone, Copy, Debug)]
enum Key {
    Pod,
    Model,
    Client,
}

impl Counts {
    fn of(&mut self, key: Key) -> &mut BTreeMap<String, u32> {
        match key {
            Key::Pod => &mut self.pods,
            Key::Model => &mut self.models,
            Key::Client => &mut self.clients,
        }
    }
}

/// One request in progress on a pod or for a model.
pub struct Counted {
    in_flight: Arc<InFlight>,
    key: Key,
    name: String,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.in_flight.lock();
        let counts = counts.of(self.key);
        if let Some(count) = counts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.name);
            }
        }
    }
}

impl InFlight {
    pub fn new(limits: &Limits) -> Arc<Self> {
        let places = Arc::new(Semaphore::new(limits.max_concurrent as usize));
        Arc::new(Self { places, counts: Mutex::default() })
    }

    /// A place among the requests in progress, first come first served.
    pub async fn place(&self, limits: &Limits) -> Result<OwnedSemaphorePermit, Refusal> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        let _queued = Queued::enter(self, limits)?;
        match tokio::time::timeout(limits.queue_timeout_seconds, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            Ok(Err(_)) => Err(Refusal::new(Code::Internal, "the places of requests are closed")),
            Err(_) => Err(Refusal::new(
                Code::Busy,
                format!(
                    "{} requests are in progress, and none ended within {:.1} seconds",
                    limits.max_concurrent,
                    limits.queue_timeout_seconds.as_secs_f64()
                ),
            )),
        }
    }

    /// Counts a request for a model, if it may have one more.
    pub fn model(self: &Arc<Self>, model: &str, limits: &Limits) -> Result<Counted, Refusal> {
        let max = limits.max_concurrent_per_model;
        self.count(Key::Model, model, max).ok_or_else(|| {
            Refusal::new(Code::Busy, format!("'{model}' has {max} requests in progress, which is the limit per model"))
        })
    }

    /// Counts a request of a client that has a key, from before its body is read.
    pub fn client(self: &Arc<Self>, client: &str, limits: &Limits) -> Result<Counted, Refusal> {
        let max = limits.max_concurrent_per_client;
        self.count(Key::Client, client, max).ok_or_else(|| {
            let message =
                format!("the client '{client}' has {max} requests in progress, which is the limit per client");
            Refusal::new(Code::Busy, message)
        })
    }

    /// Counts a request on a pod.
    pub fn pod(self: &Arc<Self>, pod: &str) -> Option<Counted> {
        self.count(Key::Pod, pod, u32::MAX)
    }

    fn count(self: &Arc<Self>, key: Key, name: &str, max: u32) -> Option<Counted> {
        let mut counts = self.lock();
        let count = counts.of(key).entry(name.to_owned()).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(Counted { in_flight: Arc::clone(self), key, name: name.to_owned() })
    }

    pub fn by_pod(&self) -> BTreeMap<String, u32> {
        self.lock().pods.clone()
    }

    pub fn by_model(&self) -> BTreeMap<String, u32> {
        self.lock().models.clone()
    }

    pub fn on_pod(&self, pod: &str) -> u32 {
        self.lock().pods.get(pod).copied().unwrap_or(0)
    }

    /// Requests that wait for a place.
    pub fn queued(&self) -> u32 {
        self.lock().queued
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        // Counting cannot fail half way, so a poisoned lock still guards whole counts.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request in the queue.
struct Queued<'a> {
    in_flight: &'a InFlight,
}

impl<'a> Queued<'a> {
    fn enter(in_flight: &'a InFlight, limits: &Limits) -> Result<Self, Refusal> {
        let mut counts = in_flight.lock();
        if counts.queued >= limits.max_queue {
            return Err(Refusal::new(
                Code::Busy,
                format!(
                    "{} requests are in progress and {} wait, which is the limit",
                    limits.max_concurrent, counts.queued
                ),
            ));
        }
        counts.queued += 1;
        Ok(Self { in_flight })
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.in_flight.lock().queued -= 1;
    }
}
