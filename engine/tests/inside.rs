//! What nobody can bring about from outside: a backend that hangs, panics or fails, and limits that are small.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
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
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Longest wait for what must come: far more than it takes where everything is ten times slower.
const TIME_MAX: Duration = Duration::from_secs(120);

enum Fault {
    Panic,
    Fail,
    Lose,
    /// Until the other end says so, or is gone.
    Hang(Receiver<()>),
    /// After so many steps, no logit of any sequence is a number.
    NotFinite(u32),
}

/// The CPU backend, with one fault.
struct Faulty {
    backend: Box<dyn Backend>,
    fault: Option<Fault>,
}

impl Backend for Faulty {
    fn page_budget(&self) -> PageBudget {
        self.backend.page_budget()
    }

    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        match self.fault.take() {
            Some(Fault::Panic) => panic!("broken on purpose"),
            Some(Fault::Fail) => return Err(BackendError::Failed("broken on purpose".into())),
            Some(Fault::Lose) => return Err(BackendError::Lost("broken on purpose".into())),
            Some(Fault::Hang(until)) => drop(until.recv()),
            Some(Fault::NotFinite(steps)) => self.fault = Some(Fault::NotFinite(steps)),
            None => {}
        }
        self.backend.submit(batch)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError> {
        let mut sampled = self.backend.wait(ticket)?;
        match self.fault.take() {
            Some(Fault::NotFinite(0)) => {
                sampled.not_finite = sampled.rows.drain(..).map(|row| row.sequence).collect();
            }
            Some(Fault::NotFinite(steps)) => self.fault = Some(Fault::NotFinite(steps - 1)),
            other => self.fault = other,
        }
        Ok(sampled)
    }
}

struct Engine {
    url: String,
    client: reqwest::Client,
    process: JoinHandle<anyhow::Result<End>>,
}

impl Engine {
    async fn start(fault: Option<Fault>, limit: impl FnOnce(&mut Limits)) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/artifact/tests/cases/base");
        let flags = Flags { model: Some(model.to_str().unwrap().to_owned()), ..Flags::default() };
        let mut config = flags.resolve(1 << 30).unwrap();
        limit(&mut config.limits);
        let mut base = base::load(&config).await.unwrap();
        base.backend = Box::new(Faulty { backend: base.backend, fault });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (keys, told) = (Keys::open(None, None).unwrap(), Told::new().unwrap());
        let process = tokio::spawn(serve_base(config, keys, listener, base, told));
        Self { url, client: reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap(), process }
    }

    async fn complete(&self) -> (u16, Value) {
        let ask = json!({ "model": "base", "prompt": [1, 2], "max_tokens": 2, "temperature": 0 });
        let reply = self.client.post(self.url.clone() + "/v1/completions").json(&ask).send().await.unwrap();
        (reply.status().as_u16(), reply.json().await.unwrap())
    }

    async fn health(&self) -> (u16, Value) {
        let reply = self.client.get(self.url.clone() + "/healthz").send().await.unwrap();
        (reply.status().as_u16(), reply.json().await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_process_ends_with_an_error_when_the_step_thread_ends_or_its_backend_is_lost() {
    for (fault, status, code) in [(Fault::Panic, 503, "EngineStopped"), (Fault::Lose, 500, "BackendFailed")] {
        let engine = Engine::start(Some(fault), |_| {}).await;
        assert_eq!(engine.health().await.0, 200);
        let (found, reply) = engine.complete().await;
        assert_eq!((found, reply["error"]["code"].as_str()), (status, Some(code)), "{reply}");
        let ended = tokio::time::timeout(TIME_MAX, engine.process).await.expect("it goes on").unwrap();
        assert_eq!(ended.unwrap_err().to_string(), "the step thread has ended");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_step_shows_in_its_health_and_its_end_too() {
    let (resume, until): (Sender<()>, _) = channel();
    let engine =
        Engine::start(Some(Fault::Hang(until)), |limits| limits.silence_max = Duration::from_millis(300)).await;
    let begun = Instant::now();
    // An idle engine is healthy, however long it idles.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(engine.health().await.0, 200);
    let check = async {
        while engine.health().await.0 == 200 {
            assert!(begun.elapsed() < TIME_MAX, "it stays healthy");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (status, reply) = engine.health().await;
        assert_eq!((status, reply["error"]["code"].as_str()), (503, Some("StepsHang")), "{reply}");
        drop(resume);
    };
    let (answer, ()) = tokio::join!(engine.complete(), check);
    assert_eq!(answer.0, 200, "{}", answer.1);
    while engine.health().await.0 != 200 {
        assert!(begun.elapsed() < TIME_MAX, "it stays hung");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    engine.process.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_fails_ends_its_requests_and_nothing_else() {
    let engine = Engine::start(Some(Fault::Fail), |_| {}).await;
    let (status, reply) = engine.complete().await;
    assert_eq!((status, reply["error"]["code"].as_str()), (500, Some("BackendFailed")), "{reply}");
    assert_eq!(engine.complete().await.0, 200);
    assert_eq!(engine.health().await.0, 200);
    engine.process.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_whose_numbers_overflow_ends_with_an_error_and_nothing_else_does() {
    let engine = Engine::start(Some(Fault::NotFinite(1)), |_| {}).await;
    let (status, reply) = engine.complete().await;
    assert_eq!((status, reply["error"]["code"].as_str()), (500, Some("NotFinite")), "{reply}");
    let expected =
        "after 3 tokens the scores of the next one are not all finite numbers: the values of the base overflow";
    assert_eq!(reply["error"]["message"].as_str(), Some(expected));
    // Whoever has been told finds it so.
    let metrics = engine.client.get(engine.url.clone() + "/metrics").send().await.unwrap().text().await.unwrap();
    let running = metrics.lines().find(|line| line.starts_with("vllm:num_requests_running")).unwrap();
    assert!(running.ends_with(" 0"), "{running}");
    assert_eq!(engine.complete().await.0, 200);
    engine.process.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_have_a_limit_together() {
    let engine = Engine::start(None, |limits| (limits.bodies_bytes, limits.max_body_bytes) = (4096, 20_000)).await;
    let address = engine.url.strip_prefix("http://").unwrap();
    let large = json!({ "model": "base", "prompt": [1, 2], "max_tokens": 2, "user": "x".repeat(10_000) });
    let ask = async || {
        let reply = engine.client.post(engine.url.clone() + "/v1/completions").json(&large).send().await.unwrap();
        let status = reply.status().as_u16();
        (status, reply.json::<Value>().await.unwrap()["error"]["code"].clone())
    };
    let (begun, mut pause) = (Instant::now(), Duration::from_millis(100));
    let slow = loop {
        // Announces much, sends little and waits: it holds only what it has sent.
        let mut slow = TcpStream::connect(address).await.unwrap();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 12100\r\n\r\n";
        slow.write_all(head.as_bytes()).await.unwrap();
        slow.write_all(b"{").await.unwrap();
        assert_eq!(engine.complete().await.0, 200);
        // Now it has sent nearly all: more than is free for each.
        slow.write_all(&[b' '; 12_000]).await.unwrap();
        // Until that has come; else it may be the slow one that finds no room, and the next one waits longer.
        tokio::time::sleep(pause).await;
        if ask().await == (429, json!("Busy")) {
            break slow;
        }
        assert!(begun.elapsed() < TIME_MAX, "it never was too much");
        pause *= 2;
    };
    // Small ones go on.
    assert_eq!(engine.complete().await.0, 200);
    drop(slow);
    let begun = Instant::now();
    while ask().await.0 != 200 {
        assert!(begun.elapsed() < TIME_MAX, "the room does not come back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    engine.process.abort();
}
