//! An engine in this process that computes its steps only as they are allowed to it: whatever is to happen while an answer
//! is being made does happen then, however slow or fast this machine is.

use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use lorafleet_backend::batch::{Batch, PageBudget, Sampled};
use lorafleet_backend::{Backend, BackendError, Ticket};
use lorafleet_engine::base;
use lorafleet_engine::config::Flags;
use lorafleet_engine::http::Keys;
use lorafleet_engine::limits::Limits;
use lorafleet_engine::serve::serve_base;
use lorafleet_listen::{End, Told};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::server::{ADMIN_KEY, Client, TIME_MAX, path};

/// Steps that may be computed.
pub struct Gate {
    state: Mutex<Allowed>,
    changed: Condvar,
}

struct Allowed {
    steps: u64,
    /// The engine stands before a step that it may not compute.
    stands: bool,
}

impl Gate {
    fn set(&self, change: impl FnOnce(u64) -> u64) {
        let mut state = self.state.lock().unwrap();
        state.steps = change(state.steps);
        self.changed.notify_all();
    }

    /// None from now on.
    pub fn hold(&self) {
        self.set(|_| 0);
    }

    /// As many as it likes.
    pub fn open(&self) {
        self.set(|_| u64::MAX);
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        while state.steps == 0 {
            state.stands = true;
            state = self.changed.wait(state).unwrap();
        }
        state.stands = false;
        state.steps -= 1;
    }
}

struct Gated(Box<dyn Backend>, Arc<Gate>);

impl Backend for Gated {
    fn page_budget(&self) -> PageBudget {
        self.0.page_budget()
    }

    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        self.1.pass();
        self.0.submit(batch)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError> {
        self.0.wait(ticket)
    }
}

/// Its gate is open at first.
pub struct Held {
    asks: Client,
    pub gate: Arc<Gate>,
    pub folder: tempfile::TempDir,
    process: JoinHandle<anyhow::Result<End>>,
}

impl Deref for Held {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.asks
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.open();
        self.process.abort();
    }
}

impl Held {
    pub async fn start(limit: impl FnOnce(&mut Limits)) -> Self {
        Self::start_model(tempfile::tempdir().unwrap(), Path::new(&path("base")), limit).await
    }

    pub async fn start_model(folder: tempfile::TempDir, model: &Path, limit: impl FnOnce(&mut Limits)) -> Self {
        let key = folder.path().join("admin-key");
        std::fs::write(&key, ADMIN_KEY).unwrap();
        let flags = Flags {
            model: Some(model.to_str().unwrap().to_owned()),
            served_model_name: Some("base".to_owned()),
            allowed_source: vec![path(""), folder.path().to_str().unwrap().to_owned()],
            page_budget: Some(128 << 20),
            threads: std::num::NonZeroUsize::new(1),
            ..Flags::default()
        };
        let mut config = flags.resolve(1 << 30).unwrap();
        limit(&mut config.limits);
        let gate =
            Arc::new(Gate { state: Mutex::new(Allowed { steps: u64::MAX, stands: false }), changed: Condvar::new() });
        let mut base = base::load(&config).await.unwrap();
        base.backend = Box::new(Gated(base.backend, gate.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (keys, told) = (Keys::open(Some(key), None).unwrap(), Told::new().unwrap());
        let process = tokio::spawn(serve_base(config, keys, listener, base, told));
        let held = Self { asks: Client::new(url, None), gate, folder, process };
        held.wait_ready().await;
        held
    }

    /// Allows one step after another until `what` has come: with longer and longer pauses, so that a slow machine does not
    /// get far meanwhile.
    pub async fn stepping<T>(&self, what: impl Future<Output = T>) -> T {
        tokio::pin!(what);
        let mut pause = Duration::from_millis(20);
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < TIME_MAX, "it never comes");
            tokio::select! {
                came = &mut what => return came,
                () = tokio::time::sleep(pause) => self.gate.set(|steps| steps + 1),
            }
            pause = pause.mul_f64(1.3);
        }
    }

    /// No step from now on, and none under way.
    pub async fn stop(&self) {
        self.gate.hold();
        self.until("standing", async || self.gate.state.lock().unwrap().stands).await;
    }

    pub async fn load_case(&self, name: &str, case: &str) -> Value {
        let (status, reply) = self.load(name, &path(case)).await;
        assert_eq!(status, 200, "{reply}");
        reply
    }

    pub async fn tier(&self, name: &str) -> Value {
        let report = self.report().await;
        let rows = report["adapters"].as_array().unwrap();
        rows.iter().find(|row| row["name"] == name).map_or(json!(null), |row| row["tier"].clone())
    }

    /// Tokens drawn so far.
    pub async fn drawn(&self) -> f64 {
        self.counted("lorafleet_tokens_total{kind=\"output\"} ").await
    }
}
