//! Which adapters there are, and on which tier each one is. Identity is the digest; names live elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lorafleet_artifact::{Claims, Digest, Reason, Scheme, SourceUri};
use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::{PageBudget, ResidentId};
use lorafleet_crds::wire::{Floor, Tier};

use crate::limits::Limits;
use crate::moves::Store;
use crate::pages::Pages;
use crate::refusal::Refusal;

mod device;
mod entry;
mod shown;

use entry::{Entry, Failure};

pub use shown::Facts;

/// Keeps an adapter's device pages where they are. One per running sequence; dropping it gives the use back.
#[derive(Debug)]
pub struct Lease(#[expect(dead_code, reason = "its count is the number of leases")] Arc<()>);

/// A verified adapter as it arrives in host memory.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub adapter: Arc<HostAdapter>,
    /// In host memory.
    pub bytes: u64,
    /// On the device.
    pub pages: u32,
    pub rank: u32,
    pub modules: u32,
    /// A copy is in the disk cache.
    pub on_disk: bool,
}

impl Loaded {
    /// An adapter that the tiers could never hold is refused with both values.
    ///
    /// # Errors
    /// 422 `TooLarge`.
    pub fn affordable(self, limits: &Limits, budget: PageBudget) -> Result<Self, Refusal> {
        let (bytes, host) = (self.bytes, limits.host_cache_bytes);
        if bytes > host {
            let message = format!("the adapter takes {bytes} bytes of host memory, the host cache has {host}");
            return Err(Refusal::new(422, "TooLarge", message));
        }
        let (pages, most) = (self.pages, budget.pages);
        if pages >= most {
            let message = format!("the adapter takes {pages} pages, the device has {most} for adapters and tokens");
            return Err(Refusal::new(422, "TooLarge", message));
        }
        Ok(self)
    }
}

/// What this process shall know about an adapter: where it comes from and how near it must be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enrolment {
    /// For people; what it is, the digest says.
    pub name: String,
    pub digest: Digest,
    /// Where it may come from: who fetches it tries one after the other.
    pub sources: Vec<String>,
    pub pinned: bool,
    pub floor: Floor,
    /// The base that it was made for, as the one who enrolled it says.
    pub base_digest: Option<Digest>,
}

impl Enrolment {
    /// What whoever fetches it holds its bytes against.
    pub fn claims(&self) -> Claims {
        Claims { digest: Some(self.digest), base_digest: self.base_digest }
    }

    /// Where its first source is. What is no source at all is refused at once.
    fn store(&self) -> Store {
        let source = self.sources.first().and_then(|source| source.parse::<SourceUri>().ok());
        let Some(source) = source.filter(|source| source.scheme() != Scheme::File) else { return Store::Here };
        let mut hasher = DefaultHasher::new();
        (source.scheme(), source.authority()).hash(&mut hasher);
        Store::Away(hasher.finish())
    }

    /// Whether a fetch for the one has an answer for the other too.
    pub fn fetches_the_same(&self, other: &Self) -> bool {
        (self.digest, &self.sources, self.base_digest) == (other.digest, &other.sources, other.base_digest)
    }
}

/// An adapter on its way into the engine's knowledge.
#[derive(Debug)]
pub struct Newcomer {
    pub enrolment: Enrolment,
    /// The disk cache has a copy, perhaps from a process before this one.
    pub on_disk: bool,
    /// Its bytes, if they are at hand.
    pub loaded: Option<Loaded>,
}

#[derive(Debug, Default)]
pub struct Residency {
    entries: BTreeMap<Digest, Entry>,
    next_resident: u64,
    /// Grows with every change that may lead to a move.
    changes: u64,
    /// Half on the device.
    uploading: BTreeSet<Digest>,
}

const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
const RETRY_REFUSED: Duration = Duration::from_secs(600);

impl Residency {
    /// The same number means that nothing has changed that a move could follow from; leases and uses apart.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Makes an adapter known, or changes how a known one is kept. A retired one is wanted again.
    pub fn enrol(&mut self, enrolment: Enrolment, on_disk: bool, now: Instant) {
        self.changes += 1;
        let entry = self.entries.entry(enrolment.digest).or_insert_with(|| Entry {
            enrolment: enrolment.clone(),
            retired: false,
            host: None,
            fetching: false,
            device: None,
            was_on_device: false,
            on_disk,
            store: enrolment.store(),
            users: Arc::new(()),
            pinned: None,
            last_used: None,
            touched: now,
            bytes: 0,
            pages: 0,
            rank: 0,
            modules: 0,
            loads: 0,
            evictions: 0,
            failure: None,
            note: None,
        });
        // Whoever changes something, or wants back what was let go, gets a new answer and not the last one.
        if entry.enrolment != enrolment || entry.retired {
            entry.failure = None;
            entry.note = None;
            entry.store = enrolment.store();
            entry.enrolment = enrolment;
        }
        entry.pinned = entry.enrolment.pinned.then(|| entry.pinned.unwrap_or(now));
        entry.retired = false;
    }

    /// No longer wanted: new requests cannot name it, running ones finish on it.
    pub fn retire(&mut self, digest: Digest) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(&digest) {
            entry.retired = true;
        }
    }

    /// Takes a fetched adapter into the host tier.
    pub fn arrived(&mut self, digest: Digest, loaded: Loaded, now: Instant) {
        self.changes += 1;
        let Some(entry) = self.entries.get_mut(&digest) else { return };
        entry.host = Some(loaded.adapter);
        entry.bytes = loaded.bytes;
        entry.pages = loaded.pages;
        entry.rank = loaded.rank;
        entry.modules = loaded.modules;
        entry.on_disk = loaded.on_disk;
        entry.loads += 1;
        entry.touched = now;
        entry.failure = None;
    }

    /// A fetch has ended. Says whether what it failed for concerns anybody: the source or the claim may have changed on
    /// the way, or a copy may have come from elsewhere.
    pub fn fetch_ended(&mut self, fetched: &Enrolment) -> bool {
        self.changes += 1;
        let Some(entry) = self.entries.get_mut(&fetched.digest) else { return false };
        entry.fetching = false;
        entry.host.is_none() && entry.enrolment.fetches_the_same(fetched)
    }

    /// Remembers why a fetch failed, and when the next may be tried.
    pub fn failed(&mut self, digest: Digest, refusal: Refusal, now: Instant) {
        self.changes += 1;
        let Some(entry) = self.entries.get_mut(&digest) else { return };
        let attempts = entry.failure.as_ref().map_or(0, |failure| failure.attempts) + 1;
        // What a source holds may be half uploaded, or other bytes for a moment: it is looked at again. What this process
        // may not read stays so as long as it runs.
        let pause = if refusal.code == Reason::SourceForbidden.as_str() {
            RETRY_REFUSED
        } else {
            RETRY_FIRST.saturating_mul(1 << (attempts - 1).min(6)).min(RETRY_MAX)
        };
        entry.failure = Some(Failure { refusal, attempts, retry_at: now + pause });
    }

    /// The answer for a request that names this adapter now, if it is known to be no.
    pub fn refusal(&self, digest: &Digest, now: Instant) -> Option<Refusal> {
        let Some(entry) = self.entries.get(digest) else {
            return Some(Refusal::new(404, "ModelNotFound", format!("no adapter {digest} is enrolled")));
        };
        let failure = entry.failure.as_ref()?;
        let left = failure.retry_at.checked_duration_since(now).filter(|left| !left.is_zero())?;
        let seconds = u32::try_from(left.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
        // Who may come back is told when that is of use.
        let retry_after_seconds = failure.refusal.retry_after_seconds.map(|_| seconds);
        Some(Refusal { retry_after_seconds, ..failure.refusal.clone() })
    }

    pub fn enrolment(&self, digest: &Digest) -> Option<&Enrolment> {
        self.entries.get(digest).map(|entry| &entry.enrolment)
    }

    pub fn tier(&self, digest: &Digest) -> Option<Tier> {
        self.entries.get(digest).map(Entry::tier)
    }

    /// Bytes of an adapter; 0 while unknown.
    pub fn bytes_of(&self, digest: &Digest) -> u64 {
        self.entries.get(digest).map_or(0, |entry| entry.bytes)
    }

    pub fn lease(&mut self, digest: &Digest, now: Instant) -> Option<Lease> {
        let entry = self.entries.get_mut(digest)?;
        entry.last_used = Some(now);
        entry.touched = now;
        Some(Lease(entry.users.clone()))
    }

    pub fn leases(&self) -> BTreeMap<Digest, u32> {
        let counted = self.entries.iter().map(|(digest, entry)| (*digest, entry.leases()));
        counted.filter(|(_, leases)| *leases > 0).collect()
    }

    pub fn fetch_started(&mut self, digest: &Digest) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.fetching = true;
        }
    }

    pub fn drop_host(&mut self, digest: &Digest) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest)
            && entry.host.take().is_some()
            && entry.on_device().is_none()
        {
            entry.evictions += 1;
        }
    }

    /// A floor that cannot be kept: the adapter is served on demand, and the report says why its floor is not met.
    pub fn floor_refused(&mut self, digest: &Digest, refusal: Refusal) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.pinned = None;
            entry.enrolment.pinned = false;
            entry.enrolment.floor = Floor::None;
            entry.note = Some(refusal);
        }
    }

    pub fn host_bytes(&self) -> u64 {
        let present = self.entries.values().filter(|entry| entry.host.is_some());
        present.map(|entry| entry.bytes).sum()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Forgets retired adapters that nobody uses or waits for. Returns the residents that the backend must forget.
    pub fn sweep(&mut self, waited_for: impl Fn(&Digest) -> bool, pages: &mut Pages) -> Vec<ResidentId> {
        let gone: Vec<Digest> = self
            .entries
            .iter()
            .filter(|(digest, entry)| {
                // One that is on its way stays until it is here, so that no second fetch starts beside the first.
                let unused = || entry.leases() == 0 && !entry.fetching;
                entry.retired && unused() && !waited_for(digest)
            })
            .map(|(digest, _)| *digest)
            .collect();
        let dropped = gone.iter().filter_map(|digest| self.drop_device(digest, pages)).collect();
        for digest in &gone {
            if let Some(entry) = self.entries.remove(digest) {
                tracing::info!(name = entry.enrolment.name, %digest, bytes = entry.bytes, "adapter dropped");
            }
        }
        dropped
    }
}
