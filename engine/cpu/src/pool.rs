//! A few threads that stay: one job at a time, its items taken in order by whoever is free.
//!
//! A step is some hundred short jobs, so workers spin a little between two of them and sleep only when no step runs.
//! A worker that the operating system has not scheduled in time misses the job; nobody waits for it.

use std::cell::UnsafeCell;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Rounds of the spin loop before a worker sleeps: some hundred microseconds, longer than the gap between two jobs.
const SPINS: u32 = 20_000;
const CLOSED: u64 = 1 << 31;
const INSIDE: u64 = CLOSED - 1;

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    items: usize,
    claim: usize,
}

struct State {
    /// Epoch in the high half; then the bit that closes the job; then the number of workers inside.
    gate: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    next: AtomicUsize,
    stop: AtomicBool,
    poisoned: AtomicBool,
}

// SAFETY: `job` is written by the owner only while the gate is closed and empty, and read by workers only inside.
unsafe impl Sync for State {}
// SAFETY: as above; the pointer in it is used only while its owner waits in `run`.
unsafe impl Send for State {}

struct Worker {
    thread: JoinHandle<()>,
    asleep: Arc<AtomicBool>,
}

pub struct Pool {
    state: Arc<State>,
    workers: Vec<Worker>,
}

impl Pool {
    /// `threads` counts the caller of [`Pool::run`], who works too.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn new(threads: NonZeroUsize) -> std::io::Result<Self> {
        let state = Arc::new(State {
            gate: AtomicU64::new(CLOSED),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
        });
        let mut pool = Self { state, workers: Vec::new() };
        for index in 1..threads.get() {
            let asleep = Arc::new(AtomicBool::new(false));
            let (state, flag) = (Arc::clone(&pool.state), Arc::clone(&asleep));
            let name = format!("compute-{index}");
            let thread = std::thread::Builder::new().name(name).spawn(move || serve(&state, &flag, index))?;
            pool.workers.push(Worker { thread, asleep });
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Whether an item of some job has panicked: results since then are worth nothing.
    pub fn poisoned(&self) -> bool {
        self.state.poisoned.load(Ordering::Acquire)
    }

    /// Calls `work(item, thread)` once for every item below `items`, `claim` neighbouring items at a time on one thread,
    /// and returns when all are done. Items must not depend on each other. Needs `&mut`: one job at a time.
    pub fn run(&mut self, items: usize, claim: usize, work: &Work<'_>) {
        let claim = claim.max(1);
        if self.workers.is_empty() || items <= claim {
            (0..items).for_each(|item| work(item, 0));
            return;
        }
        // SAFETY: only the lifetime changes; `Closing` does not let this function end while a worker is inside.
        let work: *const Work<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(work)) };
        let job = Job { work, items, claim };
        // SAFETY: the gate is closed and nobody is inside, so nobody reads.
        unsafe { *self.state.job.get() = Some(job) };
        self.state.next.store(0, Ordering::Relaxed);
        let epoch = (self.state.gate.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        self.state.gate.store(epoch << 32, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.asleep.swap(false, Ordering::SeqCst) {
                worker.thread.thread().unpark();
            }
        }
        let closing = Closing { state: &self.state };
        take_items(&self.state, job, 0);
        drop(closing);
    }
}

/// Closes the job and waits for those inside, also when the caller's own item panics.
struct Closing<'a> {
    state: &'a State,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.state.gate.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.state.gate.load(Ordering::Acquire) & INSIDE != 0 {
            spins = spins.saturating_add(1);
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

fn take_items(state: &State, job: Job, thread: usize) {
    // SAFETY: whoever is inside an open job is waited for by its owner, whose frame holds the closure.
    let work = unsafe { &*job.work };
    loop {
        let first = state.next.fetch_add(job.claim, Ordering::Relaxed);
        if first >= job.items {
            return;
        }
        (first..(first + job.claim).min(job.items)).for_each(|item| work(item, thread));
    }
}

fn serve(state: &State, asleep: &AtomicBool, thread: usize) {
    let mut seen = 0;
    while let Some(gate) = next_epoch(state, asleep, seen) {
        seen = gate >> 32;
        if enter(state, gate) {
            let inside = Inside { state };
            // SAFETY: entered, so the owner does not write.
            if let Some(job) = unsafe { *state.job.get() } {
                take_items(state, job, thread);
            }
            drop(inside);
        }
    }
}

/// Waits until the epoch is another one; `None` when the pool is dropped.
fn next_epoch(state: &State, asleep: &AtomicBool, seen: u64) -> Option<u64> {
    let mut spins = 0u32;
    loop {
        let gate = state.gate.load(Ordering::SeqCst);
        if state.stop.load(Ordering::SeqCst) {
            return None;
        }
        if gate >> 32 != seen {
            return Some(gate);
        }
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
            continue;
        }
        asleep.store(true, Ordering::SeqCst);
        // Looked at once more behind the flag: who opened before it was set did not wake us.
        let unchanged = state.gate.load(Ordering::SeqCst) >> 32 == seen && !state.stop.load(Ordering::SeqCst);
        if unchanged {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
        spins = 0;
    }
}

fn enter(state: &State, mut gate: u64) -> bool {
    let epoch = gate >> 32;
    loop {
        if gate & CLOSED != 0 || gate >> 32 != epoch {
            return false;
        }
        match state.gate.compare_exchange_weak(gate, gate + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(now) => gate = now,
        }
    }
}

/// Leaves the job on every path, a panic included.
struct Inside<'a> {
    state: &'a State,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.state.poisoned.store(true, Ordering::Release);
        }
        self.state.gate.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread.thread().unpark();
            if worker.thread.join().is_err() {
                tracing::error!("a compute thread had panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_and_before_run_returns() {
        let mut pool = Pool::new(NonZeroUsize::new(4).unwrap()).unwrap();
        for round in 0..2000usize {
            let items = round % 37;
            let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.run(items, 1 + round % 3, &|item, thread| {
                assert!(thread < 4);
                counts[item].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "round {round}");
        }
    }

    #[test]
    fn sleeping_workers_wake_for_the_next_job() {
        let mut pool = Pool::new(NonZeroUsize::new(2).unwrap()).unwrap();
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let threads: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
            // Neither thread can do both.
            pool.run(2, 1, &|_, thread| {
                threads[thread].fetch_add(1, Ordering::Relaxed);
                while threads[1 - thread].load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
            });
            assert!(threads.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads:?}");
        }
    }

    #[test]
    fn a_worker_that_panics_poisons_the_pool_and_hangs_nobody() {
        let mut pool = Pool::new(NonZeroUsize::new(2).unwrap()).unwrap();
        pool.run(100, 1, &|_, _| {});
        assert!(!pool.poisoned());
        let panics = AtomicBool::new(false);
        // The caller takes no second item before the worker has taken one.
        pool.run(2, 1, &|_, thread| {
            if thread == 1 {
                panics.store(true, Ordering::Relaxed);
                panic!("broken on purpose");
            }
            while !panics.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        });
        assert!(pool.poisoned());
        let done = AtomicUsize::new(0);
        pool.run(10, 1, &|_, _| _ = done.fetch_add(1, Ordering::Relaxed));
        assert_eq!(done.load(Ordering::Relaxed), 10);
    }
}
