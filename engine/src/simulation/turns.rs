//! What each request may count on, whatever others ask for meanwhile.

use super::*;
use crate::schedule;

/// Tokens of a step; each of the three orders has `PART` of them.
const STEP: u32 = 48;
const PART: usize = 16;

/// A world in which nothing is short but the tokens of a step, with all adapters loaded.
fn roomy(seed: u64, max_sequences: u32) -> World {
    let limits = Limits {
        max_adapters_per_batch: 6,
        max_sequences,
        max_step_tokens: STEP,
        host_cache_bytes: 1 << 20,
        upload_bytes_per_step: 1 << 20,
        age_max: Duration::from_secs(3600),
        max_fetches: 6,
        step_time_max: Duration::from_secs(3600),
        ..Limits::default()
    };
    let mut world = World::new(seed, limits, 7_000);
    for number in 0..BROKEN {
        world.submit(KvOwner::Adapter(digest(number)), vec![u32::from(number)], 1, 1);
    }
    world.settle();
    world
}

impl World {
    /// Of tokens that no other prompt begins with.
    fn fresh_prompt(&mut self, length: u64) -> Vec<u32> {
        (0..length).map(|_| 1000 + self.random.below(1 << 30) as u32).collect()
    }

    fn any_owner(&mut self) -> KvOwner {
        match self.random.below(u64::from(BROKEN) + 1) as u8 {
            BROKEN => KvOwner::Base,
            number => KvOwner::Adapter(digest(number)),
        }
    }

    /// Steps until the request of this prompt has its first token; `before_each` makes the others' traffic.
    fn steps_to_first_token(&mut self, prompt: &[u32], mut before_each: impl FnMut(&mut Self)) -> usize {
        let waits = |world: &Self| world.clients.iter().any(|one| one.prompt == prompt && one.tokens.is_empty());
        let mut steps = 0;
        while waits(self) {
            before_each(self);
            self.step();
            steps += 1;
            assert!(steps < 10_000, "it starves");
        }
        steps
    }
}

#[test]
fn a_short_prompt_waits_for_no_long_one_however_many_there_are() {
    for seed in 0..15 {
        let mut world = roomy(seed, 400);
        let crowd = 1 + world.random.below(40) as usize;
        let keep_up = |world: &mut World| {
            while world.clients.len() < crowd {
                let (owner, length) = (world.any_owner(), 200 + world.random.below(300));
                let prompt = world.fresh_prompt(length);
                world.submit(owner, prompt, 1, 1);
            }
        };
        for _ in 0..20 {
            for _ in 0..world.random.below(30) {
                keep_up(&mut world);
                world.step();
            }
            let (owner, length) = (world.any_owner(), 1 + world.random.below(PART as u64));
            let prompt = world.fresh_prompt(length);
            world.submit(owner, prompt.clone(), 1, 1);
            let steps = world.steps_to_first_token(&prompt, keep_up);
            // One step for what is left of a long prompt that is nearly through, and so shorter than itself.
            assert!(steps <= 2, "seed {seed}: {length} tokens took {steps} steps beside {crowd} long prompts");
        }
    }
}

#[test]
fn a_long_prompt_goes_on_beside_any_flood_of_short_ones() {
    for seed in 0..20 {
        let mut world = roomy(seed, 400);
        let flood = |world: &mut World| {
            for _ in 0..30 {
                let (owner, length) = (world.any_owner(), 1 + world.random.below(12));
                let prompt = world.fresh_prompt(length);
                world.submit(owner, prompt, 1, 1);
            }
        };
        flood(&mut world);
        let elder: usize = world.clients.iter().map(|client| client.prompt.len()).sum();
        let (owner, length) = (world.any_owner(), 300 + world.random.below(300));
        let prompt = world.fresh_prompt(length);
        world.submit(owner, prompt.clone(), 1, 1);
        let steps = world.steps_to_first_token(&prompt, flood);
        let bound = (elder + prompt.len()).div_ceil(PART) + 1;
        assert!(steps <= bound, "seed {seed}: {length} tokens took {steps} steps, the bound is {bound}");
    }
}

#[test]
fn one_request_waits_for_few_of_anothers_flood() {
    for seed in 0..20 {
        let mut world = roomy(seed, 4);
        let (many, one) = (KvOwner::Adapter(digest(0)), KvOwner::Adapter(digest(1)));
        let flood = move |world: &mut World| {
            while world.clients.len() < 200 {
                let (length, answer) = (1 + world.random.below(20), 1 + world.random.below(20) as u32);
                let prompt = world.fresh_prompt(length);
                world.submit(many, prompt, answer, 1);
            }
        };
        for _ in 0..100 {
            flood(&mut world);
            world.step();
        }
        let prompt = world.fresh_prompt(100 + seed);
        world.submit(one, prompt.clone(), 1, 1);
        let before = world.stepper.state.admissions;
        while world.stepper.state.waiting.iter().any(|waiting| waiting.owner == one) {
            flood(&mut world);
            world.step();
        }
        let started = world.stepper.state.admissions - before;
        // One place in three is the least served's; up to three more may come free in the same step.
        assert!(started <= 6, "seed {seed}: it was the {started}th to start");
        let steps = world.steps_to_first_token(&prompt, flood);
        assert!(steps <= prompt.len().div_ceil(PART - 2) + 1, "seed {seed}: {steps} steps");
    }
}

#[test]
fn no_step_is_smaller_than_it_could_be() {
    let mut full = 0;
    for seed in 0..20 {
        let mut world = roomy(seed, 400);
        for _ in 0..200 {
            if world.random.below(3) == 0 {
                let (owner, length) = (world.any_owner(), 1 + world.random.below(90));
                let (prompt, answer) = (world.fresh_prompt(length), 1 + world.random.below(8) as u32);
                world.submit(owner, prompt, answer, 1);
            }
            let state = &world.stepper.state;
            let work: u32 = state.running.iter().chain(&state.waiting).map(|sequence| sequence.behind()).sum();
            let rows = schedule::decide(state, world.now).rows;
            let given: u32 = rows.iter().map(|(_, tokens)| tokens).sum();
            assert_eq!(given, work.min(STEP), "seed {seed}");
            full += u32::from(given == STEP);
            world.step();
        }
        world.settle();
    }
    assert!(full > 500, "only {full} steps were full: the simulation tests nothing");
}

#[test]
fn who_lacks_pages_is_passed_by_those_that_fit_beside_it_and_waits_no_longer_for_them() {
    for seed in 0..20 {
        let limits = Limits { max_sequences: 64, max_step_tokens: STEP, ..limits() };
        // 60 pages of 4 tokens: the elder takes 55 in the end, the next 30.
        let mut world = World::new(seed, limits, 60);
        let (elder, next) = (world.fresh_prompt(100), world.fresh_prompt(120));
        world.submit(KvOwner::Base, elder.clone(), 120, 1);
        world.steps_to_first_token(&elder, |_| {});
        world.submit(KvOwner::Base, next.clone(), 1, 1);
        let flood = |world: &mut World| {
            while world.clients.len() < 20 {
                let (length, answer) = (1 + world.random.below(20), 1 + world.random.below(30) as u32);
                let prompt = world.fresh_prompt(length);
                world.submit(KvOwner::Base, prompt, answer, 1);
            }
        };
        let runs = |world: &World| world.clients.iter().any(|client| client.prompt == elder);
        let mut passed = 0;
        while runs(&world) {
            flood(&mut world);
            let before = world.stepper.state.admissions;
            world.step();
            passed += world.stepper.state.admissions - before;
        }
        let steps = world.steps_to_first_token(&next, flood);
        let bound = next.len().div_ceil(PART - 10) + 2;
        assert!(steps <= bound, "seed {seed}: it waited {steps} steps for those that passed it, the bound is {bound}");
        assert!(passed > 5 || world.done < 5, "seed {seed}: only {passed} passed");
        world.settle();
    }
}

#[test]
fn prompts_take_as_much_of_a_step_as_there_is_time_for() {
    let mut world = roomy(1, 400);
    let (answering, prompt) = (world.fresh_prompt(3), world.fresh_prompt(200));
    world.stepper.state.limits.step_time_max = Duration::from_millis(240);
    let rows = |world: &World| {
        let rows = schedule::decide(&world.stepper.state, world.now).rows;
        rows.iter().map(|(_, tokens)| *tokens).collect::<Vec<_>>()
    };
    let slow = |world: &mut World, row: u64| {
        for _ in 0..40 {
            world.stepper.state.pace.stepped(32, Duration::from_millis(32 * row));
        }
    };
    world.submit(KvOwner::Base, prompt, 1, 1);
    assert_eq!(rows(&world), [48], "nothing is known of this machine");
    world.submit(KvOwner::Base, answering.clone(), 1000, 1);
    while world.stepper.state.running.iter().all(|sequence| sequence.drawn() == 0) {
        world.step();
    }
    for (row, expected) in [(1, 47), (10, 23), (4, 47), (1000, 16)] {
        slow(&mut world, row);
        assert_eq!(rows(&world), [1, expected], "{row} ms a row");
    }
}

#[test]
fn a_flood_of_some_takes_no_place_from_the_others() {
    let mut spared = 0;
    for seed in 0..20 {
        let mut world = roomy(seed, 4);
        world.queue = Queue::new(200);
        let floods = 1 + world.random.below(4);
        for _ in 0..100 {
            // Those that flood ask until they are refused.
            for number in 0..floods {
                let owner = KvOwner::Adapter(digest(number as u8));
                loop {
                    let prompt = world.fresh_prompt(3);
                    let answer = 1 + world.random.below(9) as u32;
                    if !world.submit(owner, prompt, answer, 1) {
                        break;
                    }
                }
            }
            if world.random.below(10) == 0 && world.clients.iter().all(|client| client.owner != KvOwner::Base) {
                let prompt = world.fresh_prompt(5);
                assert!(world.submit(KvOwner::Base, prompt, 2, 1), "seed {seed}: no place beside {floods} floods");
                spared += 1;
            }
            world.step();
        }
        world.settle();
    }
    assert!(spared > 50, "only {spared} asked beside floods: the simulation tests nothing");
}

/// A world of four places, with an age limit, and so many turns that ended for others.
fn four_places(seed: u64) -> (World, Duration) {
    let mut world = roomy(seed, 4);
    let age_max = Duration::from_millis(60);
    world.stepper.state.limits.age_max = age_max;
    (world, age_max)
}

impl World {
    fn turns_ended(&self) -> u64 {
        let text = self.meter.text().unwrap();
        let ended = text.lines().find_map(|line| line.strip_prefix("lorafleet_preemptions_total{reason=\"Aged\"} "));
        ended.map_or(0, |count| count.parse().unwrap())
    }

    /// Its answer is longer than each of these tests.
    fn submit_endless(&mut self, owner: KvOwner) {
        const TOKENS: u32 = 120;
        loop {
            let prompt = self.fresh_prompt(5);
            if answer_alone(owner, &prompt, TOKENS).len() == TOKENS as usize {
                assert!(self.submit(owner, prompt, TOKENS, 1));
                return;
            }
        }
    }
}

#[test]
fn long_answers_of_one_keep_no_place_from_another_for_longer_than_the_age_limit() {
    for seed in 0..10 {
        let (mut world, age_max) = four_places(seed);
        let (many, one) = (KvOwner::Adapter(digest(0)), KvOwner::Base);
        (0..20).for_each(|_| world.submit_endless(many));
        for _ in 0..10 {
            world.step();
        }
        for round in 0..5 {
            let prompt = world.fresh_prompt(8);
            let asked = world.now;
            world.submit(one, prompt.clone(), 3, 1);
            world.steps_to_first_token(&prompt, |_| {});
            let waited = world.now - asked;
            assert!(waited < age_max * 2, "seed {seed}, round {round}: it waited {waited:?}");
        }
        // One turn for each who came: those of the many do not end each other's.
        assert!((1..=5).contains(&world.turns_ended()), "seed {seed}: {} turns ended", world.turns_ended());
    }
}

#[test]
fn places_come_to_be_shared_and_then_stay_where_they_are_worth_it() {
    for seed in 0..10 {
        let (mut world, age_max) = four_places(seed);
        let owners = [KvOwner::Base, KvOwner::Adapter(digest(1))];
        (0..8).for_each(|_| world.submit_endless(owners[0]));
        for _ in 0..10 {
            world.step();
        }
        (0..8).for_each(|_| world.submit_endless(owners[1]));
        let begun = world.now;
        while world.now - begun < age_max * 4 {
            world.step();
        }
        let held = |world: &World, owner| world.stepper.state.running.iter().filter(|one| one.owner == owner).count();
        assert_eq!(owners.map(|owner| held(&world, owner)), [2, 2], "seed {seed}");
        assert_eq!(world.turns_ended(), 2, "seed {seed}");
    }
}

/// With as many owners as places and one more, the places go round: each gets on, and no turn is too short to be worth it.
#[test]
fn more_owners_than_places_take_turns() {
    for seed in 0..10 {
        let (mut world, age_max) = four_places(seed);
        let owners: Vec<KvOwner> = (0..BROKEN).map(|number| KvOwner::Adapter(digest(number))).collect();
        owners.iter().for_each(|owner| world.submit_endless(*owner));
        let begun = world.now;
        while world.now - begun < age_max * 15 {
            world.step();
        }
        let drawn: Vec<usize> = world.clients.iter().map(|client| client.tokens.len()).collect();
        let (fewest, most) = (drawn.iter().min().unwrap(), drawn.iter().max().unwrap());
        assert!(*fewest * 3 > *most, "seed {seed}: {drawn:?}");
        let ended = world.turns_ended();
        assert!((4..=20).contains(&ended), "seed {seed}: {ended} turns ended");
    }
}
