//! A batch that breaks its contract is refused by name, and nothing has happened.

// Helpers of tests may say what they expect plainly.
#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use lorafleet_backend::batch::{Batch, PageId, ResidentId, Segment, SequenceId, Upload};
use lorafleet_backend::layout::Layout;
use lorafleet_backend::{Backend, BackendError, Ticket};
use support::{Runner, cases_folder, greedy, load_adapter};

fn segment() -> Segment {
    Segment {
        sequence: SequenceId(1),
        adapter: None,
        tokens: vec![5; 20],
        position: 0,
        pages: vec![PageId(0), PageId(1)],
        sample: Some(greedy()),
    }
}

#[test]
fn broken_batches_change_nothing() {
    let mut runner = Runner::new(&cases_folder().join("base"), 4 << 20, 2);
    let shape = runner.model.shape().base();
    let adapter = load_adapter(&cases_folder().join("r1-all"), &shape);
    let budget = runner.backend.page_budget();
    let count = Layout::of(&adapter.fitted.modules, budget.page_bytes).unwrap().pages;
    let pages: Vec<PageId> = (10..10 + count).map(PageId).collect();
    let upload = |id: u64, pages: &[PageId]| Upload {
        resident: ResidentId(id),
        adapter: Arc::clone(&adapter),
        pages: pages.to_vec(),
    };
    let batch = |step: u64| Batch { step, drops: vec![], uploads: vec![], segments: vec![segment()] };
    let backend = &mut runner.backend;
    let first = Batch { uploads: vec![upload(1, &pages)], ..batch(1) };
    let ticket = backend.submit(&first).unwrap();
    let answer = backend.wait(ticket).unwrap().rows;

    let with = |edit: &dyn Fn(&mut Segment)| {
        let mut broken = batch(2);
        edit(&mut broken.segments[0]);
        broken
    };
    let others: Vec<PageId> = (40..40 + count).map(PageId).collect();
    let broken = [
        (batch(1), "the last step was Some(1)"),
        (Batch { drops: vec![ResidentId(9)], ..batch(2) }, "drops ResidentId(9), which is not resident"),
        (Batch { uploads: vec![upload(1, &others)], ..batch(2) }, "uploads ResidentId(1) again"),
        (Batch { uploads: vec![upload(2, &pages)], ..batch(2) }, "which ResidentId(1) holds"),
        (Batch { uploads: vec![upload(2, &others[1..])], ..batch(2) }, "pages, "),
        (
            Batch { uploads: vec![upload(2, &vec![PageId(budget.pages); count as usize])], ..batch(2) },
            "uploads to PageId",
        ),
        (Batch { segments: vec![segment(), segment()], ..batch(2) }, "has two segments"),
        (with(&|s| s.adapter = Some(ResidentId(7))), "ResidentId(7) is not resident"),
        (with(&|s| s.tokens.clear()), "no tokens"),
        (with(&|s| s.tokens[3] = 258), "token 258 of a vocabulary of 258"),
        (with(&|s| s.position = 500), "position 520 of a context of 512"),
        (with(&|s| s.pages.truncate(1)), "1 pages for 20 tokens, 2 are needed"),
        (with(&|s| s.pages[1] = PageId(budget.pages)), "of"),
        (with(&|s| s.pages[1] = PageId(10)), "keys and values in PageId(10), which ResidentId(1) holds"),
    ];
    for (broken, expected) in broken {
        match backend.submit(&broken) {
            Err(BackendError::BadBatch { step, what }) => {
                assert_eq!(step, broken.step);
                assert!(what.contains(expected), "{what}, expected {expected}");
            }
            other => panic!("{other:?} instead of {expected}"),
        }
    }
    assert!(backend.wait(Ticket(2)).is_err());

    // The adapter is still there, the step number still free, the answer the same.
    let mut right = batch(2);
    right.segments.push(Segment {
        sequence: SequenceId(2),
        adapter: Some(ResidentId(1)),
        pages: vec![PageId(2), PageId(3)],
        ..segment()
    });
    let ticket = backend.submit(&right).unwrap();
    assert!(backend.submit(&batch(3)).is_err(), "two tickets outstanding");
    let rows = backend.wait(ticket).unwrap().rows;
    assert_eq!((rows[0].token, rows[0].logprob.to_bits()), (answer[0].token, answer[0].logprob.to_bits()));
    assert_eq!(rows.len(), 2);
    let gone = Batch { drops: vec![ResidentId(1)], ..batch(3) };
    let ticket = backend.submit(&gone).unwrap();
    backend.wait(ticket).unwrap();
    assert!(backend.submit(&Batch { segments: right.segments, ..batch(4) }).is_err());
}
