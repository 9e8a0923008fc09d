//! Loads of the same thing at the same time are one load.

use std::collections::HashMap;
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared, WeakShared};

use crate::refusal::Refusal;

/// What is on its way, by what was asked for. A load goes on as long as somebody waits for it.
pub struct Flights<K, T: Clone> {
    last: Mutex<HashMap<K, Flight<T>>>,
}

/// The last that was asked for under its key.
struct Flight<T: Clone> {
    load: WeakShared<BoxFuture<'static, T>>,
    begun: Arc<AtomicBool>,
}

impl<K, T: Clone> Default for Flights<K, T> {
    fn default() -> Self {
        Self { last: Mutex::default() }
    }
}

impl<K: Eq + Hash, T: Clone + Send + Sync + 'static> Flights<K, T> {
    /// The answer to `key`. Where it is `lasting`, whatever is on its way gives it. Where it may be another one by now, what
    /// has begun may have seen the old one: one more begins when that has ended, and all who come meanwhile share it.
    pub fn join(
        &self,
        key: K,
        lasting: bool,
        load: impl Future<Output = T> + Send + 'static,
    ) -> Shared<BoxFuture<'static, T>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|_, flight| flight.load.upgrade().is_some_and(|load| load.peek().is_none()));
        let before = last.get(&key).and_then(|flight| Some((flight.load.upgrade()?, flight.begun.clone())));
        let before = match before {
            Some((load, begun)) if lasting || !begun.load(Ordering::Acquire) => return load,
            other => other.map(|(load, _)| load),
        };
        let begun = Arc::new(AtomicBool::new(false));
        let flag = begun.clone();
        let next = async move {
            if let Some(before) = before {
                before.await;
            }
            flag.store(true, Ordering::Release);
            load.await
        };
        let shared = next.boxed().shared();
        if let Some(load) = shared.downgrade() {
            last.insert(key, Flight { load, begun });
        }
        shared
    }
}

/// A load, as one that fails where it panics: all who wait for it must hear something, and those who come later as well.
///
/// # Errors
/// The load's own; 500 after a panic, of which the log says where.
pub async fn unbroken<T>(load: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
    // What it leaves behind is seen by nobody else: it owns what it works on, and locks are used as they are found.
    let panicked = |_| Err(Refusal::new(500, "Internal", "the load of the adapter has panicked; the log says where"));
    AssertUnwindSafe(load).catch_unwind().await.unwrap_or_else(panicked)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::Semaphore;

    use super::*;

    struct World {
        flights: Flights<&'static str, usize>,
        begun: Arc<AtomicUsize>,
        ended: Arc<AtomicUsize>,
        gate: Arc<Semaphore>,
    }

    impl World {
        fn new() -> Self {
            let (begun, ended) = (Arc::default(), Arc::default());
            Self { flights: Flights::default(), begun, ended, gate: Arc::new(Semaphore::new(0)) }
        }

        /// Asks, and waits until the load has begun as far as it can.
        async fn ask(&self, key: &'static str, lasting: bool) -> tokio::task::JoinHandle<usize> {
            let (begun, ended, gate) = (self.begun.clone(), self.ended.clone(), self.gate.clone());
            let load = self.flights.join(key, lasting, async move {
                let number = begun.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                ended.fetch_add(1, Ordering::SeqCst);
                number
            });
            let task = tokio::spawn(load);
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
            task
        }

        async fn check(self, tasks: Vec<tokio::task::JoinHandle<usize>>, answers: &[usize], loads: usize) {
            self.gate.add_permits(1000);
            let mut given = Vec::new();
            for task in tasks {
                given.push(task.await.unwrap());
            }
            assert_eq!((given.as_slice(), self.begun.load(Ordering::SeqCst)), (answers, loads));
            assert_eq!(self.ended.load(Ordering::SeqCst), loads);
        }
    }

    #[tokio::test]
    async fn what_cannot_change_is_loaded_once_for_all_who_ask_meanwhile() {
        let world = World::new();
        let mut tasks = Vec::new();
        for _ in 0..20 {
            tasks.push(world.ask("a", true).await);
        }
        tasks.push(world.ask("b", true).await);
        world.check(tasks, &[vec![0; 20], vec![1]].concat(), 2).await;
    }

    #[tokio::test]
    async fn what_may_have_changed_is_loaded_once_more_for_all_who_came_later() {
        let world = World::new();
        let mut tasks = Vec::new();
        for _ in 0..20 {
            tasks.push(world.ask("a", false).await);
        }
        world.check(tasks, &[vec![0], vec![1; 19]].concat(), 2).await;
    }

    #[tokio::test]
    async fn a_load_that_panics_is_a_failure_for_all_who_wait_and_not_for_the_next() {
        let flights = Flights::<_, Result<u8, Refusal>>::default();
        let broken = async {
            tokio::task::yield_now().await;
            panic!("broken on purpose")
        };
        let first = flights.join("a", true, unbroken(broken));
        let second = flights.join("a", true, unbroken(async { Ok(1) }));
        for answer in [first.await, second.await] {
            assert_eq!(answer.unwrap_err().status, 500);
        }
        assert_eq!(flights.join("a", true, unbroken(async { Ok(2) })).await, Ok(2));
    }

    #[tokio::test]
    async fn what_has_ended_is_not_an_answer_and_who_leaves_takes_nobody_along() {
        let world = World::new();
        let first = world.ask("a", true).await;
        let second = world.ask("a", true).await;
        first.abort();
        assert!(first.await.is_err());
        world.gate.add_permits(1);
        assert_eq!(second.await.unwrap(), 0);
        let third = world.ask("a", true).await;
        // Nobody waits any more: it does not go on by itself.
        let fourth = world.ask("b", true).await;
        fourth.abort();
        assert!(fourth.await.is_err());
        world.gate.add_permits(1000);
        assert_eq!(third.await.unwrap(), 1);
        assert_eq!((world.begun.load(Ordering::SeqCst), world.ended.load(Ordering::SeqCst)), (3, 2));
    }
}
