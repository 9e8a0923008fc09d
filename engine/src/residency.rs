//! Which adapters there are, and on which tier each one is. Identity is the digest; names live elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lorafleet_artifact::{Claims, Digest, Reason};
use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::{PageBudget, PageId, ResidentId, Upload};
use lorafleet_crds::wire::{Floor, Tier};

use crate::limits::Limits;
use crate::moves::{HostTier, Row};
use crate::pages::Pages;
use crate::refusal::Refusal;

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
    pub source: String,
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

    /// Whether a fetch for the one has an answer for the other too.
    pub fn fetches_the_same(&self, other: &Self) -> bool {
        (self.digest, &self.source, self.base_digest) == (other.digest, &other.source, other.base_digest)
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

#[derive(Debug)]
enum Host {
    Absent,
    Fetching,
    Present(Arc<HostAdapter>),
}

#[derive(Debug)]
struct Device {
    resident: ResidentId,
    pages: Vec<PageId>,
    /// So many of the pages are written, by the next step at the latest. Nobody uses it before all are.
    written: u32,
    /// What is written into them, until all are.
    from: Option<Arc<HostAdapter>>,
}

impl Device {
    fn pages_left(&self) -> u32 {
        self.pages.len() as u32 - self.written
    }
}

/// A fetch that failed; until `retry_at` its answer is given again without another try.
#[derive(Clone, Debug)]
struct Failure {
    refusal: Refusal,
    attempts: u32,
    retry_at: Instant,
}

#[derive(Debug)]
struct Entry {
    enrolment: Enrolment,
    /// No longer wanted: goes when its last user has gone.
    retired: bool,
    host: Host,
    device: Option<Device>,
    on_disk: bool,
    users: Arc<()>,
    last_used: Option<Instant>,
    /// When it came to the device or was last used there; orders eviction.
    touched: Instant,
    bytes: u64,
    pages: u32,
    rank: u32,
    modules: u32,
    loads: u64,
    evictions: u64,
    failure: Option<Failure>,
    /// Why its floor is not kept.
    note: Option<Refusal>,
}

impl Entry {
    fn leases(&self) -> u32 {
        Arc::strong_count(&self.users) as u32 - 1
    }

    /// The device copy, if it is whole.
    fn on_device(&self) -> Option<&Device> {
        self.device.as_ref().filter(|device| device.pages_left() == 0)
    }

    fn is_uploading(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.pages_left() > 0)
    }

    fn tier(&self) -> Tier {
        match (self.on_device(), &self.host) {
            (Some(_), _) => Tier::Device,
            (None, Host::Present(_)) => Tier::Host,
            _ if self.on_disk => Tier::Disk,
            _ => Tier::Source,
        }
    }
}

/// One adapter as reports and metrics show it.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub digest: Digest,
    pub tier: Tier,
    pub fetching: bool,
    pub retired: bool,
    pub pinned: bool,
    pub floor: Floor,
    pub bytes: u64,
    pub rank: u32,
    pub modules: u32,
    pub leases: u32,
    pub last_used: Option<Instant>,
    pub loads: u64,
    pub evictions: u64,
    pub failure: Option<Refusal>,
}

impl Facts {
    /// The floor is reached, or never will be without a change from outside.
    pub fn settled(&self) -> bool {
        let reached = match self.floor {
            Floor::None => true,
            // What was loaded once in this process has been verified; where there is no disk cache, its bytes are with
            // the source.
            Floor::Disk => self.loads > 0,
            Floor::Host => self.tier >= Tier::Host,
            Floor::Device => self.tier >= Tier::Device,
        };
        reached || self.failure.is_some()
    }
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
            host: Host::Absent,
            device: None,
            on_disk,
            users: Arc::new(()),
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
            entry.enrolment = enrolment;
        }
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
        entry.host = Host::Present(loaded.adapter);
        entry.bytes = loaded.bytes;
        entry.pages = loaded.pages;
        entry.rank = loaded.rank;
        entry.modules = loaded.modules;
        entry.on_disk = loaded.on_disk;
        entry.loads += 1;
        entry.touched = now;
        entry.failure = None;
    }

    /// Whether the end of a fetch concerns what is wanted now: the source or the claim may have changed on the way.
    pub fn still_asks_for(&self, fetched: &Enrolment) -> bool {
        self.entries.get(&fetched.digest).is_some_and(|entry| entry.enrolment.fetches_the_same(fetched))
    }

    /// A fetch has ended whose answer is nobody's any more.
    pub fn fetch_undone(&mut self, digest: &Digest) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.host = Host::Absent;
        }
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
        entry.host = Host::Absent;
        entry.failure = Some(Failure { refusal, attempts, retry_at: now + pause });
    }

    /// The answer for a request that names this adapter now, if it is known to be no.
    pub fn refusal(&self, digest: &Digest, now: Instant) -> Option<Refusal> {
        let Some(entry) = self.entries.get(digest) else {
            return Some(Refusal::new(404, "ModelNotFound", format!("no adapter {digest} is enrolled")));
        };
        let failure = entry.failure.as_ref()?;
        (failure.retry_at > now).then(|| failure.refusal.clone())
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

    /// Device pages of an adapter; 0 while unknown.
    pub fn pages_of(&self, digest: &Digest) -> u32 {
        self.entries.get(digest).map_or(0, |entry| entry.pages)
    }

    /// The same, but 0 where a floor holds it on the device.
    pub fn loose_pages_of(&self, digest: &Digest) -> u32 {
        self.entries.get(digest).map_or(0, |entry| entry.pages - pinned_pages(entry))
    }

    /// Its device copy, once the next step has it whole.
    pub fn resident(&self, digest: &Digest) -> Option<ResidentId> {
        self.entries.get(digest)?.on_device().map(|device| device.resident)
    }

    /// A copy is in host memory and no upload is under way that would be followed by its own: what it lacks is room.
    pub fn lacks_room(&self, digest: &Digest) -> bool {
        let lacks = |entry: &Entry| matches!(entry.host, Host::Present(_)) && entry.device.is_none();
        self.uploading.is_empty() && self.entries.get(digest).is_some_and(lacks)
    }

    /// On the device, whole or on its way, used by nobody, not held there by a floor.
    pub fn is_idle(&self, digest: &Digest) -> bool {
        self.entries.get(digest).is_some_and(idle)
    }

    /// Device pages of all idle adapters.
    pub fn idle_pages(&self) -> u32 {
        self.entries.values().filter(|entry| idle(entry)).map(|entry| entry.pages).sum()
    }

    /// Those of them that are half uploaded.
    pub fn uploading_pages(&self) -> u32 {
        let entries = self.uploading.iter().filter_map(|digest| self.entries.get(digest));
        entries.filter(|entry| idle(entry)).map(|entry| entry.pages).sum()
    }

    /// Device pages of adapters that a floor holds there.
    pub fn pinned_pages(&self) -> u32 {
        self.entries.values().map(pinned_pages).sum()
    }

    /// The same without this adapter's own.
    pub fn pinned_pages_beside(&self, digest: &Digest) -> u32 {
        self.pinned_pages() - self.entries.get(digest).map_or(0, pinned_pages)
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
            entry.host = Host::Fetching;
        }
    }

    pub fn drop_host(&mut self, digest: &Digest) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest)
            && matches!(entry.host, Host::Present(_))
        {
            entry.host = Host::Absent;
            entry.evictions += 1;
        }
    }

    /// Gives the device pages back. The caller tells the backend to forget the resident.
    pub fn drop_device(&mut self, digest: &Digest, pages: &mut Pages) -> Option<ResidentId> {
        self.changes += 1;
        let entry = self.entries.get_mut(digest)?;
        if entry.leases() > 0 {
            return None;
        }
        let device = entry.device.take()?;
        self.uploading.remove(digest);
        entry.evictions += 1;
        pages.release_adapter(&device.pages);
        Some(device.resident)
    }

    /// Takes all the pages of a device copy; `write` fills them.
    pub fn place(&mut self, digest: &Digest, pages: &mut Pages) {
        self.changes += 1;
        let Some(entry) = self.entries.get_mut(digest) else { return };
        let Host::Present(adapter) = &entry.host else { return };
        if entry.device.is_some() {
            return;
        }
        let Some(taken) = pages.take_adapter(entry.pages) else { return };
        let resident = ResidentId(self.next_resident);
        self.next_resident += 1;
        entry.device = Some(Device { resident, pages: taken, written: 0, from: Some(adapter.clone()) });
        self.uploading.insert(*digest);
    }

    /// The next piece of a device copy that has its pages. The caller puts it into the next batch.
    pub fn write(&mut self, digest: &Digest, pages: u32, now: Instant) -> Option<Upload> {
        self.changes += 1;
        let entry = self.entries.get_mut(digest)?;
        entry.touched = now;
        let device = entry.device.as_mut()?;
        let part = device.written..device.written + pages.min(device.pages_left());
        let adapter = device.from.clone()?;
        device.written = part.end;
        if device.pages_left() == 0 {
            device.from = None;
            self.uploading.remove(digest);
        }
        Some(Upload { resident: device.resident, adapter, pages: device.pages.clone(), part })
    }

    /// A floor that cannot be kept: the adapter is served on demand, and the report says why its floor is not met.
    pub fn floor_refused(&mut self, digest: &Digest, refusal: Refusal) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.enrolment.pinned = false;
            entry.enrolment.floor = Floor::None;
            entry.note = Some(refusal);
        }
    }

    /// Takes back a device copy that is not there.
    pub fn forget_resident(&mut self, resident: ResidentId, pages: &mut Pages) {
        self.changes += 1;
        let held = |entry: &Entry| entry.device.as_ref().is_some_and(|device| device.resident == resident);
        let Some((digest, entry)) = self.entries.iter_mut().find(|(_, entry)| held(entry)) else { return };
        self.uploading.remove(digest);
        if let Some(device) = entry.device.take() {
            pages.release_adapter(&device.pages);
        }
    }

    pub fn host_bytes(&self) -> u64 {
        let present = self.entries.values().filter(|entry| matches!(entry.host, Host::Present(_)));
        present.map(|entry| entry.bytes).sum()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn device_pages(&self) -> u32 {
        let devices = self.entries.values().filter_map(|entry| entry.device.as_ref());
        devices.map(|device| device.pages.len() as u32).sum()
    }

    /// What is half on the device is listed, and can still be written.
    ///
    /// # Errors
    /// What is broken.
    pub fn check(&self) -> Result<(), String> {
        let uploading = self.entries.iter().filter(|(_, entry)| entry.is_uploading());
        let uploading: BTreeSet<Digest> = uploading.map(|(digest, _)| *digest).collect();
        if uploading != self.uploading {
            return Err(format!("{uploading:?} are half on the device, listed are {:?}", self.uploading));
        }
        let lost = self.entries.iter().find(|(_, entry)| {
            let source = entry.device.as_ref().is_some_and(|device| device.from.is_some());
            source != entry.is_uploading() || (source && !matches!(entry.host, Host::Present(_)))
        });
        lost.map_or(Ok(()), |(digest, _)| Err(format!("{digest} is half on the device without its host copy")))
    }

    /// Frees the least recently used idle adapter's device pages.
    pub fn evict_idle(&mut self, pages: &mut Pages) -> Option<ResidentId> {
        let oldest = self.entries.iter().filter(|(_, entry)| idle(entry)).min_by_key(|(_, entry)| entry.touched);
        let digest = *oldest?.0;
        self.drop_device(&digest, pages)
    }

    /// Forgets retired adapters that nobody uses or waits for. Returns the residents that the backend must forget.
    pub fn sweep(&mut self, waited_for: impl Fn(&Digest) -> bool, pages: &mut Pages) -> Vec<ResidentId> {
        let gone: Vec<Digest> = self
            .entries
            .iter()
            .filter(|(digest, entry)| {
                // One that is on its way stays until it is here, so that no second fetch starts beside the first.
                let unused = || entry.leases() == 0 && !matches!(entry.host, Host::Fetching);
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

    /// The tiers as `moves` looks at them.
    pub fn rows(&self, now: Instant) -> Vec<Row> {
        self.entries
            .iter()
            .map(|(digest, entry)| Row {
                digest: *digest,
                host: match entry.host {
                    Host::Absent => HostTier::Absent,
                    Host::Fetching => HostTier::Fetching,
                    Host::Present(_) => HostTier::Present,
                },
                device: entry.device.is_some(),
                pages_left: entry.device.as_ref().map_or(0, Device::pages_left),
                bytes: entry.bytes,
                pages: entry.pages,
                leases: entry.leases(),
                floor: if entry.retired { Floor::None } else { entry.enrolment.floor },
                pinned: entry.enrolment.pinned && !entry.retired,
                verified: entry.loads > 0,
                touched: entry.touched,
                may_fetch: entry.failure.as_ref().is_none_or(|failure| failure.retry_at <= now),
            })
            .collect()
    }

    pub fn facts(&self) -> Vec<Facts> {
        self.entries
            .iter()
            .map(|(digest, entry)| Facts {
                digest: *digest,
                tier: entry.tier(),
                fetching: matches!(entry.host, Host::Fetching),
                retired: entry.retired,
                pinned: entry.enrolment.pinned,
                floor: entry.enrolment.floor,
                bytes: entry.bytes,
                rank: entry.rank,
                modules: entry.modules,
                leases: entry.leases(),
                last_used: entry.last_used,
                loads: entry.loads,
                evictions: entry.evictions,
                failure: entry.failure.as_ref().map(|failure| failure.refusal.clone()).or_else(|| entry.note.clone()),
            })
            .collect()
    }
}

fn held_on_device(entry: &Entry) -> bool {
    entry.enrolment.pinned && entry.enrolment.floor == Floor::Device && !entry.retired
}

fn pinned_pages(entry: &Entry) -> u32 {
    if entry.device.is_some() && held_on_device(entry) { entry.pages } else { 0 }
}

fn idle(entry: &Entry) -> bool {
    entry.device.is_some() && entry.leases() == 0 && !held_on_device(entry)
}
