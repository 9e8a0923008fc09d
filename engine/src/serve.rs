//! The process: from a configuration to a server that listens, and back down again.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use lorafleet_crds::wire::{LoadRequest, Tier};
use lorafleet_listen::{Bounds, End, Room, Told};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::base::{self, LoadedBase};
use crate::config::Config;
use crate::engine::{COMMANDS_MAX, Engine};
use crate::fleet::{Fleet, Load, Mode};
use crate::flights::unbroken;
use crate::http::{App, Base, Keys, OpenRequests, router};
use crate::limits::Limits;
use crate::loader::AdapterLoader;
use crate::metrics::Meter;
use crate::refusal::Refusal;
use crate::residency::{Enrolment, Loaded};
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::step::{Command, Fetch, Stepper};

/// Open connections get this long to end, however little of the time to drain is left.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT, then drains; a second one ends it at once.
///
/// # Errors
/// What keeps it from starting, or the end of the step thread.
pub async fn serve(config: Config) -> anyhow::Result<End> {
    let mut told = Told::new().context("listening for signals")?;
    let (keys, listener, base) = tokio::select! {
        prepared = prepare(&config) => prepared?,
        heard = told.next() => {
            tracing::info!(signal = heard.name(), "ended before it served");
            return Ok(End::Drained);
        }
    };
    serve_base(config, keys, listener, base, told).await
}

async fn prepare(config: &Config) -> anyhow::Result<(Keys, TcpListener, LoadedBase)> {
    let keys = Keys::open(config.admin_key_file.clone(), config.api_key_file.clone())?;
    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("listening on {}", config.listen))?;
    // Whoever leaves the choice of the port to the system reads it here.
    tracing::info!(listen = %listener.local_addr()?, "listening");
    let begun = Instant::now();
    let base = base::load(config).await?;
    let milliseconds = begun.elapsed().as_millis() as u64;
    tracing::info!(milliseconds, fetched = base.origin == Tier::Source, "the base is loaded");
    Ok((keys, listener, base))
}

/// Serves a base that is loaded already.
///
/// # Errors
/// As [`serve`].
pub async fn serve_base(
    config: Config,
    keys: Keys,
    listener: TcpListener,
    base: LoadedBase,
    told: Told,
) -> anyhow::Result<End> {
    let (app, stepper) = assemble(&config, base, keys)?;
    let commands = stepper.commands.clone();
    let (alive, died) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("step".into()).spawn(move || {
        // Dropped with the thread, also by a panic.
        let _alive = alive;
        stepper.stepper.run();
    })?;

    app.fleet.restore();
    let first_adapters = load_first_adapters(&app, config.adapters);
    tracing::info!(
        listen = %listener.local_addr()?,
        model = app.base.name,
        digest = %app.base.digest,
        boot_id = app.fleet.boot_id,
        "serving"
    );
    let limits = &app.fleet.engine().limits;
    let bounds = Bounds::of_clients(limits.max_connections, limits.head_time_max, limits.write_time_max);
    let stop = CancellationToken::new();
    let serving = lorafleet_listen::serve(listener, router(app.clone()), bounds, |_| (), stop.clone());
    let mut server = tokio::spawn(serving);
    let end = tokio::select! {
        end = drain_when_told(&app, told, &stop, &mut server) => end?,
        refused = first_adapters => return Err(refused),
        // Nothing could be computed any more: whoever started the process shall start it again. Who waits is told so.
        _ = died => {
            stop.cancel();
            let _ = timeout(CLOSE_TIME_MAX, server).await;
            bail!("the step thread has ended");
        }
    };
    if end != End::Drained {
        return Ok(end);
    }
    // The thread may have ended by itself, with its end of the channel.
    let _ = commands.try_send(Command::Stop);
    let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    tracing::info!("ended");
    Ok(end)
}

/// Waits to be told to end; then until all who were let in have their answers, the time is over, or it is told again.
async fn drain_when_told(
    app: &App,
    mut told: Told,
    stop: &CancellationToken,
    server: &mut JoinHandle<()>,
) -> anyhow::Result<End> {
    let heard = tokio::select! {
        heard = told.next() => heard,
        ended = &mut *server => {
            ended?;
            return Ok(End::Drained);
        }
    };
    app.requests.close();
    let most = app.fleet.engine().limits.drain_max;
    let until = tokio::time::Instant::now() + most;
    tracing::info!(signal = heard.name(), open = app.requests.count(), seconds_max = most.as_secs(), "draining");
    let ended = async {
        // Meanwhile others are still told to go elsewhere.
        let answered = timeout_at(until, app.requests.ended()).await.is_ok();
        if !answered {
            tracing::warn!(open = app.requests.count(), "the time to drain is over; what runs is cut off");
        }
        stop.cancel();
        // What has been computed may still be on its way to those who read slowly.
        let closed = timeout_at(until.max(tokio::time::Instant::now() + CLOSE_TIME_MAX), server).await.is_ok();
        if answered && !closed {
            tracing::warn!("the time to drain is over; connections that are still open are cut off");
        }
    };
    tokio::select! {
        () = ended => Ok(End::Drained),
        heard = told.next() => {
            tracing::warn!(signal = heard.name(), open = app.requests.count(), "told again; what runs is cut off");
            Ok(End::CutOff(heard))
        }
    }
}

/// The step thread before it runs, with the way to end it.
struct Assembled {
    stepper: Stepper,
    commands: SyncSender<Command>,
}

fn assemble(config: &Config, base: LoadedBase, keys: Keys) -> anyhow::Result<(Arc<App>, Assembled)> {
    let budget = base.backend.page_budget();
    let limits = bounded(config, base.context, budget)?;
    limits.tell(budget.pages, budget.page_bytes, budget.page_tokens, config.managed);
    if let Some(warning) = small_host_cache(&limits, budget) {
        tracing::warn!("{warning}");
    }
    let meter = Arc::new(Meter::new()?);
    let loader = AdapterLoader::new(config, base.shape, base.digest, base.model, budget, meter.clone());
    let folder = config.disk_cache.as_ref().map_or_else(String::new, |(folder, _)| folder.display().to_string());
    let loader = loader.with_context(|| format!("--disk-cache: using the folder '{folder}'"))?;
    let loader: Arc<dyn Load> = Arc::new(loader);
    let (commands, queue) = std::sync::mpsc::sync_channel(COMMANDS_MAX);
    let (snapshot, shown) = watch::channel(Arc::new(Snapshot::default()));
    let runtime = tokio::runtime::Handle::current();
    let fetch = Fetcher { loader: loader.clone(), runtime, commands: commands.clone() };
    let text_bytes_max = base.text.vocabulary().longest_bytes().saturating_mul(limits.max_model_tokens as usize);
    let room = |bytes: usize| Room::new(bytes as u64);
    // Placements: one large one, or some small ones at once.
    let (bodies, placements) = (room(limits.bodies_bytes), room(limits.max_placement_bytes));
    let orders = room(limits.max_body_bytes);
    let state = State::new(limits.clone(), budget);
    snapshot.send_replace(Arc::new(Snapshot::of(&state)));
    let stepper = Stepper::new(state, base.backend, queue, Box::new(fetch), snapshot, meter.clone());
    let engine = Engine::new(commands.clone(), shown, Arc::new(limits), budget);
    let boot_id = format!("{:016x}{:016x}", getrandom::u64()?, getrandom::u64()?);
    let mode = if config.managed { Mode::Managed } else { Mode::Standalone };
    let kept_at = config.disk_cache.as_ref().filter(|_| config.managed).map(|(dir, _)| dir.join("placement.json"));
    let name = config.served_model_name.clone();
    let app = App {
        fleet: Fleet::new(boot_id, mode, name.clone(), engine, loader, kept_at),
        text: Arc::new(base.text),
        base: Base {
            text_bytes_max,
            name,
            digest: base.digest,
            origin: base.origin,
            vocabulary: base.vocabulary,
            context: base.context,
        },
        keys,
        meter,
        requests: OpenRequests::default(),
        bodies,
        placements,
        orders,
        parsers: Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from))),
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

/// Adapters that leave the device come back from host memory at once, from anywhere else after a fetch.
fn small_host_cache(limits: &Limits, budget: lorafleet_backend::batch::PageBudget) -> Option<String> {
    let share = u64::from(budget.pages / 2).saturating_mul(budget.page_bytes);
    let host = limits.host_cache_bytes;
    (host < share).then(|| {
        format!(
            "--host-cache is {host} bytes, less than the {share} that pinned adapters may take of --page-budget: what leaves the device may have to be fetched again"
        )
    })
}

/// Loads what the command line names, one after another, beside serving. Ends only if one cannot be loaded: whoever
/// starts an engine with an adapter wants no engine without it.
fn load_first_adapters(app: &Arc<App>, adapters: Vec<(String, String)>) -> impl Future<Output = anyhow::Error> + use<> {
    app.fleet.expect(adapters.len());
    let app = app.clone();
    async move {
        for (name, uri) in adapters {
            let request = LoadRequest {
                lora_name: name.clone(),
                lora_path: uri.clone(),
                load_inplace: false,
                digest: None,
                pinned: false,
            };
            if let Err(refusal) = app.fleet.load(request).await {
                return anyhow::Error::new(refusal).context(format!("--adapter: loading '{name}' from {uri}"));
            }
            app.fleet.expected_one_is_done();
        }
        std::future::pending().await
    }
}

/// Runs fetches on the runtime's threads and brings their results to the step thread.
struct Fetcher {
    loader: Arc<dyn Load>,
    runtime: tokio::runtime::Handle,
    commands: SyncSender<Command>,
}

impl Fetch for Fetcher {
    fn start(&mut self, wanted: &Enrolment) {
        let loader = self.loader.clone();
        let wanted = wanted.clone();
        let commands = self.commands.clone();
        self.runtime.spawn(async move {
            let begun = Instant::now();
            // Whoever waits for it must hear of its end, whatever the end.
            let result = unbroken(load_from_any(&*loader, &wanted)).await;
            let took = begun.elapsed();
            // The channel may be full for as long as a step takes; this result must not be lost.
            let send = move || drop(commands.send(Command::Fetched(wanted, result, took)));
            let _ = tokio::task::spawn_blocking(send).await;
        });
    }
}

/// From the first source that has it; if none has, what the first was refused for.
pub(crate) async fn load_from_any(loader: &dyn Load, wanted: &Enrolment) -> Result<Loaded, Refusal> {
    let mut refused = None;
    for source in &wanted.sources {
        match loader.load(source.clone(), wanted.claims()).await {
            Ok(loaded) => return Ok(loaded),
            Err(refusal) => refused = refused.or(Some(refusal)),
        }
    }
    let nowhere = || Refusal::new(404, "NotFound", format!("adapter {} has no source", wanted.digest));
    Err(refused.unwrap_or_else(nowhere))
}

#[cfg(test)]
mod tests {
    use lorafleet_backend::batch::PageBudget;

    use super::*;
    use crate::fleet::Loading;

    struct Broken;

    impl Load for Broken {
        fn load(&self, _source: String, _claims: lorafleet_artifact::Claims) -> Loading {
            Box::pin(async { panic!("broken on purpose") })
        }

        fn disk_bytes(&self) -> (u64, u64) {
            (0, 0)
        }

        fn is_on_disk(&self, _digest: lorafleet_artifact::Digest) -> bool {
            false
        }
    }

    #[tokio::test]
    async fn a_fetch_that_panics_ends_like_one_that_fails() {
        let (commands, told) = std::sync::mpsc::sync_channel(1);
        let runtime = tokio::runtime::Handle::current();
        let wanted = Enrolment {
            name: "a".into(),
            digest: lorafleet_artifact::Digest::from_bytes([1; 32]),
            sources: vec!["/a".into()],
            pinned: false,
            floor: lorafleet_crds::wire::Floor::None,
            base_digest: None,
        };
        Fetcher { loader: Arc::new(Broken), runtime, commands }.start(&wanted);
        let told = tokio::task::spawn_blocking(move || told.recv()).await.unwrap();
        let Ok(Command::Fetched(fetched, Err(refusal), _)) = told else { panic!("{told:?}") };
        assert_eq!((fetched, refusal.status, &*refusal.code), (wanted, 500, "Internal"));
    }

    #[test]
    fn a_host_cache_below_the_adapters_share_of_the_pages_is_worth_a_word() {
        let budget = PageBudget { page_bytes: 1000, pages: 100, page_tokens: 16 };
        let said = |host_cache_bytes| small_host_cache(&Limits { host_cache_bytes, ..Limits::default() }, budget);
        let warning = said(49_999).unwrap();
        assert!(warning.contains("--host-cache is 49999 bytes, less than the 50000 "), "{warning}");
        assert_eq!(said(50_000), None);
    }
}
