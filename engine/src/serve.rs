//! The process: from a configuration to a server that listens, and back down again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use axum::serve::ListenerExt as _;
use lorafleet_artifact::Digest;
use lorafleet_backend::Backend;
use lorafleet_backend::model::Model;
use lorafleet_cpu::{CpuBackend, CpuOptions};
use lorafleet_crds::wire::LoadRequest;
use lorafleet_source::{Progress, ReadLimits, Sources, fetch_base};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::Config;
use crate::engine::{COMMANDS_MAX, Engine};
use crate::fleet::{Fleet, Load, Mode};
use crate::http::{App, Base, Keys, router};
use crate::limits::Limits;
use crate::loader::AdapterLoader;
use crate::metrics::Meter;
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::step::{Command, Fetch, Stepper};
use crate::text::Text;

/// After the last answer, open connections get this long to end.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// What keeps it from starting.
pub async fn serve(config: Config) -> anyhow::Result<()> {
    let begun = Instant::now();
    let keys = Keys::open(config.admin_key_file.clone(), config.api_key_file.clone())?;
    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("listening on {}", config.listen))?;
    let (path, loading) = (model_path(&config).await?, config.clone());
    let base = tokio::task::spawn_blocking(move || load_base(&path, &loading)).await??;
    let (app, stepper) = assemble(&config, base, keys)?;
    let commands = stepper.commands.clone();
    let (alive, died) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("step".into()).spawn(move || {
        // Dropped with the thread, also by a panic.
        let _alive = alive;
        stepper.stepper.run();
    })?;

    app.fleet.restore();
    load_first_adapters(&app, config.adapters);
    tracing::info!(
        listen = %listener.local_addr()?,
        model = app.base.name,
        digest = %app.base.digest,
        boot_id = app.fleet.boot_id,
        milliseconds = begun.elapsed().as_millis() as u64,
        "serving"
    );
    let (stop, stopped) = watch::channel(false);
    let listener = listener.tap_io(|stream| {
        // Tokens are small and shall leave at once.
        let _ = stream.set_nodelay(true);
    });
    let server = axum::serve(listener, router(app.clone())).with_graceful_shutdown(wait_for(stopped));
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        ended = &mut server => ended??,
        drained = drain_at_signal(&app) => drained?,
        // Nothing could be answered any more: whoever started the process shall start it again.
        _ = died => bail!("the step thread has ended"),
    }
    stop.send_replace(true);
    let _ = tokio::time::timeout(CLOSE_TIME_MAX, server).await;
    // The thread may have ended by itself, with its end of the channel.
    let _ = commands.try_send(Command::Stop);
    let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    tracing::info!("ended");
    Ok(())
}

async fn wait_for(mut stopped: watch::Receiver<bool>) {
    // An error means that nobody can say so any more, which is the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

async fn drain_at_signal(app: &App) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    app.draining.store(true, Ordering::Release);
    let engine = app.fleet.engine();
    let most = engine.limits.drain_max;
    tracing::info!(open = engine.open_sequences(), seconds_max = most.as_secs(), "draining");
    let idle = async {
        while engine.open_sequences() > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(most, idle).await.is_err() {
        tracing::warn!(open = engine.open_sequences(), "the time to drain is over; what runs is cut off");
    }
    Ok(())
}

/// The base model, ready to compute.
struct Loaded {
    backend: CpuBackend,
    text: Text,
    shape: lorafleet_artifact::BaseShape,
    context: u32,
    vocabulary: u32,
    digest: Digest,
    /// Stays mapped: adapters may carry copies of its tensors, which are compared.
    model: Arc<Model>,
}

fn load_base(path: &Path, config: &Config) -> anyhow::Result<Loaded> {
    let model = Model::open(path).with_context(|| format!("opening the model {}", path.display()))?;
    let text = if path.is_dir() { Text::from_hf(path)? } else { Text::from_gguf(&gguf_header(path)?)? };
    let options = CpuOptions::new(config.page_budget_bytes);
    let options = CpuOptions { threads: config.threads.unwrap_or(options.threads), ..options };
    let backend = CpuBackend::new(&model, options)?;
    let digest = model.digest()?;
    if let Some(expected) = config.model_digest.filter(|expected| *expected != digest) {
        bail!("DigestMismatch: the model {} has digest {digest}, --model-digest is {expected}", path.display());
    }
    Ok(Loaded {
        backend,
        text,
        shape: model.shape().base(),
        context: u32::try_from(model.shape().context)?,
        vocabulary: u32::try_from(model.shape().vocabulary)?,
        digest,
        model: Arc::new(model),
    })
}

/// Where the model's files are, after bringing them there if they are in a store.
async fn model_path(config: &Config) -> anyhow::Result<PathBuf> {
    let model = &config.model;
    if !model.contains("://") || model.starts_with("file://") {
        return folder_or_file(Path::new(model.strip_prefix("file://").unwrap_or(model)));
    }
    let Some((folder, _)) = &config.disk_cache else {
        bail!("--disk-cache: the model '{model}' needs a folder to be brought to");
    };
    let begun = Instant::now();
    let sources = Sources::new(config.sources.iter().cloned(), ReadLimits::default());
    let path = fetch_base(&sources, &model.parse()?, &folder.join("models"), &Progress::default()).await?;
    tracing::info!(model, milliseconds = begun.elapsed().as_millis() as u64, "the model's files are on disk");
    Ok(path)
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

/// The step thread before it runs, with the way to end it.
struct Assembled {
    stepper: Stepper,
    commands: SyncSender<Command>,
}

fn assemble(config: &Config, base: Loaded, keys: Keys) -> anyhow::Result<(Arc<App>, Assembled)> {
    let budget = base.backend.page_budget();
    let limits = bounded(config, base.context, budget)?;
    tracing::info!(?limits, ?budget, managed = config.managed, "limits");
    let meter = Arc::new(Meter::new()?);
    let loader = AdapterLoader::new(config, base.shape, base.digest, base.model, budget.page_bytes)?;
    let loader: Arc<dyn Load> = Arc::new(loader);
    let (commands, queue) = std::sync::mpsc::sync_channel(COMMANDS_MAX);
    let (snapshot, shown) = watch::channel(Arc::new(Snapshot::default()));
    let fetch = Fetcher {
        loader: loader.clone(),
        runtime: tokio::runtime::Handle::current(),
        commands: commands.clone(),
        meter: meter.clone(),
    };
    let state = State::new(limits.clone(), budget);
    snapshot.send_replace(Arc::new(Snapshot::of(&state)));
    let stepper = Stepper::new(state, Box::new(base.backend), queue, Box::new(fetch), snapshot, meter.clone());
    let engine = Engine::new(commands.clone(), shown, Arc::new(limits), budget);
    let boot_id = format!("{:016x}{:016x}", getrandom::u64()?, getrandom::u64()?);
    let mode = if config.managed { Mode::Managed } else { Mode::Standalone };
    let kept_at = config.disk_cache.as_ref().filter(|_| config.managed).map(|(dir, _)| dir.join("placement.json"));
    let name = config.served_model_name.clone();
    let app = App {
        fleet: Fleet::new(boot_id, mode, name.clone(), engine, loader, kept_at),
        text: Arc::new(base.text),
        base: Base { name, digest: base.digest, vocabulary: base.vocabulary, context: base.context },
        keys,
        meter,
        draining: AtomicBool::new(false),
        groups: AtomicU64::new(0),
        started_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    };
    Ok((Arc::new(app), Assembled { stepper, commands }))
}

/// Limits within what the model and the pages can hold.
fn bounded(config: &Config, context: u32, budget: lorafleet_backend::batch::PageBudget) -> anyhow::Result<Limits> {
    let asked = config.max_model_tokens.unwrap_or(context);
    if asked > context {
        bail!("--max-model-tokens is {asked}, the model's context is {context}");
    }
    let held = budget.pages.saturating_mul(budget.page_tokens);
    if held < 2 {
        bail!("--page-budget of {} bytes holds {held} tokens", config.page_budget_bytes);
    }
    Ok(Limits { max_model_tokens: asked.min(held), ..config.limits.clone() })
}

/// Loads what the command line names, one after another, beside serving.
fn load_first_adapters(app: &Arc<App>, adapters: Vec<(String, String)>) {
    if adapters.is_empty() {
        return;
    }
    app.fleet.expect(adapters.len());
    let app = app.clone();
    tokio::spawn(async move {
        for (name, uri) in adapters {
            let request = LoadRequest {
                lora_name: name.clone(),
                lora_path: uri,
                load_inplace: false,
                digest: None,
                pinned: false,
            };
            match app.fleet.load(request).await {
                Ok(reply) => tracing::info!(name, digest = %reply.digest, rank = reply.rank, "adapter loaded"),
                Err(refusal) => tracing::error!(name, %refusal, "adapter not loaded"),
            }
            app.fleet.expected_one_is_done();
        }
    });
}

/// Runs fetches on the runtime's threads and brings their results to the step thread.
struct Fetcher {
    loader: Arc<dyn Load>,
    runtime: tokio::runtime::Handle,
    commands: SyncSender<Command>,
    meter: Arc<Meter>,
}

impl Fetch for Fetcher {
    fn start(&mut self, digest: Digest, source: &str) {
        let loading = self.loader.load(source.to_owned(), Some(digest));
        let (commands, meter) = (self.commands.clone(), self.meter.clone());
        self.runtime.spawn(async move {
            let begun = Instant::now();
            let result = loading.await;
            if result.is_ok() {
                meter.loaded(begun.elapsed().as_secs_f64());
            }
            // The channel may be full for as long as a step takes; this result must not be lost.
            let _ = tokio::task::spawn_blocking(move || commands.send(Command::Fetched(digest, result))).await;
        });
    }
}
