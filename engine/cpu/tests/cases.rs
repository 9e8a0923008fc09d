//! Hugging Face PEFT's answers, and bit-for-bit independence of batch mates, chunks and threads.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use lorafleet_artifact::ModuleKind;
use lorafleet_backend::batch::{PageId, ResidentId, Segment, SequenceId};
use support::{Answer, Generated, Job, Runner, cases_folder, greedy, json, load_adapter, served_cases};

const PAGES: u64 = 8 << 20;

struct World {
    runner: Runner,
    /// Name (empty for the base) and resident of everything that answers.
    models: Vec<(String, Option<ResidentId>, Vec<Answer>)>,
}

fn world(base: &str, threads: usize) -> World {
    let mut runner = Runner::new(&cases_folder().join(base), PAGES, threads);
    let answers = json(&cases_folder().join(base).join("answers.json"));
    let mut models = vec![(base.to_owned(), None, answers)];
    let shape = runner.model.shape().base();
    for (name, case) in served_cases(base) {
        let adapter = load_adapter(&cases_folder().join(&name), &shape);
        let resident = runner.upload(&adapter);
        models.push((name, Some(resident), case.answers));
    }
    World { runner, models }
}

fn jobs(world: &World) -> Vec<(String, Job, Answer)> {
    let mut jobs = Vec::new();
    for (name, resident, answers) in &world.models {
        for (index, answer) in answers.iter().enumerate() {
            let job = Job { adapter: *resident, prompt: answer.prompt.clone(), new_tokens: answer.tokens.len() };
            jobs.push((format!("{name}/{index}"), job, answer.clone()));
        }
    }
    jobs
}

fn check_answer(name: &str, found: &Generated, expected: &Answer) {
    assert_eq!(found.tokens, expected.tokens, "{name}");
    for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
        assert!((found - expected).abs() < 2e-3, "{name}: log-probability {found}, PEFT has {expected}");
    }
}

fn check_base(base: &str) {
    let mut world = world(base, 2);
    let jobs = jobs(&world);
    let mut alone = BTreeMap::new();
    for (name, job, answer) in &jobs {
        let found = world.runner.generate(std::slice::from_ref(job), usize::MAX).remove(0);
        check_answer(name, &found, answer);
        alone.insert(name.clone(), found);
    }
    // Everything in one batch, prompts whole and in pieces: the same bits as alone.
    let all: Vec<Job> = jobs.iter().map(|(_, job, _)| job.clone()).collect();
    for chunk in [usize::MAX, 1, 3, 16, 17] {
        for ((name, ..), found) in jobs.iter().zip(world.runner.generate(&all, chunk)) {
            assert_eq!(found, alone[name], "{name} among all, chunks of {chunk}");
        }
    }
}

#[test]
fn served_cases_of_the_untied_base() {
    check_base("base");
}

#[test]
fn served_cases_of_the_tied_base() {
    check_base("base-tied");
}

#[test]
fn number_of_threads_changes_no_bit() {
    let mut answers = Vec::new();
    for threads in [1, 2, 5] {
        let mut world = world("base", threads);
        let all: Vec<Job> = jobs(&world).into_iter().map(|(_, job, _)| job).collect();
        answers.push(world.runner.generate(&all, 7));
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0], answers[2]);
}

#[test]
fn an_adapter_dropped_and_uploaded_again_answers_the_same() {
    let mut world = world("base", 2);
    let jobs = jobs(&world);
    let all: Vec<Job> = jobs.iter().map(|(_, job, _)| job.clone()).collect();
    let before = world.runner.generate(&all, 16);
    let shape = world.runner.model.shape().base();
    let adapters: Vec<(String, ResidentId)> =
        world.models.iter().filter_map(|(name, id, _)| id.map(|id| (name.clone(), id))).collect();
    let mut residents: BTreeMap<ResidentId, ResidentId> = adapters.iter().map(|(_, id)| (*id, *id)).collect();
    // Whole and in pieces, all at the same time.
    for pages_per_step in [u32::MAX / 2, 1, 2, 5] {
        for resident in residents.values() {
            world.runner.drop_resident(*resident);
        }
        // Dropped in one order and uploaded in the other, so that every adapter gets other pages.
        for (name, first) in adapters.iter().rev() {
            let adapter = load_adapter(&cases_folder().join(name), &shape);
            residents.insert(*first, world.runner.upload(&adapter));
        }
        world.runner.write_pending(pages_per_step);
        let again: Vec<Job> =
            all.iter().map(|job| Job { adapter: job.adapter.map(|first| residents[&first]), ..job.clone() }).collect();
        assert!(world.runner.generate(&again, 16) == before, "{pages_per_step} pages in a step");
    }
}

/// One sequence of twenty tokens for each adapter, in one step: token and log-probability of each that has one.
fn first_tokens(runner: &mut Runner, adapters: &[Option<ResidentId>]) -> Vec<Option<(u32, u32)>> {
    let tables: Vec<Vec<PageId>> = adapters.iter().map(|_| runner.take(2)).collect();
    let segment = |(index, adapter): (usize, &Option<ResidentId>)| Segment {
        sequence: SequenceId(index as u64),
        adapter: *adapter,
        tokens: (3..23).collect(),
        position: 0,
        pages: tables[index].clone(),
        sample: Some(greedy()),
    };
    let rows = runner.step(adapters.iter().enumerate().map(segment).collect());
    tables.into_iter().for_each(|table| runner.give(table));
    let row = |index: usize| rows.iter().find(|row| row.sequence == SequenceId(index as u64));
    (0..adapters.len()).map(|index| row(index).map(|row| (row.token, row.logprob.to_bits()))).collect()
}

#[test]
fn an_adapter_whose_products_overflow_gets_no_token_and_spoils_no_other_row() {
    let mut runner = Runner::new(&cases_folder().join("base"), 16 << 20, 2);
    let shape = runner.model.shape().base();
    let load = || load_adapter(&cases_folder().join("r1-all"), &shape);
    let good = Some(runner.upload(&load()));
    let expected = first_tokens(&mut runner, &[None, good]);
    assert!(expected.iter().all(Option::is_some));
    // Everywhere, and where an infinity could be lost: keys alone, whose scores go through an exponential.
    for kinds in [&ModuleKind::LAYER[..], &[ModuleKind::K]] {
        let mut adapter = Arc::into_inner(load()).unwrap();
        for module in adapter.fitted.modules.iter_mut().filter(|module| kinds.contains(&module.module.kind)) {
            // What no intake lets pass, for the same as products that overflow.
            module.scale = f32::INFINITY;
        }
        let bad = runner.upload(&Arc::new(adapter));
        let found = first_tokens(&mut runner, &[None, good, Some(bad)]);
        assert_eq!(found, [expected[0], expected[1], None], "{kinds:?}");
        // The pages that the spoilt sequence had come first.
        let found = first_tokens(&mut runner, &[good, good, None]);
        assert_eq!(found, [expected[1], expected[1], expected[0]], "{kinds:?}");
        runner.drop_resident(bad);
    }
}
