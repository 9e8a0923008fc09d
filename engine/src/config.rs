//! Flags, environment and file into one configuration; limits from the machine where nothing is given.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use lorafleet_artifact::{Digest, Scheme, SourceUri};
use lorafleet_source::{Access, AccessConfig};
use serde::Deserialize;

use crate::limits::Limits;
use crate::names::check_name;

/// A cache that holds no adapter is a mistake in the unit.
const DISK_CACHE_BYTES_MIN: u64 = 65_536;

/// Every flag of `serve`. A flag goes before its environment variable, that before the file.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Flags {
    /// Base model: a folder with config.json and safetensors, a GGUF file, or an s3:// URI of either (with --disk-cache).
    #[arg(long, env = "LORAFLEET_MODEL")]
    pub model: Option<String>,
    /// Digest that the model must have; with another one the process does not start.
    #[arg(long, env = "LORAFLEET_MODEL_DIGEST")]
    pub model_digest: Option<Digest>,
    /// Name of the base model for clients; the last part of its path if not given.
    #[arg(long, env = "LORAFLEET_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
    /// Address to listen on [default: 127.0.0.1:8000].
    #[arg(long, env = "LORAFLEET_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Where the arithmetic is done [default: cpu].
    #[arg(long, env = "LORAFLEET_BACKEND")]
    pub backend: Option<BackendKind>,
    /// Adapters come with placements only; not ready before the first one.
    #[arg(long, env = "LORAFLEET_MANAGED", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub managed: Option<bool>,
    /// NAME=URI of an adapter to load at the start; may be given several times.
    #[arg(long = "adapter", env = "LORAFLEET_ADAPTER", value_delimiter = ',')]
    pub adapter: Vec<String>,
    /// Load each folder in this folder at the start, under its own name.
    #[arg(long, env = "LORAFLEET_ADAPTER_DIR")]
    pub adapter_dir: Option<PathBuf>,
    /// URI prefix from which clients may load adapters; may be given several times. Nothing is allowed by default.
    #[arg(long = "allowed-source", env = "LORAFLEET_ALLOWED_SOURCE", value_delimiter = ',')]
    pub allowed_source: Vec<String>,
    /// File with the key for routes that change something; without one, nobody may.
    #[arg(long, env = "LORAFLEET_ADMIN_KEY_FILE")]
    pub admin_key_file: Option<PathBuf>,
    /// File with the keys of clients, one a line; without one, everybody may ask.
    #[arg(long, env = "LORAFLEET_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// TOML file with any of these flags (underscores for hyphens). Stores that need more than AWS's own variables
    /// (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, ...) stand there as `[[source]]` entries with the keys prefix
    /// ("s3://bucket/path"), endpoint ("https://host:port"), region and credentials_dir (a folder with the files
    /// access-key-id, secret-access-key and perhaps session-token).
    #[arg(long, env = "LORAFLEET_CONFIG")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Distinct adapters in one batch [default: 8].
    #[arg(long, env = "LORAFLEET_MAX_ADAPTERS_PER_BATCH")]
    pub max_adapters_per_batch: Option<u32>,
    /// Largest rank that is accepted [default: 256].
    #[arg(long, env = "LORAFLEET_MAX_RANK")]
    pub max_rank: Option<u32>,
    /// Sequences that run at once [default: 32, or --max-step-tokens if that is less].
    #[arg(long, env = "LORAFLEET_MAX_SEQUENCES")]
    pub max_sequences: Option<u32>,
    /// Tokens of one step, prompts and answers together [default: 256, or --max-sequences if that is more].
    #[arg(long, env = "LORAFLEET_MAX_STEP_TOKENS")]
    pub max_step_tokens: Option<u32>,
    /// Milliseconds that a step takes about at most: the time between two tokens of an answer while prompts are taken in
    /// beside it [default: 250].
    #[arg(long, env = "LORAFLEET_STEP_MS_MAX")]
    pub step_ms_max: Option<u64>,
    /// Prompt and answer of one sequence [default: the model's context, or what the pages hold if that is less].
    #[arg(long, env = "LORAFLEET_MAX_MODEL_TOKENS")]
    pub max_model_tokens: Option<u32>,
    /// Sequences that wait or run before clients are told to come back later [default: 1024].
    #[arg(long, env = "LORAFLEET_MAX_QUEUED")]
    pub max_queued: Option<u32>,
    /// Bytes for keys, values and adapters of the running batch [default: a quarter of the memory, 64 MiB to 4 GiB].
    #[arg(long, env = "LORAFLEET_PAGE_BUDGET")]
    pub page_budget: Option<u64>,
    /// Bytes of host memory for adapters [default: an eighth of the memory, 64 MiB to 16 GiB].
    #[arg(long, env = "LORAFLEET_HOST_CACHE")]
    pub host_cache: Option<u64>,
    /// DIR,BYTES: folder for verified adapters, a fetched model and the last placement [default: none, nothing is kept].
    #[arg(long, env = "LORAFLEET_DISK_CACHE")]
    pub disk_cache: Option<String>,
    /// Compute threads [default: all cores].
    #[arg(long, env = "LORAFLEET_THREADS")]
    pub threads: Option<NonZeroUsize>,
    /// Longest wait, in milliseconds, of a request that lacks only a place, of its own or for its adapter [default: 2000].
    #[arg(long, env = "LORAFLEET_AGE_MS_MAX")]
    pub age_ms_max: Option<u64>,
    /// How long, in seconds, running requests may go on after SIGTERM [default: 25].
    #[arg(long, env = "LORAFLEET_DRAIN_SECONDS_MAX")]
    pub drain_seconds_max: Option<u64>,
    /// Open client connections; more wait to be accepted [default: 4096].
    #[arg(long, env = "LORAFLEET_MAX_CONNECTIONS")]
    pub max_connections: Option<u32>,
    /// Bytes of a request's body [default: 4194304].
    #[arg(long, env = "LORAFLEET_MAX_BODY_BYTES")]
    pub max_body_bytes: Option<u32>,
    /// How long a client may take until it has sent the head of its next request, and so how long an idle connection
    /// stays; for its first, 10 seconds at most [default: 75].
    #[arg(long, env = "LORAFLEET_HEAD_TIMEOUT_SECONDS")]
    pub head_timeout_seconds: Option<u64>,
    /// How long a client may leave bytes of an answer unread before it is taken for gone [default: 60].
    #[arg(long, env = "LORAFLEET_WRITE_TIMEOUT_SECONDS")]
    pub write_timeout_seconds: Option<u64>,
    /// Digest that counts as this base beside its own; may be given several times.
    #[arg(long = "base-identity", env = "LORAFLEET_BASE_IDENTITY", value_delimiter = ',')]
    pub base_identity: Vec<Digest>,
    #[arg(skip)]
    pub source: Vec<AccessConfig>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    Cpu,
    #[value(hide = true)]
    Cuda,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {path}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the configuration {path} is not understood: {why}")]
    Parse { path: String, why: String },
    #[error("--{flag}: {why}")]
    Flag { flag: &'static str, why: String },
}

/// What the process does, decided once at start.
#[derive(Clone, Debug)]
pub struct Config {
    pub model: String,
    pub model_digest: Option<Digest>,
    pub served_model_name: String,
    pub listen: SocketAddr,
    pub managed: bool,
    /// (name, URI) to load at the start.
    pub adapters: Vec<(String, String)>,
    pub sources: Vec<Access>,
    pub admin_key_file: Option<PathBuf>,
    pub api_key_file: Option<PathBuf>,
    pub page_budget_bytes: u64,
    pub disk_cache: Option<(PathBuf, u64)>,
    pub threads: Option<NonZeroUsize>,
    pub base_identities: Vec<Digest>,
    /// `max_model_tokens` is what was asked for; the model's context bounds it later.
    pub limits: Limits,
    pub max_model_tokens: Option<u32>,
}

impl Flags {
    /// Fills what these flags leave open from the file that they name.
    ///
    /// # Errors
    /// A file that cannot be read, or that holds anything unknown.
    pub fn with_file(self) -> Result<Self, ConfigError> {
        let Some(path) = self.config.clone() else { return Ok(self) };
        let shown = path.display().to_string();
        let text =
            std::fs::read_to_string(&path).map_err(|source| ConfigError::Read { path: shown.clone(), source })?;
        let file = toml::from_str(&text).map_err(|error| ConfigError::Parse { path: shown, why: error.to_string() })?;
        Ok(self.or(file))
    }

    fn or(self, file: Self) -> Self {
        let list = |own: Vec<String>, other: Vec<String>| if own.is_empty() { other } else { own };
        Self {
            model: self.model.or(file.model),
            model_digest: self.model_digest.or(file.model_digest),
            served_model_name: self.served_model_name.or(file.served_model_name),
            listen: self.listen.or(file.listen),
            backend: self.backend.or(file.backend),
            managed: self.managed.or(file.managed),
            adapter: list(self.adapter, file.adapter),
            adapter_dir: self.adapter_dir.or(file.adapter_dir),
            allowed_source: list(self.allowed_source, file.allowed_source),
            admin_key_file: self.admin_key_file.or(file.admin_key_file),
            api_key_file: self.api_key_file.or(file.api_key_file),
            config: self.config,
            max_adapters_per_batch: self.max_adapters_per_batch.or(file.max_adapters_per_batch),
            max_rank: self.max_rank.or(file.max_rank),
            max_sequences: self.max_sequences.or(file.max_sequences),
            max_step_tokens: self.max_step_tokens.or(file.max_step_tokens),
            step_ms_max: self.step_ms_max.or(file.step_ms_max),
            max_model_tokens: self.max_model_tokens.or(file.max_model_tokens),
            max_queued: self.max_queued.or(file.max_queued),
            page_budget: self.page_budget.or(file.page_budget),
            host_cache: self.host_cache.or(file.host_cache),
            disk_cache: self.disk_cache.or(file.disk_cache),
            threads: self.threads.or(file.threads),
            age_ms_max: self.age_ms_max.or(file.age_ms_max),
            drain_seconds_max: self.drain_seconds_max.or(file.drain_seconds_max),
            max_connections: self.max_connections.or(file.max_connections),
            max_body_bytes: self.max_body_bytes.or(file.max_body_bytes),
            head_timeout_seconds: self.head_timeout_seconds.or(file.head_timeout_seconds),
            write_timeout_seconds: self.write_timeout_seconds.or(file.write_timeout_seconds),
            base_identity: if self.base_identity.is_empty() { file.base_identity } else { self.base_identity },
            source: file.source,
        }
    }

    /// # Errors
    /// The flag that is missing or contradicts another, by name.
    pub fn resolve(self, memory_bytes: u64) -> Result<Config, ConfigError> {
        let model = self.model.clone().ok_or_else(|| flag("model", "is needed"))?;
        if self.backend == Some(BackendKind::Cuda) {
            return Err(flag("backend", "cuda is not part of this build"));
        }
        let fetched = model.contains("://").then_some(model.as_str()).filter(|model| !model.starts_with("file://"));
        if let Some(model) = fetched {
            check_fetched(model, self.disk_cache.is_some())?;
        }
        let limits = self.limits(memory_bytes)?;
        let adapters = self.adapters()?;
        let last = model.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let name = last.strip_suffix(".gguf").unwrap_or(last).to_owned();
        Ok(Config {
            served_model_name: self.served_model_name.clone().unwrap_or(name),
            listen: self.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8000))),
            managed: self.managed.unwrap_or(false),
            sources: self.sources(&adapters, fetched)?,
            adapters,
            model,
            model_digest: self.model_digest,
            page_budget_bytes: self.page_budget.unwrap_or((memory_bytes / 4).clamp(64 << 20, 4 << 30)),
            disk_cache: self.disk_cache.as_deref().map(disk_cache).transpose()?,
            threads: self.threads,
            base_identities: self.base_identity,
            admin_key_file: self.admin_key_file,
            api_key_file: self.api_key_file,
            max_model_tokens: self.max_model_tokens,
            limits,
        })
    }

    fn limits(&self, memory_bytes: u64) -> Result<Limits, ConfigError> {
        let base = Limits::default();
        // Whichever is given alone moves the other's default.
        let fewest = self.max_step_tokens.unwrap_or(u32::MAX);
        let max_sequences = self.max_sequences.unwrap_or(base.max_sequences.min(fewest));
        let limits = Limits {
            max_adapters_per_batch: self.max_adapters_per_batch.unwrap_or(base.max_adapters_per_batch),
            max_rank: self.max_rank.unwrap_or(base.max_rank),
            step_time_max: self.step_ms_max.map_or(base.step_time_max, Duration::from_millis),
            max_sequences,
            max_step_tokens: self.max_step_tokens.unwrap_or(base.max_step_tokens.max(max_sequences)),
            max_queued: self.max_queued.unwrap_or(base.max_queued),
            max_connections: self.max_connections.map_or(base.max_connections, |most| most as usize),
            max_body_bytes: self.max_body_bytes.map_or(base.max_body_bytes, |most| most as usize),
            head_time_max: self.head_timeout_seconds.map_or(base.head_time_max, Duration::from_secs),
            write_time_max: self.write_timeout_seconds.map_or(base.write_time_max, Duration::from_secs),
            host_cache_bytes: self.host_cache.unwrap_or((memory_bytes / 8).clamp(64 << 20, 16 << 30)),
            age_max: self.age_ms_max.map_or(base.age_max, Duration::from_millis),
            drain_max: self.drain_seconds_max.map_or(base.drain_max, Duration::from_secs),
            ..base
        };
        self.check_ranges()?;
        let (body, bodies) = (limits.max_body_bytes, limits.bodies_bytes);
        if body > bodies {
            return Err(flag("max-body-bytes", format!("is {body}, all bodies together may have {bodies}")));
        }
        let (tokens, sequences) = (limits.max_step_tokens, limits.max_sequences);
        if tokens < sequences {
            let why =
                format!("is {tokens}, less than the {sequences} of --max-sequences, which all decode in one step");
            return Err(flag("max-step-tokens", why));
        }
        Ok(limits)
    }

    /// A number that makes no sense is refused at the start, and not found out by whoever waits for an answer.
    fn check_ranges(&self) -> Result<(), ConfigError> {
        let number = |given: Option<u32>| given.map(u64::from);
        let ranges = [
            ("max-adapters-per-batch", number(self.max_adapters_per_batch), 1..=65_536),
            ("max-rank", number(self.max_rank), 1..=65_536),
            ("max-sequences", number(self.max_sequences), 1..=65_536),
            ("max-step-tokens", number(self.max_step_tokens), 1..=1 << 20),
            ("max-model-tokens", number(self.max_model_tokens), 2..=1 << 26),
            ("max-queued", number(self.max_queued), 1..=1 << 20),
            ("max-connections", number(self.max_connections), 1..=1 << 20),
            ("max-body-bytes", number(self.max_body_bytes), 1..=1 << 30),
            ("page-budget", self.page_budget, 1..=1 << 46),
            ("host-cache", self.host_cache, 1..=1 << 46),
            ("step-ms-max", self.step_ms_max, 1..=60_000),
            ("age-ms-max", self.age_ms_max, 1..=3_600_000),
            ("drain-seconds-max", self.drain_seconds_max, 0..=86_400),
            ("head-timeout-seconds", self.head_timeout_seconds, 1..=86_400),
            ("write-timeout-seconds", self.write_timeout_seconds, 1..=86_400),
        ];
        for (name, given, range) in ranges {
            if let Some(given) = given.filter(|given| !range.contains(given)) {
                return Err(flag(name, format!("is {given}: {} to {} are possible", range.start(), range.end())));
            }
        }
        if let Some(name) = &self.served_model_name {
            check_name("served_model_name", name).map_err(|refusal| flag("served-model-name", refusal.message))?;
        }
        Ok(())
    }

    fn adapters(&self) -> Result<Vec<(String, String)>, ConfigError> {
        let mut adapters = Vec::new();
        for given in &self.adapter {
            let (name, uri) =
                given.split_once('=').ok_or_else(|| flag("adapter", format!("'{given}' is not NAME=URI")))?;
            adapters.push((name.to_owned(), absolute("adapter", uri)?));
        }
        if let Some(folder) = &self.adapter_dir {
            let unreadable = |error: std::io::Error| flag("adapter-dir", format!("{}: {error}", folder.display()));
            let mut found = Vec::new();
            for entry in std::fs::read_dir(folder).map_err(unreadable)? {
                let entry = entry.map_err(unreadable)?;
                if let (true, Some(name)) = (entry.path().is_dir(), entry.file_name().to_str()) {
                    found.push((name.to_owned(), absolute("adapter-dir", &entry.path().to_string_lossy())?));
                }
            }
            found.sort();
            adapters.extend(found);
        }
        let mut names = std::collections::BTreeSet::new();
        if let Some((name, _)) = adapters.iter().find(|(name, _)| !names.insert(name)) {
            return Err(flag("adapter", format!("the name '{name}' is given twice")));
        }
        if self.managed == Some(true) && !adapters.is_empty() {
            return Err(flag("adapter", "a managed engine gets its adapters from its placement"));
        }
        Ok(adapters)
    }

    /// The allow-list; what the command line itself names is allowed.
    fn sources(&self, adapters: &[(String, String)], model: Option<&str>) -> Result<Vec<Access>, ConfigError> {
        let mut sources = Vec::new();
        for entry in &self.source {
            let access = Access::try_from(entry.clone());
            sources.push(access.map_err(|refusal| flag("source", format!("{}: {}", entry.prefix, refusal.message)))?);
        }
        for prefix in &self.allowed_source {
            sources.push(Access::ambient(uri("allowed-source", prefix)?));
        }
        let adapters = adapters.iter().map(|(_, source)| uri("adapter", source));
        for named in adapters.chain(model.map(|model| uri("model", model))) {
            let named = named?;
            // What a `[[source]]` says about the way there goes before the surroundings.
            if named.longest_prefix(sources.iter().map(|source| &source.prefix)).is_none() {
                sources.push(Access::ambient(named));
            }
        }
        Ok(sources)
    }
}

fn flag(flag: &'static str, why: impl Into<String>) -> ConfigError {
    ConfigError::Flag { flag, why: why.into() }
}

fn uri(name: &'static str, text: &str) -> Result<SourceUri, ConfigError> {
    text.parse().map_err(|refusal: lorafleet_artifact::Refusal| flag(name, refusal.message))
}

/// A model that is not a path: what can be brought from there, and where to.
fn check_fetched(model: &str, has_folder: bool) -> Result<(), ConfigError> {
    let scheme = model.split_once("://").map_or("", |(scheme, _)| scheme);
    if uri("model", model)?.scheme() != Scheme::S3 {
        let why = format!(
            "'{model}': nothing here reads {scheme}://; a model is a folder, a GGUF file or an s3:// URI: bring its files \
             there first"
        );
        return Err(flag("model", why));
    }
    if !has_folder {
        return Err(flag("disk-cache", format!("DIR,BYTES is needed: the model '{model}' is brought to it")));
    }
    Ok(())
}

/// On the command line a path may be relative.
fn absolute(name: &'static str, text: &str) -> Result<String, ConfigError> {
    if text.contains("://") {
        return Ok(text.to_owned());
    }
    let path = std::path::absolute(Path::new(text)).map_err(|error| flag(name, format!("{text}: {error}")))?;
    Ok(path.to_string_lossy().into_owned())
}

fn disk_cache(text: &str) -> Result<(PathBuf, u64), ConfigError> {
    let wrong = || flag("disk-cache", format!("'{text}' is not DIR,BYTES"));
    let (folder, bytes) = text.rsplit_once(',').ok_or_else(wrong)?;
    let bytes = bytes.trim().parse().map_err(|_| wrong())?;
    if folder.is_empty() {
        return Err(wrong());
    }
    if bytes < DISK_CACHE_BYTES_MIN {
        return Err(flag("disk-cache", format!("is {bytes} bytes: {DISK_CACHE_BYTES_MIN} is the least")));
    }
    Ok((PathBuf::from(folder), bytes))
}

/// Memory that this process may use: the machine's, or less if its control group says so.
pub fn memory_bytes() -> u64 {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    });
    let group = number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    // Where neither can be read, what a small machine has.
    machine.into_iter().chain(group).min().unwrap_or(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(toml: &str, expected: Result<&str, &str>) {
        let flags: Result<Flags, _> = toml::from_str(toml);
        let config = flags.map_err(|error| error.to_string()).and_then(|flags| {
            Flags { model: flags.model.clone().or(Some("/m/tiny.gguf".into())), ..flags }
                .resolve(1 << 30)
                .map_err(|error| error.to_string())
        });
        match (config, expected) {
            (Ok(config), Ok(expected)) => {
                let shown = format!(
                    "{} {} pages={} host={} sequences={} tokens={} sources={}",
                    config.served_model_name,
                    config.listen,
                    config.page_budget_bytes >> 20,
                    config.limits.host_cache_bytes >> 20,
                    config.limits.max_sequences,
                    config.limits.max_step_tokens,
                    config.sources.iter().map(|source| source.prefix.to_string()).collect::<Vec<_>>().join(" ")
                );
                assert_eq!(shown, expected, "{toml}");
            }
            (Err(error), Err(expected)) => assert!(error.contains(expected), "{toml}: {error}"),
            (found, expected) => panic!("{toml}: {found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn help_names_the_defaults() {
        let command = <Flags as Args>::augment_args(clap::Command::new("serve"));
        let limits = Limits::default();
        for (name, default) in [
            ("max_adapters_per_batch", u64::from(limits.max_adapters_per_batch)),
            ("max_rank", limits.max_rank.into()),
            ("max_sequences", limits.max_sequences.into()),
            ("max_step_tokens", limits.max_step_tokens.into()),
            ("max_queued", limits.max_queued.into()),
            ("step_ms_max", limits.step_time_max.as_millis() as u64),
            ("max_connections", limits.max_connections as u64),
            ("max_body_bytes", limits.max_body_bytes as u64),
            ("head_timeout_seconds", limits.head_time_max.as_secs()),
            ("write_timeout_seconds", limits.write_time_max.as_secs()),
            ("age_ms_max", limits.age_max.as_secs() * 1000),
            ("drain_seconds_max", limits.drain_max.as_secs()),
        ] {
            let argument = command.get_arguments().find(|argument| argument.get_id() == name).unwrap();
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let named = [format!("[default: {default}]"), format!("[default: {default},")];
            assert!(named.iter().any(|named| help.contains(named)), "{name}: {help}");
        }
    }

    #[test]
    fn the_example_of_the_manual_is_understood() {
        let manual = include_str!("../../docs/OPERATIONS.md");
        let example = manual.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        check(
            example,
            Ok(
                "smollm2 0.0.0.0:8000 pages=256 host=128 sequences=32 tokens=256 sources=s3://models s3://adapters file:///srv/adapters",
            ),
        );
    }

    #[test]
    fn the_file_holds_every_flag_and_limits_follow_the_machine() {
        check("", Ok("tiny 127.0.0.1:8000 pages=256 host=128 sequences=32 tokens=256 sources="));
        check(
            "model = \"s3://models/smollm2\"\ndisk_cache = \"/c,100000\"\nlisten = \"0.0.0.0:9\"\npage_budget = 1048576\nmax_step_tokens = 64\n\
             [[source]]\nprefix = \"s3://models/\"\nendpoint = \"http://s3:9000\"",
            Ok("smollm2 0.0.0.0:9 pages=1 host=128 sequences=32 tokens=64 sources=s3://models"),
        );
        check(
            "allowed_source = [\"/a/b/\"]",
            Ok("tiny 127.0.0.1:8000 pages=256 host=128 sequences=32 tokens=256 sources=file:///a/b"),
        );
        // One given alone moves the other's default; both given must go together.
        let derived = |sequences: u32, tokens: u32| {
            format!("tiny 127.0.0.1:8000 pages=256 host=128 sequences={sequences} tokens={tokens} sources=")
        };
        check("max_sequences = 512", Ok(&derived(512, 512)));
        check("max_step_tokens = 8", Ok(&derived(8, 8)));
        check("max_step_tokens = 8\nmax_sequences = 9", Err("less than the 9 of --max-sequences"));
        check("max_step_tokens = 0", Err("--max-step-tokens: is 0: 1 to 1048576 are possible"));
        check("max_sequences = 0", Err("--max-sequences: is 0: 1 to 65536 are possible"));
        check("max_connections = 0", Err("--max-connections: is 0: 1 to 1048576 are possible"));
        check("head_timeout_seconds = 0", Err("--head-timeout-seconds: is 0: 1 to 86400 are possible"));
        check("host_cache = 0", Err("--host-cache: is 0: 1 to"));
        check("max_rank = 100000", Err("--max-rank: is 100000: 1 to 65536 are possible"));
        check("age_ms_max = 0", Err("--age-ms-max: is 0: 1 to 3600000"));
        check("served_model_name = \"a@b\"", Err("--served-model-name: the name 'a@b' holds '@'"));
        check("disk_cache = \"/x,10\"", Err("--disk-cache: is 10 bytes: 65536 is the least"));
        check("max_body_bytes = 50000000", Err("--max-body-bytes: is 50000000, all bodies together may have 33554432"));
        check("max_sequence = 1", Err("unknown field"));
        check("adapter = [\"a\"]", Err("'a' is not NAME=URI"));
        check("model = \"hf://org/model\"", Err("--model: 'hf://org/model': nothing here reads hf://"));
        check("model = \"s3://b/m\"", Err("--disk-cache: DIR,BYTES is needed: the model 's3://b/m'"));
        check("adapter = [\"a=/b\", \"a=/c\"]", Err("--adapter: the name 'a' is given twice"));
        check(
            "model = \"s3://m/x\"\ndisk_cache = \"/c,100000\"\nadapter = [\"a=s3://s/1\", \"b=s3://t/2\"]\n\
             [[source]]\nprefix = \"s3://s\"\nendpoint = \"http://s3:9000\"",
            Ok("x 127.0.0.1:8000 pages=256 host=128 sequences=32 tokens=256 sources=s3://s s3://t/2 s3://m/x"),
        );
        check("disk_cache = \"/x\"", Err("'/x' is not DIR,BYTES"));
        check("backend = \"cuda\"", Err("cuda is not part of this build"));
        check("allowed_source = [\"/a/../b\"]", Err("--allowed-source"));
        check("managed = true\nadapter = [\"a=/b\"]", Err("gets its adapters from its placement"));
    }
}
