//! A batch that breaks its contract is refused by name, and nothing has happened.

// Helpers of tests may say what they expect plainly.
#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::ops::Range;
use std::sync::Arc;

use lorafleet_backend::batch::{Batch, PageId, ResidentId, Segment, SequenceId, Upload};
use lorafleet_backend::layout::Layout;
use lorafleet_backend::{Backend, BackendError, HostAdapter, Ticket};
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

fn piece(adapter: &Arc<HostAdapter>, id: u64, pages: &[PageId], part: Range<u32>) -> Upload {
    Upload { resident: ResidentId(id), adapter: Arc::clone(adapter), pages: pages.to_vec(), part }
}

#[test]
fn broken_batches_change_nothing() {
    let mut runner = Runner::new(&cases_folder().join("base"), 4 << 20, 2);
    let shape = runner.model.shape().base();
    let adapter = load_adapter(&cases_folder().join("r1-all"), &shape);
    let budget = runner.backend.page_budget();
    let count = Layout::of(&adapter.fitted.modules, budget.page_bytes).unwrap().pages;
    let pages: Vec<PageId> = (10..10 + count).map(PageId).collect();
    let upload = |id: u64, pages: &[PageId]| piece(&adapter, id, pages, 0..pages.len() as u32);
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
        (Batch { uploads: vec![upload(2, &[])], ..batch(2) }, "uploads 0..0 of the 0 pages of ResidentId(2)"),
        (Batch { uploads: vec![upload(2, &[&others[..], &[PageId(70)]].concat())], ..batch(2) }, "pages, "),
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

/// In pieces it is nobody's until the last one is there, and may be dropped before.
#[test]
fn a_piece_is_the_next_one_and_the_last_one_makes_it_whole() {
    let mut runner = Runner::new(&cases_folder().join("base"), 4 << 20, 2);
    let adapter = load_adapter(&cases_folder().join("all-linear"), &runner.model.shape().base());
    let count = Layout::of(&adapter.fitted.modules, runner.backend.page_budget().page_bytes).unwrap().pages;
    assert!(count >= 4, "{count} pages make no pieces");
    let pages: Vec<PageId> = (10..10 + count).map(PageId).collect();
    let piece = |id: u64, part: Range<u32>| piece(&adapter, id, &pages, part);
    let batch = |step: u64, drops: &[u64], uploads: &[Upload], user: Option<u64>| Batch {
        step,
        drops: drops.iter().map(|id| ResidentId(*id)).collect(),
        uploads: uploads.to_vec(),
        segments: vec![Segment { adapter: user.map(ResidentId), ..segment() }],
    };
    let mut step = 0;
    let mut submit = |drops: &[u64], uploads: &[Upload], user: Option<u64>| {
        let batch = batch(step + 1, drops, uploads, user);
        match runner.backend.submit(&batch) {
            Ok(ticket) => {
                step += 1;
                runner.backend.wait(ticket).map_err(|error| error.to_string()).map(|sampled| sampled.rows)
            }
            Err(error) => Err(error.to_string()),
        }
    };
    let mut refused = |uploads: &[Upload], user: Option<u64>, expected: &str| {
        let error = submit(&[], uploads, user).unwrap_err();
        assert!(error.contains(expected), "{error}, expected {expected}");
    };
    refused(&[piece(1, 1..2)], None, "uploads 1..2 of ResidentId(1), which has not begun");
    refused(&[piece(1, 0..count + 1)], None, "pages of ResidentId(1)");
    refused(&[piece(1, 0..0)], None, "uploads 0..0 of the");
    refused(&[piece(1, 0..2)], Some(1), "ResidentId(1) is not resident");
    submit(&[], &[piece(1, 0..2)], None).unwrap();
    let mut refused = |uploads: &[Upload], user: Option<u64>, expected: &str| {
        let error = submit(&[], uploads, user).unwrap_err();
        assert!(error.contains(expected), "{error}, expected {expected}");
    };
    refused(&[], Some(1), "ResidentId(1) is not resident");
    refused(&[piece(1, 0..2)], None, "uploads ResidentId(1) again");
    refused(&[piece(1, 3..4)], None, "of which 2 pages are written");
    refused(&[piece(2, 0..2)], None, "which ResidentId(1) holds");
    let elsewhere = Upload { pages: (40..40 + count).map(PageId).collect(), ..piece(1, 2..3) };
    refused(&[elsewhere], None, "to other pages than before");
    // Dropped on the way, its pages are free for another one, which goes the whole way.
    submit(&[1], &[piece(2, 0..1)], None).unwrap();
    submit(&[], &[piece(2, 1..3)], None).unwrap();
    let answer = submit(&[], &[piece(2, 3..count)], Some(2)).unwrap();
    assert_eq!(submit(&[2], &[piece(3, 0..count)], Some(3)).unwrap()[0].logprob, answer[0].logprob);
}
