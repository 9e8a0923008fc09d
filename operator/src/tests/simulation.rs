//! A simulated cluster under the real plans: stores change, pods restart, the operator is killed between any two
//! writes. Afterwards it must converge, and then write nothing.

use std::collections::BTreeMap;

use kube::ResourceExt;
use lorafleet_artifact::Digest;
use lorafleet_crds::LoraAdapter;
use lorafleet_crds::condition::{ConditionType, find, is_true};
use proptest::prelude::*;

use super::event::{Event, event};
use super::world::{Content, World, add, foreign};
use crate::intake::{self, Outcome};
use crate::job::JobState;
use crate::pool;
use crate::recheck::listing;

/// Another object has the name that it wants.
fn waits_for_its_name(adapter: &LoraAdapter) -> bool {
    let allowed = find(&adapter.status.as_ref().unwrap().conditions, ConditionType::SourceAllowed);
    allowed.is_some_and(|allowed| allowed.reason == "NameConflict")
}

impl World {
    /// No more events: everything that is under way comes to its end.
    fn settle(&mut self) {
        (self.store_down, self.late) = (false, None);
        for _ in 0..30 {
            self.now_s += 10;
            self.pool_pass(None);
            // The Deployment replaces pods of an older template.
            let older = |world: &Self, index: &usize| world.pods[*index].base != world.base_digest();
            if let Some(index) = (0..self.pods.len()).find(|index| older(self, index)) {
                self.restart(index);
            }
            (0..self.pods.len()).for_each(|index| self.arrives(index, usize::MAX));
            for name in self.names() {
                self.intake(&name, false);
                self.job_ends(&name);
                self.look_ends(&name);
            }
        }
    }

    /// What the last read of each source has shown is what its status tells of.
    fn check_outcomes(&self) {
        for (name, adapter) in self.adapters.iter().filter(|(_, adapter)| !waits_for_its_name(adapter)) {
            let fingerprint = intake::gate(adapter, Some(&self.base), &[], &[]).unwrap().order.fingerprint;
            let (files, status) = match self.jobs.get(&adapter.uid().unwrap()) {
                Some((known, JobState::Done(Outcome::Verified(facts)))) if *known == fingerprint => {
                    (listing(&facts.files), adapter.status.as_ref().unwrap())
                }
                Some((known, JobState::Done(Outcome::Refused { listing, .. }))) if *known == fingerprint => {
                    (listing.clone(), adapter.status.as_ref().unwrap())
                }
                _ => continue,
            };
            assert_eq!(status.source_listing, Some(files), "{name}: what was read last is not said");
        }
    }

    /// Every source is looked at once.
    fn look(&mut self) {
        for name in self.names() {
            self.intake(&name, true);
            self.look_ends(&name);
        }
    }

    fn names(&self) -> Vec<String> {
        self.adapters.keys().cloned().collect()
    }

    fn check_settled(&mut self) {
        let before = (self.writes, self.reads_planned);
        self.look();
        for name in self.names() {
            self.intake(&name, false);
        }
        self.pool_pass(None);
        assert_eq!((self.writes, self.reads_planned), before, "a steady state writes or reads");
        assert!(pool::plan(&self.observe_pool()).is_idle());
        let base = Some(self.base_digest());
        let serves = |adapter: &&LoraAdapter| {
            adapter
                .status
                .as_ref()
                .is_some_and(|status| status.current_revision.is_some() && status.verified_base == base)
        };
        for (name, adapter) in &self.adapters {
            let status = adapter.status.as_ref().unwrap();
            assert_eq!(status.candidate_revision, None, "{name} is under way for ever");
            let ready = is_true(&status.conditions, ConditionType::Ready);
            let stalled = is_true(&status.conditions, ConditionType::Stalled);
            let verified = is_true(&status.conditions, ConditionType::Verified);
            assert!(ready || stalled, "{name} is neither ready nor stalled: {:?}", status.conditions);
            let available = is_true(&status.conditions, ConditionType::Available);
            assert_eq!(available, serves(&adapter), "{name} is available: {:?}", status.conditions);
            if verified {
                assert!(ready, "{name}");
                assert_eq!(status.current_revision, status.digest, "{name}");
            }
            let forbidden = |digest: Option<Digest>| digest.is_some_and(|digest| !self.allows(digest));
            assert!(!forbidden(status.current_revision), "{name} is served, and the policy forbids it");
            assert!(!verified || !forbidden(status.digest), "{name} is verified, and the policy forbids it");
        }
        self.check_names();
        let held = |adapter: &LoraAdapter| {
            let current = adapter.status.as_ref().unwrap().current_revision;
            (adapter.served_name().to_owned(), current.unwrap())
        };
        // What was verified for another base is served again if the base moves back, and not before.
        let held: BTreeMap<String, Digest> = self.adapters.values().filter(serves).map(held).collect();
        for (index, pod) in self.pods.iter().enumerate() {
            assert_eq!(pod.loaded.iter().cloned().collect::<BTreeMap<_, _>>(), held, "held by pod {index}");
            let aliases = pod.placement.iter().flat_map(|placement| placement.aliases.clone());
            assert_eq!(aliases.collect::<BTreeMap<_, _>>(), held, "names of pod {index}");
        }
        let served = self.adapters.values().filter(serves).count();
        assert!(self.pods.iter().all(|pod| pod.loaded.len() == served), "something is held that nobody wants");
    }
}

impl World {
    /// Of those that want the same name one has it.
    fn check_names(&self) {
        let mut names: BTreeMap<&str, Vec<&LoraAdapter>> = BTreeMap::new();
        self.adapters.values().for_each(|adapter| names.entry(adapter.served_name()).or_default().push(adapter));
        for (name, adapters) in names {
            let having = adapters.iter().filter(|adapter| !waits_for_its_name(adapter)).count();
            assert_eq!(having, 1, "so many of {} have the name {name}", adapters.len());
        }
    }

    /// Adapters of which the content alone decides what becomes of them.
    fn judged_by_content(&self) -> impl Iterator<Item = (&String, &LoraAdapter)> {
        let all = self.adapters.iter();
        all.filter(|(_, adapter)| adapter.spec.digest.is_none() && !waits_for_its_name(adapter))
    }

    /// After every source was looked at: what is pinned goes on being served and what changed is said; what follows is
    /// what lies there.
    fn check_noticed(&self) {
        for (name, adapter) in self.judged_by_content() {
            let (status, content) = (adapter.status.as_ref().unwrap(), self.contents[name]);
            let reason = find(&status.conditions, ConditionType::Verified).unwrap().reason.as_str();
            let good = matches!(content, Content::Good(_)) && self.allows(content.digest());
            let follows = adapter.spec.source.follow;
            match status.current_revision {
                Some(current) if good && current == content.digest() => assert_eq!(reason, "Succeeded", "{name}"),
                // Whoever asked to resolve again took the pin away.
                Some(_) if follows || status.digest.is_none() => {
                    assert!(!good && ["Malformed", "RankTooHigh", "BaseUnknown"].contains(&reason), "{name}: {reason}");
                }
                Some(_) => assert_eq!(reason, "SourceChanged", "{name}"),
                // What was withdrawn is pinned still.
                None => {
                    let pinned = status.digest.is_some_and(|digest| digest != content.digest() || !self.allows(digest));
                    assert!(!good || pinned && !follows, "{name}: {reason}");
                }
            }
        }
    }

    /// After a new look at every source, what is good is served and nothing else.
    fn check_contents(&self) {
        for (name, adapter) in self.judged_by_content() {
            let status = adapter.status.as_ref().unwrap();
            match self.contents[name] {
                Content::Good(_) if self.allows(self.contents[name].digest()) => {
                    assert_eq!(
                        status.current_revision,
                        Some(self.contents[name].digest()),
                        "{name}: {:?}",
                        status.conditions
                    );
                    assert!(is_true(&status.conditions, ConditionType::Ready), "{name}: {:?}", status.conditions);
                }
                _ => assert!(!is_true(&status.conditions, ConditionType::Ready), "{name}: {:?}", status.conditions),
            }
        }
    }
}

/// `SIMULATION_CASES=100000` looks longer.
fn cases() -> u32 {
    std::env::var("SIMULATION_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn converges_from_any_history_and_then_writes_nothing(
        events in prop::collection::vec(event(), 0..80),
        // What happens to a world in which everything is served.
        later in prop::collection::vec(event(), 0..12),
    ) {
        let mut world = World::new();
        events.iter().for_each(|event| world.happen(event));
        world.settle();
        world.check_outcomes();
        world.look();
        world.settle();
        world.check_settled();
        later.iter().for_each(|event| world.happen(event));
        world.settle();
        world.look();
        world.settle();
        world.check_settled();
        world.check_noticed();
        (0..4).for_each(|index| world.happen(&Event::ResolveAgain(index)));
        world.settle();
        world.check_settled();
        world.check_contents();
    }
}

#[test]
fn a_changed_policy_reads_nothing() {
    let mut world = World::new();
    world.settle();
    let read = world.reads_planned;
    let changes = [
        Event::MaxRank(4),
        Event::RequireBaseDigest(true),
        Event::MaxRank(3),
        Event::MaxRank(8),
        Event::RequireBaseDigest(false),
    ];
    for change in changes {
        world.happen(&change);
        world.settle();
        world.check_settled();
        world.check_contents();
    }
    assert_eq!(world.reads_planned, read);
}

#[test]
fn a_restarted_engine_is_not_ready_before_it_reports_again() {
    let mut world = World::new();
    world.settle();
    world.check_settled();
    world.happen(&Event::EngineRestarts(0));
    world.happen(&Event::EngineRestarts(1));
    world.pool_pass(None);
    world.intake("a0", false);
    let conditions = |world: &World| world.adapters["a0"].status.clone().unwrap().conditions;
    assert!(!is_true(&conditions(&world), ConditionType::Ready));
    assert!(!is_true(&conditions(&world), ConditionType::Available));
    world.settle();
    world.check_settled();
    assert!(is_true(&conditions(&world), ConditionType::Ready));
}

#[test]
fn a_pod_with_less_room_takes_nothing_away_and_is_let_in_once_it_fits() {
    let mut world = World::new();
    world.settle();
    world.check_settled();
    let served = world.adapters.len() as u64;
    assert!(served > 1);
    // Each has ten bytes. The pod comes back with room for all but one.
    world.pods[1].host_bytes = 10 * served - 1;
    world.happen(&Event::EngineRestarts(1));
    world.settle();
    assert!(world.ready(0) && !world.ready(1) && world.pods[1].placement.is_none());
    let why = find(&world.pool.status.as_ref().unwrap().conditions, ConditionType::Ready).unwrap();
    assert_eq!(why.reason, "CapacityExceeded", "{}", why.message);
    for (name, adapter) in &world.adapters {
        assert!(is_true(&adapter.status.as_ref().unwrap().conditions, ConditionType::Available), "{name}");
        assert!(world.pods[0].loaded.iter().any(|(held, _)| held == name), "{name}");
    }
    world.happen(&Event::Delete(0));
    world.settle();
    world.check_settled();
    assert!(world.ready(1));
    assert!(is_true(&world.pool.status.as_ref().unwrap().conditions, ConditionType::Available));
}

#[test]
fn what_others_write_into_a_status_is_left_alone_or_taken_away_once() {
    for (field, writes) in [("conditions", 0), ("pools", 2), ("candidateRevision", 2), ("retiring", 2)] {
        let mut world = World::new();
        world.settle();
        world.check_settled();
        let good = world.adapters["a0"].status.clone().unwrap();
        let before = world.writes;
        add(world.adapters.get_mut("a0").unwrap().status.as_mut().unwrap(), &foreign(field));
        (0..5).for_each(|_| world.intake("a0", false));
        assert_eq!(world.writes - before, writes, "{field}");
        let mut left = world.adapters["a0"].status.clone().unwrap();
        let theirs = left.conditions.iter().filter(|condition| condition.type_ == "BackedUp").count();
        assert_eq!(theirs, usize::from(field == "conditions"));
        left.conditions.retain(|condition| condition.type_ != "BackedUp");
        assert_eq!(left, good, "{field}");
        world.settle();
        world.check_settled();
    }
    let mut world = World::new();
    world.settle();
    let before = world.writes;
    add(world.pool.status.as_mut().unwrap(), &foreign("conditions"));
    (0..5).for_each(|_| world.pool_pass(None));
    assert_eq!(world.writes, before);
}

/// A pass that sees the status of before writes it over the one that says that the source is read anew.
#[test]
fn what_a_read_has_shown_is_said_though_an_older_status_was_written_again() {
    for follows in [true, false] {
        let (mut world, index) = (World::new(), u8::from(follows));
        world.settle();
        let adapter = world.adapters.keys().nth(usize::from(index)).cloned().unwrap();
        assert_eq!(world.adapters[&adapter].spec.source.follow, follows);
        let before = world.contents[&adapter].digest();
        for event in [
            Event::Replace(index, true),
            Event::LookIsDue(index),
            Event::LookEnds(index),
            Event::Lag(5),
            // The read begins.
            Event::Intake(index),
            Event::EngineRestarts(0),
            Event::Pool(None),
            Event::Intake(index),
            Event::Lag(0),
            Event::JobEnds(index),
        ] {
            world.happen(&event);
        }
        world.settle();
        let status = world.adapters[&adapter].status.clone().unwrap();
        let (reason, now) = match follows {
            true => ("Succeeded", world.contents[&adapter].digest()),
            false => ("SourceChanged", before),
        };
        assert_eq!(find(&status.conditions, ConditionType::Verified).unwrap().reason, reason);
        assert_eq!((status.digest, status.current_revision), (Some(now), Some(now)));
    }
}
