//! Seeded simulation of the whole state machine against a backend whose tokens depend on every page that it reads.
//!
//! The next token is a hash over the weights and all tokens before it, as they are found in the pages. One wrong page,
//! one page read under other weights, one token computed twice, and the answer differs from the same prompt alone.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use lorafleet_artifact::{Digest, Fitted};
use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::PageBudget;
use lorafleet_crds::wire::Floor;
use tokio::sync::mpsc as events;
use tokio::sync::watch;

use crate::limits::Limits;
use crate::metrics::Meter;
use crate::pages::KvOwner;
use crate::queue::Queue;
use crate::refusal::Refusal;
use crate::residency::{Enrolment, Loaded, Newcomer};
use crate::sequence::{Draft, Event, Finish, NewSequence, Params, TokenEvent};
use crate::snapshot::Snapshot;
use crate::state::State;
use crate::step::{Command, Fetch, Stepper};

mod lifecycle;
mod machine;
mod told;
mod turns;

#[path = "../tests/support/random.rs"]
pub(crate) mod random;

use machine::{Machine, Watched};
use random::Random;

const ADAPTERS: u8 = 6;
/// Its fetch always fails.
const BROKEN: u8 = 5;
const END: u32 = 7;

fn digest(number: u8) -> Digest {
    Digest::from_bytes([number + 1; 32])
}

fn next_token(weights: Option<Digest>, tokens: &[u32]) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let weights = weights.map_or(0, |digest| digest.as_bytes()[0]);
    for value in std::iter::once(u32::from(weights)).chain(tokens.iter().copied()) {
        hash = (hash ^ u64::from(value)).wrapping_mul(0x0100_0000_01b3);
    }
    (hash >> 40) as u32 % 40
}

fn answer_alone(owner: KvOwner, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
    let weights = match owner {
        KvOwner::Base => None,
        KvOwner::Adapter(digest) => Some(digest),
    };
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        let token = next_token(weights, &tokens);
        tokens.push(token);
        if token == END {
            break;
        }
    }
    tokens[prompt.len()..].to_vec()
}

struct Pending(Arc<Mutex<Vec<Enrolment>>>);

impl Fetch for Pending {
    fn start(&mut self, wanted: &Enrolment) {
        assert!(!wanted.sources.is_empty() && wanted.sources.iter().all(|source| source.starts_with("test://")));
        let mut pending = self.0.lock().unwrap();
        let twice = pending.iter().any(|other| other.digest == wanted.digest);
        assert!(!twice, "one fetch at a time per digest");
        pending.push(wanted.clone());
    }
}

struct Client {
    owner: KvOwner,
    /// The adapter was enrolled when it asked.
    enrolled: bool,
    prompt: Vec<u32>,
    max_tokens: u32,
    events: events::Receiver<Event>,
    tokens: Vec<u32>,
    end: Option<Result<Finish, Refusal>>,
}

struct World {
    random: Random,
    stepper: Stepper,
    pending: Arc<Mutex<Vec<Enrolment>>>,
    queue: Queue,
    clients: Vec<Client>,
    enrolled: BTreeSet<Digest>,
    now: Instant,
    done: u64,
    cached: u64,
    /// What a fetch may be refused for, whatever adapter it is.
    refused: &'static [&'static str],
    /// The codes of all refusals so far.
    told: Vec<String>,
    watched: Arc<Watched>,
    meter: Arc<Meter>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
}

impl World {
    fn new(seed: u64, limits: Limits, pages: u32) -> Self {
        let watched = Arc::<Watched>::default();
        let meter = Arc::new(Meter::new().unwrap());
        let budget = PageBudget { page_bytes: 64, pages, page_tokens: 4 };
        let machine = Machine::new(seed, budget, limits.clone(), watched.clone());
        let pending = Arc::new(Mutex::new(Vec::new()));
        let (snapshot, shown) = watch::channel(Arc::new(Snapshot::default()));
        let (_, commands) = mpsc::sync_channel(1);
        let queue = Queue::new(limits.max_queued);
        let stepper = Stepper::new(
            State::new(limits, budget),
            Box::new(machine),
            commands,
            Box::new(Pending(pending.clone())),
            snapshot,
            meter.clone(),
        );
        let mut world = Self {
            random: Random::new(seed),
            stepper,
            pending,
            queue,
            clients: Vec::new(),
            enrolled: BTreeSet::new(),
            now: Instant::now(),
            done: 0,
            cached: 0,
            refused: &[],
            told: Vec::new(),
            watched,
            meter,
            snapshot: shown,
        };
        for number in 0..ADAPTERS {
            world.enrol(number, false);
        }
        world
    }

    fn enrol(&mut self, number: u8, pinned: bool) {
        let floor = match pinned {
            false => Floor::None,
            true if self.random.below(2) == 0 => Floor::Host,
            true => Floor::Device,
        };
        let sources = vec![format!("test://{number}")];
        let name = number.to_string();
        self.enrol_from(Enrolment { name, digest: digest(number), sources, pinned, floor, base_digest: None });
    }

    fn retire(&mut self, digest: Digest) {
        self.enrolled.remove(&digest);
        self.stepper.take(Command::Change { enrol: Vec::new(), retire: vec![digest] }, self.now);
    }

    fn enrol_from(&mut self, enrolment: Enrolment) {
        self.enrolled.insert(enrolment.digest);
        let newcomer = Newcomer { enrolment, on_disk: false, loaded: None };
        self.stepper.take(Command::Change { enrol: vec![newcomer], retire: Vec::new() }, self.now);
    }

    /// Says whether there were places for it.
    fn submit(&mut self, owner: KvOwner, prompt: Vec<u32>, max_tokens: u32, choices: u64) -> bool {
        let places: Result<Vec<_>, _> = (0..choices).map(|_| self.queue.place(owner)).collect();
        let Ok(places) = places else { return false };
        let group = self.random.next();
        let drafts = places.into_iter().map(|place| {
            let draft = self.draft(owner, prompt.clone(), max_tokens, group);
            NewSequence { owner, place: Some(place), draft }
        });
        let sequences = drafts.collect();
        self.stepper.take(Command::Submit(sequences), self.now);
        true
    }

    /// One sequence of a request, and the client who reads its answer.
    fn draft(&mut self, owner: KvOwner, prompt: Vec<u32>, max_tokens: u32, group: u64) -> Draft {
        let enrolled = match owner {
            KvOwner::Base => true,
            KvOwner::Adapter(digest) => self.enrolled.contains(&digest),
        };
        let (events, receiver) = events::channel(max_tokens as usize + 1);
        let (tokens, end) = (Vec::new(), None);
        self.clients.push(Client {
            owner,
            enrolled,
            prompt: prompt.clone(),
            max_tokens,
            events: receiver,
            tokens,
            end,
        });
        Draft {
            prompt: prompt.into(),
            params: Arc::new(Params { stop_tokens: Arc::new([END]), ..Params::greedy(max_tokens) }),
            seed: 0,
            group,
            events,
            arrived: self.now,
        }
    }

    fn random_request(&mut self) {
        let owner = match self.random.below(u64::from(ADAPTERS) + 2) as u8 {
            number if number < ADAPTERS => KvOwner::Adapter(digest(number)),
            _ => KvOwner::Base,
        };
        // Few distinct beginnings, so that prefixes are shared.
        let beginning = self.random.below(2) as u32;
        let length = 1 + self.random.below(30) as u32;
        let tail = self.random.below(3) as u32;
        let prompt = (0..length).map(|at| if at < 12 { beginning + at } else { tail + at }).collect();
        let max_tokens = 1 + self.random.below(24) as u32;
        let choices = if self.random.below(8) == 0 { 3 } else { 1 };
        self.submit(owner, prompt, max_tokens, choices);
    }

    fn end_a_fetch(&mut self) {
        let mut pending = self.pending.lock().unwrap();
        if pending.is_empty() {
            return;
        }
        let at = self.random.below(pending.len() as u64) as usize;
        let fetched = pending.swap_remove(at);
        drop(pending);
        let number = fetched.digest.as_bytes()[0] - 1;
        let result = if number == BROKEN {
            Err(Refusal::new(422, "Malformed", "broken on purpose"))
        } else {
            Ok(loaded(fetched.digest))
        };
        self.stepper.take(Command::Fetched(fetched, result, Duration::ZERO), self.now);
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1 + self.random.below(20));
        self.stepper.step(self.now);
        let state = &self.stepper.state;
        state.check().unwrap();
        assert!(state.residency.pinned_pages() <= state.budget.pages / 2, "pins leave too little to others");
        for client in &mut self.clients {
            while let Ok(event) = client.events.try_recv() {
                assert!(client.end.is_none(), "an event after the last");
                match event {
                    Event::Token(TokenEvent { token, finish, cached_tokens, .. }) => {
                        client.tokens.push(token);
                        self.cached += u64::from(cached_tokens * u32::from(client.tokens.len() == 1));
                        client.end = finish.map(Ok);
                    }
                    Event::Failed(refusal) => client.end = Some(Err(refusal)),
                }
            }
        }
        let (ended, open) = std::mem::take(&mut self.clients).into_iter().partition(|client| client.end.is_some());
        self.clients = open;
        for client in ended {
            self.judge(client);
        }
    }

    fn judge(&mut self, client: Client) {
        match client.end {
            Some(Ok(finish)) => {
                let alone = answer_alone(client.owner, &client.prompt, client.max_tokens);
                assert_eq!(client.tokens, alone, "{:?} {:?}", client.owner, client.prompt);
                let stopped = client.tokens.last() == Some(&END);
                assert_eq!(finish, if stopped { Finish::Stop } else { Finish::Length });
                self.done += 1;
            }
            Some(Err(refusal)) if refusal.code == "BackendFailed" => {
                assert!(self.watched.faults.load(Ordering::Relaxed), "{refusal} without a fault");
            }
            Some(Err(refusal)) => {
                self.told.push(refusal.code.to_string());
                let broken = client.owner == KvOwner::Adapter(digest(BROKEN));
                let of_broken = ["Malformed", "ModelNotFound", "DigestMismatch", "NotFound", "SourceForbidden"];
                let expected = if broken { &of_broken[..] } else { &["ModelNotFound"][..] };
                let unknown = refusal.code == "ModelNotFound";
                assert!(!(unknown && client.enrolled), "{refusal}, though it was enrolled when it asked");
                let mut expected = expected.iter().chain(self.refused);
                assert!(expected.any(|code| *code == refusal.code), "{refusal} for {:?}", client.owner);
            }
            None => {}
        }
    }

    /// Lets everything end; panics if something never does.
    fn settle(&mut self) {
        for _ in 0..50_000 {
            if self.clients.is_empty() && self.pending.lock().unwrap().is_empty() {
                break;
            }
            self.end_a_fetch();
            self.step();
        }
        assert_eq!(self.clients.len(), 0, "requests that never end: {:#?}", self.stepper.state.waiting);
        self.step();
        let snapshot = Snapshot::of(&self.stepper.state);
        assert!(snapshot.idle());
        assert_eq!((snapshot.pages.kv, self.queue.taken()), (0, 0));
        assert!(snapshot.adapters.iter().all(|facts| facts.leases == 0));
    }
}

fn loaded(digest: Digest) -> Loaded {
    let number = digest.as_bytes()[0] - 1;
    Loaded {
        adapter: Arc::new(HostAdapter { digest, bytes: vec![number], fitted: Fitted::default() }),
        bytes: 10 + u64::from(number),
        pages: 1 + u32::from(number),
        rank: 8,
        modules: 2,
        on_disk: false,
    }
}

fn limits() -> Limits {
    Limits {
        max_adapters_per_batch: 2,
        max_sequences: 6,
        max_step_tokens: 16,
        host_cache_bytes: 40,
        upload_bytes_per_step: 200,
        upload_bytes_min: 128,
        upload_bytes_whole: 0,
        upload_time_per_step: Duration::ZERO,
        upload_time_max: Duration::ZERO,
        age_max: Duration::from_millis(300),
        max_fetches: 2,
        // So that no pause of this machine changes a run.
        step_time_max: Duration::from_secs(3600),
        ..Limits::default()
    }
}

fn fuzz(seed: u64) -> [u64; 3] {
    let pages = 24 + (seed % 5) as u32 * 8;
    let mut world = World::new(seed, limits(), pages);
    world.watched.faults.store(seed.is_multiple_of(4), Ordering::Relaxed);
    for _ in 0..600 {
        match world.random.below(12) {
            0..4 => world.random_request(),
            4..6 => world.end_a_fetch(),
            6 if !world.clients.is_empty() => {
                let at = world.random.below(world.clients.len() as u64) as usize;
                world.clients.swap_remove(at);
            }
            7 => {
                let number = world.random.below(u64::from(ADAPTERS)) as u8;
                world.retire(digest(number));
            }
            8 => {
                let number = world.random.below(u64::from(ADAPTERS)) as u8;
                let pinned = world.random.below(4) == 0;
                world.enrol(number, pinned);
            }
            _ => world.step(),
        }
        world.step();
    }
    world.settle();
    [world.done, world.cached, world.watched.pieces.load(Ordering::Relaxed)]
}

#[test]
fn every_answer_equals_its_answer_alone_whatever_happens_around_it() {
    let mut sums = [0; 3];
    for seed in 0..60 {
        let outcome = std::panic::catch_unwind(|| fuzz(seed));
        let outcome = outcome.unwrap_or_else(|cause| {
            eprintln!("seed {seed} failed");
            std::panic::resume_unwind(cause)
        });
        sums.iter_mut().zip(outcome).for_each(|(sum, found)| *sum += found);
    }
    let [done, cached, pieces] = sums;
    assert!(pieces > 300, "only {pieces} adapters came in pieces: the simulation tests nothing");
    assert!(done > 3_000, "only {done} requests were answered: the simulation tests nothing");
    assert!(cached > 3_000, "only {cached} tokens came from the prefix cache: the simulation tests nothing");
}

#[test]
fn one_place_and_an_endless_stream_still_lets_the_other_adapter_start() {
    let limits = Limits { max_adapters_per_batch: 1, ..limits() };
    let age_max = limits.age_max;
    let mut world = World::new(1, limits, 64);
    world.submit(KvOwner::Adapter(digest(0)), vec![1, 2, 3], 100_000 / 1000, 1);
    for _ in 0..6 {
        world.end_a_fetch();
        world.step();
    }
    world.submit(KvOwner::Adapter(digest(1)), vec![4], 1, 1);
    let asked = world.now;
    while world.clients.iter().any(|client| client.owner == KvOwner::Adapter(digest(1))) {
        // The stream never runs dry.
        if world.clients.iter().filter(|client| client.owner == KvOwner::Adapter(digest(0))).count() < 2 {
            world.submit(KvOwner::Adapter(digest(0)), vec![1, 2, 3, 4], 50, 1);
        }
        world.end_a_fetch();
        world.step();
        assert!(world.now - asked < age_max * 2, "it waited for {:?}", world.now - asked);
    }
    world.settle();
}

/// However little room pins leave: each request is answered, or told why not.
#[test]
fn pins_keep_nobody_waiting_for_ever() {
    let mut refused = 0;
    for seed in 0..20 {
        let limits = Limits { host_cache_bytes: 24, ..limits() };
        let mut world = World::new(seed, limits, 40);
        world.refused = &["OutOfHostMemory", "OutOfPages"];
        for _ in 0..300 {
            match world.random.below(6) {
                0 => {
                    let number = world.random.below(BROKEN.into()) as u8;
                    world.enrol(number, true);
                }
                1..4 => world.random_request(),
                _ => world.end_a_fetch(),
            }
            world.step();
        }
        world.settle();
        // A floor that is not kept is no failure: who has none is served.
        let facts = world.stepper.state.residency.facts();
        assert!(facts.iter().all(|facts| facts.failure.is_none() || facts.digest == digest(BROKEN)));
        let held: u64 = world.stepper.state.residency.pinned_host_bytes(&digest(BROKEN)).1;
        assert!(held <= 12, "pins hold {held} bytes");
        refused += world.told.iter().filter(|code| code.as_str() == "OutOfHostMemory").count();
    }
    assert!(refused > 0, "nobody was refused: the simulation tests nothing");
}

/// Its pieces come over several steps, and in each of them somebody would like its pages.
#[test]
fn a_flood_for_the_base_does_not_keep_an_adapter_from_coming_whole() {
    for seed in 0..20 {
        let mut world = World::new(seed, limits(), 20);
        let mut asked = None;
        for turn in 0..2_000 {
            // More than the pages hold, and no two beginnings alike.
            while world.clients.len() < 8 {
                let first = turn * 64 + world.clients.len() as u32 * 8;
                world.submit(KvOwner::Base, (first..first + 12).collect(), 8, 1);
            }
            if turn == 20 {
                world.submit(KvOwner::Adapter(digest(4)), vec![1, 2], 1, 1);
                asked = Some(world.now);
            }
            world.end_a_fetch();
            world.step();
            let waits = world.clients.iter().any(|client| client.owner != KvOwner::Base);
            match asked {
                Some(asked) if waits => assert!(world.now - asked < Duration::from_secs(2), "seed {seed}: it starves"),
                Some(_) => break,
                None => {}
            }
        }
        world.settle();
    }
}

#[test]
fn the_base_needs_no_place_and_a_slow_source_delays_nobody_else() {
    let limits = Limits { max_adapters_per_batch: 1, age_max: Duration::from_secs(3600), ..limits() };
    let mut world = World::new(2, limits, 64);
    world.submit(KvOwner::Adapter(digest(0)), vec![1, 2, 3], 20, 1);
    world.step();
    world.end_a_fetch();
    world.submit(KvOwner::Adapter(digest(1)), vec![1, 2, 3], 2, 1);
    world.submit(KvOwner::Base, vec![1, 2, 3], 2, 1);
    world.submit(KvOwner::Adapter(digest(0)), vec![1, 2, 3], 2, 1);
    // The fetch of adapter 1 never ends meanwhile.
    for _ in 0..30 {
        world.step();
    }
    let open: Vec<KvOwner> = world.clients.iter().map(|client| client.owner).collect();
    assert_eq!(open, [KvOwner::Adapter(digest(1))]);
    world.settle();
}

#[test]
fn ten_requests_behind_a_broken_adapter_get_ten_typed_errors() {
    let mut world = World::new(3, limits(), 64);
    for _ in 0..10 {
        world.submit(KvOwner::Adapter(digest(BROKEN)), vec![1], 1, 1);
    }
    world.step();
    assert_eq!(world.clients.len(), 10);
    world.end_a_fetch();
    world.step();
    assert_eq!(world.clients.len(), 0);
    world.submit(KvOwner::Base, vec![1], 1, 1);
    world.settle();
    assert_eq!(world.done, 1);
}

#[test]
fn an_idle_engine_notices_that_its_books_are_wrong() {
    let mut world = World::new(6, limits(), 64);
    let counted = |world: &mut World| {
        world.now += Duration::from_secs(1);
        world.stepper.step(world.now);
        let text = world.meter.text().unwrap();
        text.lines().find_map(|line| line.strip_prefix("lorafleet_contradictions_total ")).unwrap().to_owned()
    };
    assert_eq!(counted(&mut world), "0");
    world.submit(KvOwner::Base, vec![1, 2, 3], 2, 1);
    world.settle();
    assert_eq!(counted(&mut world), "0");
    // A page that nobody reads and nobody gave back.
    world.stepper.state.pages.take_kv(1).unwrap();
    world.enrol(0, false);
    assert_eq!(counted(&mut world), "1");
}
