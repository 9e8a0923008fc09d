//! Starts the binary on a free port and asks it questions.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub const ADMIN_KEY: &str = "the-admin-key";

pub fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/artifact/tests/cases").canonicalize().unwrap()
}

pub fn case(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(cases().join(name).join("case.json")).unwrap()).unwrap()
}

/// Path of a case's adapter, as a client gives it.
pub fn path(name: &str) -> String {
    cases().join(name).to_str().unwrap().to_owned()
}

pub fn answers(base: &str) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(cases().join(base).join("answers.json")).unwrap()).unwrap()
}

/// A copy of a case's adapter with another digest: PEFT does not read `revision`.
pub fn variant(name: &str, folder: &Path, number: usize) -> PathBuf {
    let copy = folder.join(format!("{name}-{number}"));
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(cases().join(name).join("adapter_model.safetensors"), copy.join("adapter_model.safetensors"))
        .unwrap();
    let config = std::fs::read(cases().join(name).join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["revision"] = json!(number.to_string());
    std::fs::write(copy.join("adapter_config.json"), config.to_string()).unwrap();
    copy
}

pub fn digest_of(folder: &Path) -> String {
    use sha2::{Digest, Sha256};
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    let hash = |name: &str| -> [u8; 32] { Sha256::digest(std::fs::read(folder.join(name)).unwrap()).into() };
    lorafleet_artifact::digest_of_files(&files.map(|name| (name.to_owned(), hash(name))).into()).to_string()
}

/// Longest wait for what must come: far more than it takes where everything is ten times slower.
pub const TIME_MAX: Duration = Duration::from_secs(120);

/// Somebody who asks an engine.
pub struct Client {
    pub url: String,
    pub client: reqwest::Client,
    /// The engine's log, where it has one of its own.
    log: Option<PathBuf>,
}

/// The binary, and who asks it.
pub struct Server {
    asks: Client,
    pub folder: tempfile::TempDir,
    pub process: Child,
}

impl std::ops::Deref for Server {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.asks
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// With the case models; `flags` come last.
    pub async fn start(base: &str, flags: &[&str]) -> Self {
        let server = Self::start_unready(base, flags).await;
        server.wait_ready().await;
        server
    }

    pub async fn start_unready(base: &str, flags: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), base, flags).await
    }

    pub async fn start_in(folder: tempfile::TempDir, base: &str, flags: &[&str]) -> Self {
        Self::start_model(folder, &path(base), base, flags).await
    }

    pub async fn start_model(folder: tempfile::TempDir, model: &str, name: &str, flags: &[&str]) -> Self {
        let mut server = Self::spawn(folder, model, name, flags);
        server.listens().await;
        let healthy = async || server.client.get(server.url.clone() + "/healthz").send().await.is_ok();
        server.until("answering", healthy).await;
        server
    }

    /// Starts the process and does not wait for anything.
    pub fn spawn(folder: tempfile::TempDir, model: &str, name: &str, flags: &[&str]) -> Self {
        let key = folder.path().join("admin-key");
        std::fs::write(&key, ADMIN_KEY).unwrap();
        let log = folder.path().join("log");
        let process = Command::new(env!("CARGO_BIN_EXE_lorafleet-engine"))
            .arg("serve")
            .args(["--model", model, "--served-model-name", name])
            // A port that the system chooses; one that was found free could be another's by the time it is used.
            .args(["--listen", "127.0.0.1:0", "--threads", "1"])
            .args(["--admin-key-file", key.to_str().unwrap()])
            .args(["--allowed-source", &path("")])
            .args(["--allowed-source", folder.path().to_str().unwrap()])
            .args(flags)
            // Its address is read from its log.
            .env("LORAFLEET_LOG", "info")
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { asks: Client::new(String::new(), Some(log)), folder, process }
    }

    /// Waits until the process says where it listens.
    pub async fn listens(&mut self) {
        let begun = Instant::now();
        let said = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            let listens = line["fields"]["message"] == "listening";
            listens.then(|| format!("http://{}", line["fields"]["listen"].as_str().unwrap()))
        };
        loop {
            if let Some(url) = self.log().lines().find_map(said) {
                self.asks.url = url;
                return;
            }
            assert!(self.process.try_wait().unwrap().is_none(), "the engine ended: {}", self.log());
            assert!(begun.elapsed() < TIME_MAX, "the engine does not listen: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Client {
    pub fn new(url: String, log: Option<PathBuf>) -> Self {
        Self { url, client: reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap(), log }
    }

    pub fn log(&self) -> String {
        self.log.as_ref().map(|log| std::fs::read_to_string(log).unwrap_or_default()).unwrap_or_default()
    }

    pub async fn wait_ready(&self) {
        self.until("ready", async || self.get("/readyz").await.0 == 200).await;
    }

    /// Waits until something holds.
    pub async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIME_MAX, "never {what}: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn get(&self, route: &str) -> (u16, Value) {
        read(self.client.get(self.url.clone() + route).bearer_auth(ADMIN_KEY).send().await.unwrap()).await
    }

    pub async fn post(&self, route: &str, body: &Value) -> (u16, Value) {
        read(self.client.post(self.url.clone() + route).bearer_auth(ADMIN_KEY).json(body).send().await.unwrap()).await
    }

    pub async fn put(&self, route: &str, body: &Value) -> (u16, Value) {
        read(self.client.put(self.url.clone() + route).bearer_auth(ADMIN_KEY).json(body).send().await.unwrap()).await
    }

    pub async fn load(&self, name: &str, path: &str) -> (u16, Value) {
        self.post("/v1/load_lora_adapter", &json!({ "lora_name": name, "lora_path": path })).await
    }

    pub async fn unload(&self, name: &str) -> (u16, Value) {
        self.post("/v1/unload_lora_adapter", &json!({ "lora_name": name })).await
    }

    /// Greedy, with the tokens' ids and log-probabilities.
    pub async fn complete(&self, model: &str, prompt: &Value, tokens: usize) -> (u16, Value) {
        self.post("/v1/completions", &ask(model, prompt, tokens)).await
    }

    pub async fn report(&self) -> Value {
        let (status, report) = self.get("/v1/lora_adapters").await;
        assert_eq!(status, 200, "{report}");
        report
    }

    /// The value of a series without labels, or with the labels given.
    pub async fn counted(&self, series: &str) -> f64 {
        let (status, page) = self.get("/metrics").await;
        assert_eq!(status, 200, "{page}");
        let value = page.as_str().unwrap().lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
        value.unwrap_or(0.0)
    }

    /// A row of a case: right tokens, and log-probabilities within PEFT's tolerance.
    pub async fn check_row(&self, model: &str, row: &Value) {
        let tokens = row["tokens"].as_array().unwrap();
        let (status, reply) = self.complete(model, &row["prompt"], tokens.len()).await;
        assert_eq!(status, 200, "{model}: {reply}");
        let choice = &reply["choices"][0];
        assert_eq!(choice["token_ids"], row["tokens"], "{model} at {}: margin {}", row["prompt"], row["margin"]);
        let found = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        for (found, expected) in found.iter().zip(row["logprobs"].as_array().unwrap()) {
            let off = (found.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
            assert!(off <= 2e-3, "{model}: log-probability {found}, PEFT has {expected}");
        }
    }

    /// Opens a stream of many tokens and reads its first piece.
    pub async fn stream(&self, model: &str, prompt: &Value, tokens: usize) -> reqwest::Response {
        let mut body = ask(model, prompt, tokens);
        body["stream"] = json!(true);
        let request = self.client.post(self.url.clone() + "/v1/completions").bearer_auth(ADMIN_KEY).json(&body);
        let mut response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(response.chunk().await.unwrap().is_some());
        response
    }
}

pub fn ask(model: &str, prompt: &Value, tokens: usize) -> Value {
    json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
        "return_token_ids": true, "ignore_eos": true,
    })
}

pub async fn read(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// OpenAI's error shape with this code.
pub fn assert_error(reply: (u16, Value), status: u16, code: &str) {
    let error = &reply.1["error"];
    assert_eq!((reply.0, error["code"].as_str()), (status, Some(code)), "{}", reply.1);
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    assert!(error["type"].is_string() && error.get("param").is_some(), "{error}");
}

/// The data of all server-sent events.
pub fn events(text: &str) -> Vec<String> {
    text.split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
}
