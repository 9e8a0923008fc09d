//! Whoever has been answered finds that answer in the reports and the metrics: they are written before it is told.

use std::task::{Context, Wake, Waker};

use super::*;

/// What is shown at the very moment at which a reader is woken for an answer.
struct Look {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    meter: Arc<Meter>,
    queue: Queue,
    seen: Mutex<Vec<Seen>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Seen {
    open: u32,
    places: u32,
    kv_pages: u32,
    leases: u32,
    failed: bool,
    /// Tokens drawn, as the metrics count them.
    output: u64,
}

impl Wake for Look {
    fn wake(self: Arc<Self>) {
        let snapshot = self.snapshot.borrow().clone();
        self.seen.lock().unwrap().push(Seen {
            open: snapshot.running + snapshot.waiting,
            places: self.queue.taken(),
            kv_pages: snapshot.pages.kv,
            leases: snapshot.adapters.iter().map(|facts| facts.leases).sum(),
            failed: snapshot.adapters.iter().any(|facts| facts.failure.is_some()),
            output: output(&self.meter),
        });
    }
}

fn output(meter: &Meter) -> u64 {
    let text = meter.text().unwrap();
    let output = text.lines().find_map(|line| line.strip_prefix("lorafleet_tokens_total{kind=\"output\"} "));
    output.map_or(0, |count| count.parse().unwrap())
}

/// Looks at each answer of the youngest request at the moment at which it is told, until the last one. Also
/// returns how many tokens were counted before the last step.
fn looks(world: &mut World) -> (Vec<Seen>, u64) {
    let look = Arc::new(Look {
        snapshot: world.snapshot.clone(),
        meter: world.meter.clone(),
        queue: world.queue.clone(),
        seen: Mutex::default(),
    });
    let waker = Waker::from(look.clone());
    let mut reader = world.clients.pop().unwrap().events;
    let mut counted = output(&world.meter);
    for _ in 0..1_000 {
        let mut context = Context::from_waker(&waker);
        while let std::task::Poll::Ready(event) = reader.poll_recv(&mut context) {
            match event {
                Some(Event::Token(TokenEvent { finish: None, .. })) => {}
                Some(_) => return (look.seen.lock().unwrap().clone(), counted),
                None => panic!("no last answer"),
            }
        }
        world.end_a_fetch();
        counted = output(&world.meter);
        world.now += Duration::from_millis(5);
        world.stepper.step(world.now);
    }
    panic!("it never ends")
}

#[test]
fn what_somebody_has_been_answered_is_counted_and_shown() {
    let mut world = World::new(1, limits(), 64);
    world.submit(KvOwner::Adapter(digest(1)), vec![1, 2, 3, 4, 5], 9, 1);
    let (seen, _) = looks(&mut world);
    let drawn = answer_alone(KvOwner::Adapter(digest(1)), &[1, 2, 3, 4, 5], 9).len() as u64;
    assert_eq!(seen.iter().map(|seen| seen.output).collect::<Vec<_>>(), (1..=drawn).collect::<Vec<_>>());
    let (last, before) = seen.split_last().unwrap();
    assert!(!before.is_empty() && before.iter().all(|seen| (seen.open, seen.leases) == (1, 1)), "{before:?}");
    let nothing = Seen { open: 0, places: 0, kv_pages: 0, leases: 0, failed: false, output: drawn };
    assert_eq!(last, &nothing, "the last answer came before what it held was given back");
}

#[test]
fn what_somebody_has_been_refused_is_shown() {
    let mut world = World::new(2, limits(), 64);
    // Somebody computes meanwhile: the refusal does not wait for that step.
    world.submit(KvOwner::Base, vec![1, 2, 3, 4], 20, 1);
    world.step();
    world.submit(KvOwner::Adapter(digest(BROKEN)), vec![1], 1, 1);
    let (seen, counted) = looks(&mut world);
    let [seen] = seen.as_slice() else { panic!("{seen:?}") };
    assert!(seen.failed && seen.open == 1 && seen.places == 1, "{seen:?}");
    assert!(output(&world.meter) > counted, "nobody computed meanwhile: the test tests nothing");
    assert_eq!(seen.output, counted, "it waited for a step");
}
