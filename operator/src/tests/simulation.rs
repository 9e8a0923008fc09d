//! A simulated cluster under the real plans: stores change, pods restart, the operator is killed between any two
//! writes. Afterwards it must converge, and then write nothing.

use lorafleet_artifact::Digest;
use lorafleet_crds::condition::{ConditionType, is_true};
use proptest::prelude::*;

use super::world::{Content, Event, World, event};
use crate::pool;

impl World {
    /// No more events: everything that is under way comes to its end.
    fn settle(&mut self) {
        self.store_down = false;
        for _ in 0..30 {
            self.now_s += 10;
            self.pool_pass(None);
            (0..self.pods.len()).for_each(|index| self.arrives(index, usize::MAX));
            for name in self.adapters.keys().cloned().collect::<Vec<_>>() {
                self.intake(&name);
                self.job_ends(&name);
            }
        }
    }

    fn check_settled(&mut self) {
        let before = self.writes;
        for name in self.adapters.keys().cloned().collect::<Vec<_>>() {
            self.intake(&name);
        }
        self.pool_pass(None);
        assert_eq!(self.writes, before, "a steady state writes");
        assert!(pool::plan(&self.observe_pool()).is_idle());
        for (name, adapter) in &self.adapters {
            let status = adapter.status.as_ref().unwrap();
            assert_eq!(status.candidate_revision, None, "{name} is under way for ever");
            let ready = is_true(&status.conditions, ConditionType::Ready);
            let stalled = is_true(&status.conditions, ConditionType::Stalled);
            let verified = is_true(&status.conditions, ConditionType::Verified);
            assert!(ready || stalled, "{name} is neither ready nor stalled: {:?}", status.conditions);
            for (index, pod) in self.pods.iter().enumerate() {
                let held: Vec<Digest> =
                    pod.loaded.iter().filter(|(held, _)| held == name).map(|(_, digest)| *digest).collect();
                let alias = pod.placement.as_ref().and_then(|placement| placement.aliases.get(name).copied());
                assert_eq!(held, Vec::from_iter(status.current_revision), "{name} on pod {index}");
                assert_eq!(alias, status.current_revision, "{name} on pod {index}");
            }
            let rank_allowed = self.base.spec.adapter_policy.max_rank.is_none_or(|limit| limit >= 8);
            if verified {
                assert!(rank_allowed && ready, "{name}");
                assert_eq!(status.current_revision, status.digest, "{name}");
            }
        }
        let served: usize = self
            .adapters
            .values()
            .filter(|adapter| adapter.status.as_ref().unwrap().current_revision.is_some())
            .count();
        assert!(self.pods.iter().all(|pod| pod.loaded.len() == served), "something is held that nobody wants");
    }
}

impl World {
    /// After a new look at every source, what is good is served and nothing else.
    fn check_contents(&self) {
        let rank_allowed = self.base.spec.adapter_policy.max_rank.is_none_or(|limit| limit >= 8);
        for (name, adapter) in &self.adapters {
            let status = adapter.status.as_ref().unwrap();
            match self.contents[name] {
                Content::Good(_) if rank_allowed => {
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn converges_from_any_history_and_then_writes_nothing(events in prop::collection::vec(event(), 0..80)) {
        let mut world = World::new();
        events.iter().for_each(|event| world.happen(event));
        world.settle();
        world.check_settled();
        (0..4).for_each(|index| world.happen(&Event::ResolveAgain(index)));
        world.settle();
        world.check_settled();
        world.check_contents();
    }
}

#[test]
fn a_restarted_engine_is_not_ready_before_it_reports_again() {
    let mut world = World::new();
    world.settle();
    world.check_settled();
    world.happen(&Event::EngineRestarts(0));
    world.happen(&Event::EngineRestarts(1));
    world.pool_pass(None);
    world.intake("a0");
    let conditions = |world: &World| world.adapters["a0"].status.clone().unwrap().conditions;
    assert!(!is_true(&conditions(&world), ConditionType::Ready));
    assert!(!is_true(&conditions(&world), ConditionType::Available));
    world.settle();
    world.check_settled();
    assert!(is_true(&conditions(&world), ConditionType::Ready));
}
