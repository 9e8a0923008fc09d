//! The adapters by name: loading, unloading, the desired placement, and the report about all of it.
//!
//! Names live here, bytes and pages with the step thread; a digest is what the two talk about.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lorafleet_artifact::{Claims, Digest};
use lorafleet_crds::wire::{Budgets, Floor, LoadReply, LoadRequest, Placement, Tier};

use crate::engine::Engine;
use crate::names::{Names, Resolved, check_name};
use crate::pages::KvOwner;
use crate::refusal::{Refusal, shown};
use crate::report;
use crate::residency::{Enrolment, Loaded, Newcomer};
use crate::sequence::{Draft, NewSequence};
use crate::snapshot::Snapshot;
use crate::step::Command;

mod catalog;

use catalog::check_placement;
pub use catalog::{Catalog, Placed};

pub type Loading = Pin<Box<dyn Future<Output = Result<Loaded, Refusal>> + Send>>;

/// Fetches and verifies an adapter, off the step thread.
pub trait Load: Send + Sync {
    fn load(&self, source: String, claims: Claims) -> Loading;

    /// Bytes of the disk cache: in all, and in use.
    fn disk_bytes(&self) -> (u64, u64);

    /// The disk cache has a copy.
    fn is_on_disk(&self, digest: Digest) -> bool;
}

/// Who decides what this engine holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Clients load and unload.
    Standalone,
    /// One desired placement at a time.
    Managed,
}

pub struct Fleet {
    pub boot_id: String,
    pub mode: Mode,
    engine: Engine,
    loader: Arc<dyn Load>,
    catalog: Mutex<Catalog>,
    /// The last accepted placement is kept here over restarts of the process.
    kept_at: Option<PathBuf>,
    placing: Mutex<()>,
    /// Loads of one name follow one another.
    turns: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    ready: AtomicBool,
    /// Adapters of the command line that are still on their way.
    expected: AtomicUsize,
}

/// A step may take a while on a slow machine.
const SHOWN_TIME_MAX: Duration = Duration::from_secs(5);

impl Fleet {
    pub fn new(
        boot_id: String,
        mode: Mode,
        base: String,
        engine: Engine,
        loader: Arc<dyn Load>,
        kept_at: Option<PathBuf>,
    ) -> Self {
        let catalog = Mutex::new(Catalog { names: Names::new(base), ..Catalog::default() });
        let ready = AtomicBool::new(false);
        Self {
            boot_id,
            mode,
            engine,
            loader,
            catalog,
            kept_at,
            placing: Mutex::default(),
            turns: Mutex::default(),
            ready,
            expected: AtomicUsize::new(0),
        }
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// 404 or 409, see [`Names::resolve`].
    pub fn resolve(&self, model: &str) -> Result<Resolved, Refusal> {
        self.catalog().names.resolve(model)
    }

    /// Hands the sequences of a request to the step thread, under what the name means at this very moment: nobody can
    /// retire that version in between, whatever happened to the name while the request was made into tokens.
    ///
    /// # Errors
    /// As for [`Self::resolve`], [`Queue::place`](crate::queue::Queue::place) and [`Engine::send`].
    pub fn submit(&self, model: &str, drafts: Vec<Draft>) -> Result<Resolved, Refusal> {
        // What retires a version is sent under the same lock.
        let catalog = self.catalog();
        let resolved = catalog.names.resolve(model)?;
        let owner = match resolved {
            Resolved::Base => KvOwner::Base,
            Resolved::Adapter { digest, .. } => KvOwner::Adapter(digest),
        };
        let placed = |draft| Ok(NewSequence { owner, place: Some(self.engine.queue.place(owner)?), draft });
        self.engine.send(Command::Submit(drafts.into_iter().map(placed).collect::<Result<_, _>>()?))?;
        Ok(resolved)
    }

    /// Whether each adapter with a floor is there or has failed with a type. Stays true once it was: a pod that
    /// serves is not taken out of service because it gets one adapter more.
    pub fn is_ready(&self) -> bool {
        if self.ready.load(Ordering::Acquire) {
            return true;
        }
        let snapshot = self.engine.snapshot();
        let catalog = self.catalog();
        let settled = |digest: &Digest| snapshot.facts(digest).is_some_and(|facts| facts.settled());
        let placed = self.mode == Mode::Standalone || catalog.placed_once;
        let ready = placed && self.expected.load(Ordering::Acquire) == 0 && catalog.placed.keys().all(settled);
        if ready {
            self.ready.store(true, Ordering::Release);
        }
        ready
    }

    /// Not ready before so many adapters have been loaded or refused.
    pub fn expect(&self, adapters: usize) {
        self.expected.fetch_add(adapters, Ordering::AcqRel);
    }

    pub fn expected_one_is_done(&self) {
        self.expected.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn budgets(&self, snapshot: &Snapshot) -> Budgets {
        let (disk_bytes_total, disk_bytes_used) = self.loader.disk_bytes();
        Budgets { disk_bytes_total, disk_bytes_used, ..report::budgets(snapshot) }
    }

    /// Loads an adapter under a name, for a standalone engine.
    ///
    /// # Errors
    /// 409 in a managed engine and for a name that is taken; what the source or the adapter is refused for.
    pub async fn load(&self, request: LoadRequest) -> Result<LoadReply, Refusal> {
        self.standalone("load")?;
        check_name("lora_name", &request.lora_name)?;
        if request.lora_path.is_empty() {
            return Err(Refusal::invalid("lora_path", "the path is empty"));
        }
        let turn = self.turn(&request.lora_name);
        let result = {
            let _held = turn.lock().await;
            let begun = Instant::now();
            let result = self.load_in_turn(&request).await;
            let (name, source) = (shown(&request.lora_name), shown(&request.lora_path));
            let milliseconds = begun.elapsed().as_millis() as u64;
            match &result {
                Ok(LoadReply { digest, bytes, rank, .. }) => {
                    tracing::info!(name, %digest, bytes, rank, source, milliseconds, "adapter loaded");
                }
                Err(refusal) => {
                    let Refusal { code, message, .. } = refusal;
                    tracing::warn!(name, code = &**code, message, source, milliseconds, "adapter not loaded");
                }
            }
            result
        };
        drop(turn);
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, turn| Arc::strong_count(turn) > 1);
        result
    }

    fn turn(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(name.to_owned()).or_default().clone()
    }

    async fn load_in_turn(&self, request: &LoadRequest) -> Result<LoadReply, Refusal> {
        let name = &request.lora_name;
        {
            let catalog = self.catalog();
            if *name == catalog.names.base() {
                return Err(Refusal::new(409, "NameConflict", format!("'{}' is the base model's name", shown(name))));
            }
            if catalog.names.knows(name) && !request.load_inplace {
                let message = format!(
                    "the adapter '{}' is loaded already; load_inplace replaces it, unload_lora_adapter removes it",
                    shown(name)
                );
                return Err(Refusal::new(409, "AlreadyLoaded", message));
            }
            let (known, most) = (catalog.placed.len(), self.engine.limits.max_adapters as usize);
            if known >= most && !catalog.names.knows(name) {
                return Err(Refusal::new(
                    409,
                    "TooManyAdapters",
                    format!("{known} adapters are loaded, the limit is {most}"),
                ));
            }
        }
        let claims = Claims { digest: request.digest, base_digest: None };
        let loaded = self.loader.load(request.lora_path.clone(), claims).await?;
        let digest = loaded.adapter.digest;
        let wanted = Placed {
            name: name.clone(),
            namespace: String::new(),
            source: request.lora_path.clone(),
            pinned: request.pinned,
            floor: if request.pinned { Floor::Device } else { Floor::None },
            base_digest: None,
        };
        let reply = LoadReply {
            lora_name: name.clone(),
            digest,
            rank: loaded.rank,
            modules: loaded.modules,
            bytes: loaded.bytes,
            tier: Tier::Host,
        };
        self.take_in(wanted, loaded)?;
        // So that the list of models and the report show it from now on.
        let shown = |snapshot: &Snapshot| snapshot.facts(&digest).is_some_and(|facts| facts.loads > 0);
        self.engine.shows(SHOWN_TIME_MAX, shown).await;
        Ok(reply)
    }

    /// The step thread is told first; only what it has heard becomes true here.
    fn take_in(&self, wanted: Placed, loaded: Loaded) -> Result<(), Refusal> {
        let digest = loaded.adapter.digest;
        let mut catalog = self.catalog();
        let mut next = catalog.clone();
        let old = next.names.remove(&wanted.name).unwrap_or_default();
        let retire = next.give_up(&wanted.name, &old, |digest| self.knows(digest));
        next.names.add(&wanted.name, digest);
        next.names.point(&wanted.name, digest);
        next.placed.entry(digest).or_default().push(wanted);
        next.departed.remove(&digest);
        let mut loaded = Some(loaded);
        let others = old.iter().filter(|other| **other != digest);
        let enrolments = std::iter::once(&digest).chain(others).filter_map(|digest| next.enrolment(digest));
        let enrol = enrolments.map(|enrolment| {
            let loaded = loaded.take();
            let on_disk = loaded.as_ref().is_some_and(|loaded| loaded.on_disk);
            Newcomer { enrolment, on_disk, loaded }
        });
        let retire = retire.into_iter().filter(|gone| *gone != digest).collect();
        self.engine.send(Command::Change { enrol: enrol.collect(), retire })?;
        *catalog = next;
        Ok(())
    }

    /// Takes a name away at once; what runs under it finishes.
    ///
    /// # Errors
    /// 409 in a managed engine, 404 for an unknown name.
    pub fn unload(&self, name: &str) -> Result<BTreeSet<Digest>, Refusal> {
        self.standalone("unload")?;
        let mut catalog = self.catalog();
        let mut next = catalog.clone();
        let Some(digests) = next.names.remove(name) else {
            let message = format!("the adapter '{}' is not loaded", shown(name));
            return Err(Refusal { param: Some("lora_name".into()), ..Refusal::new(404, "AdapterNotFound", message) });
        };
        let retire = next.give_up(name, &digests, |digest| self.knows(digest));
        // What others still name is kept as they want it.
        let enrolments = digests.iter().filter_map(|digest| next.enrolment(digest));
        let enrol = enrolments.map(|enrolment| Newcomer { enrolment, on_disk: false, loaded: None }).collect();
        self.engine.send(Command::Change { enrol, retire })?;
        *catalog = next;
        for digest in &digests {
            tracing::info!(name = shown(name), %digest, "adapter unloaded");
        }
        Ok(digests)
    }

    /// The step thread still has something of it.
    fn knows(&self, digest: &Digest) -> bool {
        self.engine.snapshot().facts(digest).is_some()
    }

    fn standalone(&self, what: &str) -> Result<(), Refusal> {
        if self.mode == Mode::Standalone {
            return Ok(());
        }
        let message = format!("a managed engine takes no {what}: its adapters come with its placement");
        Err(Refusal::new(409, "Managed", message))
    }

    /// Makes a placement the desired state.
    ///
    /// # Errors
    /// 409 `Stale` or `NameConflict`, 400 for one that contradicts itself, 422 for a role that is not served.
    pub fn place(&self, placement: Placement) -> Result<(), Refusal> {
        if self.mode == Mode::Standalone {
            return Err(Refusal::new(
                409,
                "Standalone",
                "a standalone engine takes no placement: start it with --managed",
            ));
        }
        // One at a time until it is on disk, so that the last one accepted is the one that is kept.
        let _turn = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut catalog = self.catalog();
        if placement.boot_id != self.boot_id {
            let message =
                format!("the placement is for boot '{}', this is '{}'", shown(&placement.boot_id), self.boot_id);
            return Err(Refusal::new(409, "Stale", message));
        }
        if let Some(last) = &catalog.placement {
            let (new, old) = (placement.generation, last.generation);
            if new < old {
                return Err(Refusal::new(409, "Stale", format!("generation {new} is older than the accepted {old}")));
            }
            if new == old {
                let message = format!("generation {new} was accepted with another body");
                return if placement == *last { Ok(()) } else { Err(Refusal::new(409, "Stale", message)) };
            }
        }
        check_placement(&placement, catalog.names.base(), self.engine.limits.max_adapters as usize)?;
        self.put_in_force(&mut catalog, &placement)?;
        let (generation, adapters) = (placement.generation, placement.adapters.len());
        tracing::info!(generation, revision = placement.revision, adapters, "placement accepted");
        catalog.placement = Some(placement.clone());
        drop(catalog);
        self.keep(&placement);
        Ok(())
    }

    fn put_in_force(&self, catalog: &mut Catalog, placement: &Placement) -> Result<(), Refusal> {
        let mut next = catalog.clone();
        let (enrol, retire) = next.adopt(placement, |digest| self.knows(digest));
        let newcomer = |enrolment: Enrolment| Newcomer {
            on_disk: self.loader.is_on_disk(enrolment.digest),
            enrolment,
            loaded: None,
        };
        let enrol = enrol.into_iter().map(newcomer).collect();
        self.engine.send(Command::Change { enrol, retire })?;
        *catalog = next;
        Ok(())
    }

    fn keep(&self, placement: &Placement) {
        let Some(path) = &self.kept_at else { return };
        if let Err(error) = write_whole(path, placement) {
            tracing::warn!(path = %path.display(), %error, "the placement is not kept: a restart begins without adapters");
        }
    }

    /// Takes up the placement that the process before this one had, so that a restart serves before it is told to.
    pub fn restore(&self) {
        let Some(path) = self.kept_at.as_deref().filter(|path| path.exists()) else { return };
        let most = self.engine.limits.max_adapters as usize;
        let mut catalog = self.catalog();
        let restored = read_whole(path).and_then(|placement| {
            check_placement(&placement, catalog.names.base(), most)?;
            self.put_in_force(&mut catalog, &placement)?;
            Ok(placement.adapters.len())
        });
        match restored {
            Ok(adapters) => tracing::info!(adapters, "took up the placement of the process before"),
            Err(error) => tracing::warn!(path = %path.display(), %error, "the kept placement is not used"),
        }
    }
}

fn write_whole(path: &Path, placement: &Placement) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&beside, serde_json::to_vec(placement)?)?;
    std::fs::File::open(&beside)?.sync_all()?;
    std::fs::rename(&beside, path)
}

fn read_whole(path: &Path) -> Result<Placement, Refusal> {
    let unreadable = |error: String| Refusal::new(500, "Unreadable", format!("{}: {error}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))
}

#[cfg(test)]
mod tests;
