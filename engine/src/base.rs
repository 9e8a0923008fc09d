//! The base model on its way in: from a path, from this machine's disk cache, or from a store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use lorafleet_artifact::{BaseShape, Digest, Reason};
use lorafleet_backend::Backend;
use lorafleet_backend::model::Model;
use lorafleet_cpu::{CpuBackend, CpuOptions};
use lorafleet_crds::wire::Tier;
use lorafleet_source::{LocalBase, Progress, ReadLimits, Sources, fetch_base};

use crate::config::Config;
use crate::refusal::Refusal;
use crate::text::Text;

/// The base model, ready to compute.
pub struct LoadedBase {
    pub backend: Box<dyn Backend>,
    pub text: Text,
    pub shape: BaseShape,
    pub context: u32,
    pub vocabulary: u32,
    pub digest: Digest,
    /// `Source` if its files were brought from the store at this start.
    pub origin: Tier,
    /// Stays mapped: adapters may carry copies of its tensors, which are compared.
    pub model: Arc<Model>,
}

/// Loads what the configuration names. With a digest in it, a copy of that content in the disk cache is enough: the
/// store is not asked, so that a pod starts again while its store is away.
///
/// # Errors
/// What is missing, unreadable or not supported; `DigestMismatch` for another model than the digest says.
pub async fn load(config: &Config) -> anyhow::Result<LoadedBase> {
    let model = &config.model;
    if !model.contains("://") || model.starts_with("file://") {
        let path = folder_or_file(Path::new(model.strip_prefix("file://").unwrap_or(model)))?;
        return open(path, config, Tier::Disk).await;
    }
    let local = bring(config).await?;
    if local.fetched {
        return open(local.path, config, Tier::Source).await;
    }
    match open(local.path.clone(), config, Tier::Disk).await {
        Err(error) if !local.is_whole().await => {
            let folder = local.folder.display().to_string();
            tracing::warn!(folder, error = format!("{error:#}"), "the copy on disk is damaged; it is fetched again");
            local.discard().await?;
            open(bring(config).await?.path, config, Tier::Source).await
        }
        opened => opened,
    }
}

/// Brings the model's files onto the disk, unless they are there.
async fn bring(config: &Config) -> anyhow::Result<LocalBase> {
    let model = &config.model;
    let (folder, _) = config.disk_cache.as_ref().context("--disk-cache: a model that is fetched needs a folder")?;
    let begun = Instant::now();
    let sources = Sources::new(config.sources.iter().cloned(), ReadLimits::default());
    let (uri, cache) = (model.parse()?, folder.join("models"));
    let local = fetch_base(&sources, &uri, config.model_digest, &cache, &Progress::default()).await?;
    let milliseconds = begun.elapsed().as_millis() as u64;
    tracing::info!(model, milliseconds, fetched = local.fetched, "the model's files are on disk");
    Ok(local)
}

async fn open(path: PathBuf, config: &Config, origin: Tier) -> anyhow::Result<LoadedBase> {
    let config = config.clone();
    tokio::task::spawn_blocking(move || open_now(&path, &config, origin)).await?
}

fn open_now(path: &Path, config: &Config, origin: Tier) -> anyhow::Result<LoadedBase> {
    let model = Model::open(path).with_context(|| format!("opening the model {}", path.display()))?;
    let text = if path.is_dir() { Text::from_hf(path)? } else { Text::from_gguf(&gguf_header(path)?)? };
    let options = CpuOptions::new(config.page_budget_bytes);
    let options = CpuOptions { threads: config.threads.unwrap_or(options.threads), ..options };
    let backend = CpuBackend::new(&model, options)?;
    let digest = model.digest()?;
    if let Some(expected) = config.model_digest.filter(|expected| *expected != digest) {
        let message = format!("the model {} has digest {digest}, --model-digest is {expected}", path.display());
        return Err(Refusal::new(422, Reason::DigestMismatch.as_str(), message).into());
    }
    Ok(LoadedBase {
        backend: Box::new(backend),
        text,
        shape: model.shape().base(),
        context: u32::try_from(model.shape().context)?,
        vocabulary: u32::try_from(model.shape().vocabulary)?,
        digest,
        origin,
        model: Arc::new(model),
    })
}

/// A folder that holds nothing but a GGUF file stands for that file.
fn folder_or_file(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("reading {}", path.display()))? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "gguf") {
            found.push(file);
        }
    }
    match <[PathBuf; 1]>::try_from(found) {
        Ok([file]) => Ok(file),
        Err(found) => bail!("{} holds no config.json and {} GGUF files, expected one", path.display(), found.len()),
    }
}

fn gguf_header(path: &Path) -> anyhow::Result<lorafleet_artifact::gguf::Gguf> {
    use std::io::Read as _;

    use lorafleet_artifact::HeaderError;
    use lorafleet_artifact::gguf::{Gguf, GgufLimits};

    let limits = GgufLimits::default();
    let mut file = std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let length = file.metadata()?.len();
    let (mut bytes, mut wanted) = (Vec::new(), 4 << 20);
    loop {
        (&mut file).take(wanted - bytes.len() as u64).read_to_end(&mut bytes)?;
        match Gguf::parse(&bytes, length, &limits) {
            Err(HeaderError::Incomplete { bytes: more }) if (bytes.len() as u64) < limits.header_bytes.min(length) => {
                wanted = more.max(wanted.saturating_mul(2)).min(limits.header_bytes);
            }
            parsed => return parsed.with_context(|| format!("reading the header of {}", path.display())),
        }
    }
}
