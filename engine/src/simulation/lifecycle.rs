//! Names that are loaded, replaced, unloaded and asked for in any order, by the fleet's own code: each answer is of the very
//! content that its name meant when it was asked, and when all names are gone, so is everything that they held.

use std::collections::BTreeMap;
use std::future::Future as _;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Waker};

use lorafleet_artifact::Claims;
use lorafleet_crds::wire::{LoadReply, LoadRequest};

use super::*;
use crate::engine::Engine;
use crate::fleet::{Fleet, Load, Loading, Mode};
use crate::names::Resolved;

/// What lies at `test://N` at this moment: the number of a content, or nothing.
type Shelf = Arc<Mutex<BTreeMap<u8, u8>>>;

const PLACES: u8 = 4;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

struct Source(Shelf);

impl Load for Source {
    fn load(&self, source: String, claims: Claims) -> Loading {
        let place = source.strip_prefix("test://").unwrap().parse().unwrap();
        let found = self.0.lock().unwrap().get(&place).copied().map(digest);
        Box::pin(std::future::ready(match found {
            None => Err(Refusal::new(404, "NotFound", "nothing lies there")),
            Some(found) if claims.digest.is_some_and(|claimed| claimed != found) => {
                Err(Refusal::new(422, "DigestMismatch", "other bytes lie there"))
            }
            Some(found) => Ok(loaded(found)),
        }))
    }

    fn disk_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    fn is_on_disk(&self, _digest: Digest) -> bool {
        false
    }
}

struct Life {
    world: World,
    shelf: Shelf,
    fleet: Fleet,
    commands: mpsc::Receiver<Command>,
    runtime: tokio::runtime::Runtime,
    /// What each name means, by our own books.
    meant: BTreeMap<&'static str, Digest>,
    asked: u64,
    replaced: u64,
}

impl Life {
    fn new(seed: u64) -> Self {
        let limits = Limits { max_queued: 48, ..limits() };
        let pages = 24 + (seed % 5) as u32 * 8;
        let mut world = World::new(seed, limits.clone(), pages);
        // It begins with nothing.
        (0..ADAPTERS).for_each(|number| world.retire(digest(number)));
        world.step();
        world.refused = &["NotFound", "DigestMismatch"];
        world.watched.faults.store(seed.is_multiple_of(4), Ordering::Relaxed);
        let (sender, commands) = mpsc::sync_channel(64);
        let budget = world.stepper.state.budget;
        let engine = Engine::new(sender, world.snapshot.clone(), Arc::new(limits), budget);
        world.queue = engine.queue.clone();
        let shelf = Shelf::default();
        let source = Arc::new(Source(shelf.clone()));
        let fleet = Fleet::new("boot".into(), Mode::Standalone, "base".into(), engine, source, None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        Self { world, shelf, fleet, commands, runtime, meant: BTreeMap::new(), asked: 0, replaced: 0 }
    }

    /// What the fleet has told the step thread.
    fn pass_on(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            self.world.stepper.take(command, self.world.now);
        }
    }

    fn a_name(&mut self) -> &'static str {
        NAMES[self.world.random.index(NAMES.len())]
    }

    /// The client hangs up as soon as the load has been taken in; it counts all the same.
    fn load(&mut self) {
        let name = self.a_name();
        let place = self.world.random.below(PLACES.into()) as u8;
        let lies_there = self.shelf.lock().unwrap().get(&place).copied().map(digest);
        let load_inplace = self.world.random.below(3) > 0;
        let request = LoadRequest {
            lora_name: name.to_owned(),
            lora_path: format!("test://{place}"),
            load_inplace,
            digest: None,
            pinned: self.world.random.below(8) == 0,
        };
        let fleet = &self.fleet;
        let ended: Option<Result<LoadReply, Refusal>> = self.runtime.block_on(async {
            let mut load = pin!(fleet.load(request));
            match load.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                std::task::Poll::Ready(ended) => Some(ended),
                std::task::Poll::Pending => None,
            }
        });
        match (lies_there, self.meant.contains_key(name) && !load_inplace, ended) {
            (_, true, Some(Err(refusal))) => assert_eq!(refusal.code, "AlreadyLoaded"),
            (None, false, Some(Err(refusal))) => assert_eq!(refusal.code, "NotFound"),
            (Some(digest), false, None | Some(Ok(_))) => {
                let before = self.meant.insert(name, digest);
                self.replaced += u64::from(before.is_some_and(|before| before != digest));
            }
            (lies_there, taken, ended) => panic!("{lies_there:?}, taken {taken}: {ended:?}"),
        }
    }

    fn unload(&mut self) {
        let name = self.a_name();
        let expected = self.meant.remove(name);
        match (expected, self.fleet.unload(name)) {
            (Some(digest), Ok(digests)) => assert_eq!(digests, BTreeSet::from([digest])),
            (None, Err(refusal)) => assert_eq!(refusal.status, 404),
            (expected, unloaded) => panic!("{name} means {expected:?}: {unloaded:?}"),
        }
    }

    fn ask(&mut self) {
        let name = self.a_name();
        let (length, max_tokens) = (1 + self.world.random.below(20) as u32, 1 + self.world.random.below(12) as u32);
        let group = self.world.random.next();
        let expected = self.meant.get(name).copied();
        let owner = expected.map_or(KvOwner::Base, KvOwner::Adapter);
        // Few distinct beginnings, so that pages of one content would be found under another if they could be.
        let draft = self.world.draft(owner, (0..length).collect(), max_tokens, group);
        let submitted = self.fleet.submit(name, vec![draft]);
        if submitted.is_err() {
            self.world.clients.pop();
        } else if let Some(client) = self.world.clients.last_mut() {
            client.enrolled = true;
        }
        match (expected, submitted) {
            (Some(digest), Ok(Resolved::Adapter { digest: found, .. })) => {
                assert_eq!(found, digest, "{name} means another content");
                self.asked += 1;
            }
            (None, Err(refusal)) => assert_eq!(refusal.code, "ModelNotFound"),
            (Some(_), Err(refusal)) => assert_eq!(refusal.code, "Busy"),
            (expected, submitted) => panic!("{name} means {expected:?}: {submitted:?}"),
        }
    }

    /// A fetch ends with what lies there now: nothing, the content that was asked for, or another one, which is refused.
    fn end_a_fetch(&mut self) {
        let fetched = {
            let mut pending = self.world.pending.lock().unwrap();
            if pending.is_empty() {
                return;
            }
            let at = self.world.random.index(pending.len());
            pending.swap_remove(at)
        };
        let runtime = &self.runtime;
        let source = Source(self.shelf.clone());
        let result = runtime.block_on(crate::serve::load_from_any(&source, &fetched));
        self.world.stepper.take(Command::Fetched(fetched, result, Duration::ZERO), self.world.now);
    }

    fn turn(&mut self) {
        match self.world.random.below(14) {
            0..5 => self.ask(),
            5 | 6 => self.load(),
            7 => self.unload(),
            8 | 9 => self.end_a_fetch(),
            10 => {
                // Somebody writes to the source, or takes away what lies there.
                let (place, content) =
                    (self.world.random.below(PLACES.into()) as u8, self.world.random.below(ADAPTERS.into()));
                let mut shelf = self.shelf.lock().unwrap();
                if self.world.random.below(8) == 0 {
                    shelf.remove(&place)
                } else {
                    shelf.insert(place, content as u8)
                };
            }
            11 if !self.world.clients.is_empty() => {
                let at = self.world.random.index(self.world.clients.len());
                self.world.clients.swap_remove(at);
            }
            _ => {}
        }
        self.pass_on();
        self.world.step();
    }

    /// Everything ends, every name goes, and nothing is left behind.
    fn end(mut self) -> [u64; 4] {
        for _ in 0..20_000 {
            self.end_a_fetch();
            self.world.step();
            if self.world.clients.is_empty() && self.world.pending.lock().unwrap().is_empty() {
                break;
            }
        }
        assert!(self.world.clients.is_empty(), "requests that never end: {:#?}", self.world.stepper.state.waiting);
        for name in NAMES {
            assert_eq!(self.fleet.unload(name).is_ok(), self.meant.remove(name).is_some());
        }
        self.pass_on();
        self.world.watched.faults.store(false, Ordering::Relaxed);
        // The backend hears of drops with the next step that there is.
        self.world.submit(KvOwner::Base, vec![1], 1, 1);
        self.world.settle();
        let state = &self.world.stepper.state;
        let pages = state.pages.counts();
        assert_eq!((pages.adapter, pages.kv, pages.free + pages.cached), (0, 0, pages.total));
        assert_eq!((state.residency.len(), state.residency.host_bytes(), state.residency.device_pages()), (0, 0, 0));
        assert_eq!(self.world.watched.residents.load(Ordering::Relaxed), 0, "the backend holds adapters");
        assert!(self.fleet.catalog().placed.is_empty());
        [self.asked, self.world.done, self.replaced, self.world.watched.pieces.load(Ordering::Relaxed)]
    }
}

#[test]
fn every_answer_is_of_what_its_name_meant_and_nothing_outlives_its_names() {
    let mut sums = [0; 4];
    for seed in 0..60 {
        let outcome = std::panic::catch_unwind(|| {
            let mut life = Life::new(seed);
            (0..800).for_each(|_| life.turn());
            life.end()
        });
        let outcome = outcome.unwrap_or_else(|cause| {
            eprintln!("seed {seed} failed");
            std::panic::resume_unwind(cause)
        });
        sums.iter_mut().zip(outcome).for_each(|(sum, found)| *sum += found);
    }
    let [asked, done, replaced, pieces] = sums;
    println!("{asked} asked, {done} answered, {replaced} contents replaced under a name, {pieces} came in pieces");
    assert!(done > 3_000 && replaced > 500 && pieces > 300, "the simulation tests nothing");
}

#[test]
fn what_failed_for_an_old_enrolment_is_not_held_against_the_new_one() {
    let mut world = World::new(4, limits(), 64);
    let broken = digest(BROKEN);
    let refused = |world: &World| world.stepper.state.residency.refusal(&broken, world.now);
    let wanted = |source: &str, claim: Option<Digest>| Enrolment {
        name: "broken".to_owned(),
        digest: broken,
        sources: vec![source.to_owned()],
        pinned: false,
        floor: Floor::None,
        base_digest: claim,
    };
    let other = || wanted("test://other", Some(digest(0)));
    // Refused for a while, unless somebody changes something: another source, another claim, or away and back again.
    let changes: [&dyn Fn(&mut World); 3] =
        [&|world| world.enrol_from(wanted("test://other", None)), &|world| world.enrol_from(other()), &|world| {
            world.retire(broken);
            world.enrol_from(other());
        }];
    for change in changes {
        world.submit(KvOwner::Adapter(broken), vec![1], 1, 1);
        world.step();
        let fetched = world.pending.lock().unwrap().pop().unwrap();
        world
            .stepper
            .take(Command::Fetched(fetched, Err(Refusal::new(422, "Malformed", "broken")), Duration::ZERO), world.now);
        world.step();
        assert!(world.clients.is_empty() && refused(&world).is_some());
        change(&mut world);
        assert_eq!(refused(&world), None);
    }
    // The source changes while the fetch is under way: its end is nobody's, and the one who waits waits on.
    world.submit(KvOwner::Adapter(broken), vec![1], 1, 1);
    world.step();
    let old = world.pending.lock().unwrap().pop().unwrap();
    world.enrol_from(wanted("test://new", None));
    world.stepper.take(Command::Fetched(old, Err(Refusal::new(422, "Malformed", "broken")), Duration::ZERO), world.now);
    assert_eq!((world.clients.len(), refused(&world)), (1, None));
    world.step();
    let new = world.pending.lock().unwrap().pop().unwrap();
    assert_eq!(new, wanted("test://new", None));
    world.stepper.take(Command::Fetched(new, Ok(loaded(broken)), Duration::ZERO), world.now);
    world.settle();
}

#[test]
fn what_the_source_held_is_looked_at_again_and_what_may_not_be_read_is_not() {
    let mut world = World::new(5, limits(), 64);
    let broken = digest(BROKEN);
    let mut refuse = |status: u16, code: &'static str, pause: Duration| {
        world.now += pause;
        world.submit(KvOwner::Adapter(broken), vec![1], 1, 1);
        world.step();
        let fetched = world.pending.lock().unwrap().pop();
        let asked = fetched.is_some();
        if let Some(wanted) = fetched {
            world
                .stepper
                .take(Command::Fetched(wanted, Err(Refusal::new(status, code, "not yet")), Duration::ZERO), world.now);
        }
        world.step();
        assert!(world.clients.is_empty(), "it is answered either way");
        asked
    };
    assert!(refuse(422, "DigestMismatch", Duration::ZERO));
    assert!(!refuse(422, "DigestMismatch", Duration::from_millis(500)));
    assert!(refuse(422, "Malformed", Duration::from_millis(600)));
    assert!(refuse(404, "NotFound", Duration::from_secs(61)));
    assert!(refuse(403, "SourceForbidden", Duration::from_secs(61)));
    assert!(!refuse(403, "SourceForbidden", Duration::from_secs(61)));
}
