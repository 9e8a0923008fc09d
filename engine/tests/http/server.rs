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

pub struct Server {
    pub url: String,
    pub client: reqwest::Client,
    pub folder: tempfile::TempDir,
    pub process: Child,
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
        let begun = Instant::now();
        while server.client.get(server.url.clone() + "/healthz").send().await.is_err() {
            assert!(server.process.try_wait().unwrap().is_none(), "the engine ended: {}", server.log());
            assert!(begun.elapsed() < Duration::from_secs(30), "the engine does not listen: {}", server.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        server
    }

    /// Starts the process and does not wait for anything.
    pub fn spawn(folder: tempfile::TempDir, model: &str, name: &str, flags: &[&str]) -> Self {
        let key = folder.path().join("admin-key");
        std::fs::write(&key, ADMIN_KEY).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_lorafleet-engine"))
            .arg("serve")
            .args(["--model", model, "--served-model-name", name])
            .args(["--listen", &format!("127.0.0.1:{port}"), "--threads", "1"])
            .args(["--admin-key-file", key.to_str().unwrap()])
            .args(["--allowed-source", &path("")])
            .args(["--allowed-source", folder.path().to_str().unwrap()])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
        Self { url: format!("http://127.0.0.1:{port}"), client, folder, process }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub async fn wait_ready(&self) {
        self.until("ready", async || self.get("/readyz").await.0 == 200).await;
    }

    /// Waits until something holds; panics after 20 s.
    pub async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < Duration::from_secs(20), "never {what}: {}", self.log());
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
