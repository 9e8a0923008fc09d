//! The engine by itself, beside a real S3 server on the same machine: start, first tokens, memory.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::process::{Server, free_port};
use super::{Figure, adapter};
use crate::chat::Client;
use crate::forward::Route;
use crate::images;
use crate::progress::step;
use crate::s3::{ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY};

const STARTS: usize = 5;
/// Adapters that the engine holds in the end, each asked for once while it lies in the store alone.
const ADAPTERS: u64 = 20;
const TOKENS_MAX: u32 = 8;
const PROMPT: &str = "My invoice shows a charge that I did not make. Please help.";
const ADMIN_KEY: &str = "measure";
const DISK_CACHE_BYTES: u64 = 1 << 30;
/// Between two requests, so that none meets the end of the one before.
const PAUSE: Duration = Duration::from_millis(100);

const MIB: &str = "MiB";
const MS: &str = "ms";

/// Starts engines and asks them.
///
/// # Errors
/// When the store or an engine does not start, or an answer is not as it must be.
pub fn figures(folder: &Path, model: &Path, s3s_fs: &Path) -> Result<Vec<Figure>> {
    let bench = Bench::new(folder, model, s3s_fs)?;
    let mut figures = Vec::new();
    let file = step("engine starts with the model's file", || bench.starts(false))?;
    figures.push(Figure::new("engine, start to ready, the model in a local file", "s", Some(3.0), file));
    let stored = step("engine starts with the model in the store", || bench.starts(true))?;
    figures.push(Figure::new("the same, the model of 98 MB fetched from S3 first", "s", None, stored));
    figures.extend(step("first tokens of fresh adapters", || bench.adapters())?);
    Ok(figures)
}

struct Bench<'a> {
    folder: &'a Path,
    model: &'a Path,
    /// Folder of the store: buckets are its folders.
    root: PathBuf,
    store: Server,
}

impl<'a> Bench<'a> {
    fn new(folder: &'a Path, model: &'a Path, s3s_fs: &Path) -> Result<Self> {
        let root = folder.join("store");
        let stored = root.join("models/smollm2").join(model.file_name().unwrap_or_default());
        fs::create_dir_all(stored.parent().unwrap_or(&root)).with_context(|| format!("make {}", root.display()))?;
        fs::create_dir_all(root.join("adapters"))?;
        fs::copy(model, &stored).with_context(|| format!("copy the model to {}", stored.display()))?;
        let port = free_port()?;
        let port_text = port.to_string();
        let flags = [
            "--host",
            "127.0.0.1",
            "--access-key",
            ACCESS_KEY_ID,
            "--secret-key",
            SECRET_ACCESS_KEY,
            "--port",
            &port_text,
        ];
        let words = [s3s_fs.as_os_str()].into_iter().chain(flags.map(std::ffi::OsStr::new)).chain([root.as_os_str()]);
        let mut store = Server::start(words, port, &folder.join("store.log"))?;
        store.wait(|| Ok(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()))?;
        let bench = Self { folder, model, root, store };
        bench.settings()?;
        Ok(bench)
    }

    /// The files that the engine reads: configuration and keys.
    fn settings(&self) -> Result<()> {
        let keys = self.folder.join("keys");
        fs::create_dir_all(&keys)?;
        for (name, text) in
            [("access-key-id", ACCESS_KEY_ID), ("secret-access-key", SECRET_ACCESS_KEY), ("admin", ADMIN_KEY)]
        {
            fs::write(keys.join(name), text)?;
        }
        let source = |bucket: &str| {
            let (url, keys) = (self.store.url(), keys.display());
            format!(
                "[[source]]\nprefix = \"s3://{bucket}/\"\nendpoint = \"{url}\"\nregion = \"{REGION}\"\ncredentials_dir = \"{keys}\"\n"
            )
        };
        Ok(fs::write(self.folder.join("engine.toml"), source("models") + &source("adapters"))?)
    }

    /// An engine on a free port, with an empty cache on disk; seconds until it was ready, or until it reported if it waits
    /// for a placement.
    fn engine(&self, name: &str, from_store: bool, managed: bool) -> Result<(Server, f64)> {
        let cache = self.folder.join(format!("cache-{name}"));
        let port = free_port()?;
        let model = if from_store { "s3://models/smollm2".to_owned() } else { self.model.display().to_string() };
        let mut words = vec![images::built("engine").display().to_string()];
        let text = |path: PathBuf| path.display().to_string();
        words.extend(["serve".into(), "--model".into(), model, "--listen".into(), format!("127.0.0.1:{port}")]);
        words.extend(["--served-model-name".into(), "smollm2".into()]);
        words.extend(["--config".into(), text(self.folder.join("engine.toml"))]);
        words.extend(["--admin-key-file".into(), text(self.folder.join("keys/admin"))]);
        words.extend(["--disk-cache".into(), format!("{},{DISK_CACHE_BYTES}", cache.display())]);
        if managed {
            words.push("--managed".into());
        }
        let begun = Instant::now();
        let mut server = Server::start(words, port, &self.folder.join(format!("{name}.log")))?;
        let client = Client::new(Route::direct(server.url()));
        let path = if managed { "/healthz" } else { "/readyz" };
        server.wait(|| Ok(client.status(path)? == 200))?;
        Ok((server, begun.elapsed().as_secs_f64()))
    }

    fn starts(&self, from_store: bool) -> Result<Vec<f64>> {
        // The first one also brings the files into the machine's memory.
        let name = |round: usize| format!("start-{from_store}-{round}");
        let starts: Result<Vec<f64>> =
            (0..=STARTS).map(|round| Ok(self.engine(&name(round), from_store, false)?.1)).collect();
        Ok(starts?.split_off(1))
    }

    fn adapters(&self) -> Result<Vec<Figure>> {
        let (server, _) = self.engine("adapters", false, true)?;
        let client = Client::new(Route::direct(server.url())).with_key(ADMIN_KEY);
        let report = client.get("/v1/lora_adapters")?.body;
        let base = report["base"]["digest"].as_str().context("the engine reports no digest of its base")?;
        let names: Vec<String> = (0..ADAPTERS).map(|number| format!("fresh-{number}")).collect();
        let placed: Result<Vec<Value>> =
            names.iter().zip(1..).map(|(name, seed)| self.place(name, base, seed)).collect();
        let placement = json!({"bootId": report["bootId"], "generation": 1, "adapters": placed?});
        let answer = client.put("/v1/placement", &placement)?;
        ensure!(answer.status == 200, "the engine does not take its placement: {}", answer.body);
        // The base alone, so that nothing of the first request is counted as an adapter's.
        let base_only = self.first_tokens(&client, &vec!["smollm2".to_owned(); names.len()], 0)?;
        let empty = server.memory()?;
        let cold = self.first_tokens(&client, &names, 1)?;
        let warm = self.first_tokens(&client, &names, 2)?;
        self.all_on_device(&client)?;
        let full = server.memory()?;
        let tokens =
            client.post("/v1/chat/completions", &question("smollm2", 0, 0))?.body["usage"]["prompt_tokens"].clone();
        let metrics = client.text("/metrics")?;
        let load = 1e3 * mean(&metrics, "lorafleet_adapter_load_seconds")?;
        Ok(vec![
            Figure::new(
                format!("adapter of 2.2 MB in S3 alone, request to first token ({tokens} tokens of prompt)"),
                MS,
                Some(300.0),
                cold,
            ),
            Figure::new("of that, fetching and verifying it (mean)", MS, None, vec![load]),
            Figure::new("the same adapter again, another prompt", MS, None, warm),
            Figure::new("the base alone, such a prompt", MS, None, base_only),
            Figure::new("engine, resident, no adapter yet", MIB, None, vec![empty.now]),
            Figure::new(format!("engine, resident, {ADAPTERS} adapters"), MIB, Some(1024.0), vec![full.now]),
            Figure::new("the same, the most it ever had", MIB, Some(1024.0), vec![full.most]),
        ])
    }

    fn place(&self, name: &str, base: &str, seed: u64) -> Result<Value> {
        let digest = adapter::write(&self.root.join("adapters").join(name), base, adapter::Shape::USUAL, seed)?;
        Ok(json!({"name": name, "digest": digest, "uri": format!("s3://adapters/{name}")}))
    }

    /// Milliseconds from each request to the first piece of its answer.
    fn first_tokens(&self, client: &Client, models: &[String], round: usize) -> Result<Vec<f64>> {
        let first_token = |(number, model): (usize, &String)| {
            std::thread::sleep(PAUSE);
            let begun = Instant::now();
            let mut first = None;
            client.stream_body(&question(model, round, number), |_| {
                first.get_or_insert_with(|| begun.elapsed().as_secs_f64() * 1e3);
            })?;
            first.with_context(|| format!("{model} answered nothing; see {}", self.folder.display()))
        };
        models.iter().enumerate().map(first_token).collect()
    }

    /// Every adapter has been fetched and used, so that the memory is that of twenty.
    fn all_on_device(&self, client: &Client) -> Result<()> {
        let report = client.get("/v1/lora_adapters")?.body;
        let adapters = report["adapters"].as_array().cloned().unwrap_or_default();
        let near = adapters.iter().filter(|it| it["tier"] == "Device").count();
        if near as u64 != ADAPTERS {
            bail!("{near} of {ADAPTERS} adapters are on the device: {report}");
        }
        Ok(())
    }
}

/// Alike in length, unlike from the first words on: no prompt finds another's beginning in the cache.
fn question(model: &str, round: usize, number: usize) -> Value {
    json!({
        "model": model,
        "messages": [
            {"role": "system", "content": format!("{}{number} is your desk. You answer letters of customers in a few words.", round + 1)},
            {"role": "user", "content": PROMPT},
        ],
        "max_tokens": TOKENS_MAX,
        "temperature": 0,
    })
}

/// Mean of a histogram without labels on a page of metrics.
fn mean(page: &str, name: &str) -> Result<f64> {
    let value = |end: &str| {
        let name = format!("{name}_{end}");
        let line = page.lines().find(|line| line.split([' ', '{']).next() == Some(&name));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).with_context(|| format!("no metric {name}"))
    };
    Ok(value("sum")? / value("count")?)
}
