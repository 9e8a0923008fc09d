//! What the step thread is told, and in which order.

use std::sync::mpsc;

use lorafleet_backend::batch::PageBudget;
use tokio::sync::watch;

use super::*;
use crate::limits::Limits;
use crate::sequence::Params;

/// Nothing is ever loaded.
struct Never;

impl Load for Never {
    fn load(&self, _source: String, _claims: Claims) -> Loading {
        Box::pin(std::future::pending())
    }

    fn disk_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    fn is_on_disk(&self, _digest: Digest) -> bool {
        false
    }
}

fn placement(generation: u64, name: &str, digest: Digest) -> Placement {
    let body = serde_json::json!({
        "bootId": "boot", "generation": generation, "aliases": { name: digest },
        "adapters": [{ "name": name, "digest": digest, "uri": "/a", "floor": "None" }],
    });
    serde_json::from_value(body).unwrap()
}

#[test]
fn a_request_goes_to_what_its_name_means_when_it_is_handed_in() {
    let (sender, commands) = mpsc::sync_channel(16);
    let (_snapshot, shown) = watch::channel(Arc::default());
    let budget = PageBudget { page_bytes: 64, pages: 8, page_tokens: 4 };
    let engine = Engine::new(sender, shown, Arc::new(Limits::default()), budget);
    let fleet = Fleet::new("boot".into(), Mode::Managed, "base".into(), engine, Arc::new(Never), None);
    let (old, new) = (Digest::from_bytes([1; 32]), Digest::from_bytes([2; 32]));
    fleet.place(placement(1, "a", old)).unwrap();
    let adapter = |digest| Resolved::Adapter { name: "a".into(), digest };
    assert_eq!(fleet.resolve("a").unwrap(), adapter(old));
    // While the request is made into tokens, the name moves on, and the old version is forgotten.
    fleet.place(placement(2, "a", new)).unwrap();
    let draft = || {
        let (events, _) = tokio::sync::mpsc::channel(1);
        Draft {
            prompt: Arc::new([1]),
            params: Arc::new(Params::greedy(1)),
            seed: 0,
            group: 0,
            events,
            arrived: Instant::now(),
        }
    };
    assert_eq!(fleet.submit("a", vec![draft(), draft()]).unwrap(), adapter(new));
    let Some(Command::Submit(sequences)) = commands.try_iter().last() else { panic!("it was not handed in") };
    assert!(
        sequences.len() == 2 && sequences.iter().all(|one| one.owner == KvOwner::Adapter(new) && one.place.is_some())
    );
    assert_eq!(fleet.engine.queue.taken(), 2);
    drop(sequences);
    assert_eq!(fleet.engine.queue.taken(), 0);
    let refused = fleet.submit("b", vec![draft()]).unwrap_err();
    assert_eq!((refused.status, refused.code.as_ref()), (404, "ModelNotFound"));
    // All of a request, or nothing.
    let full = fleet.submit("a", (0..2000).map(|_| draft()).collect()).unwrap_err();
    assert_eq!((full.status, full.code.as_ref(), fleet.engine.queue.taken()), (429, "Busy", 0));
}

/// An adapter of one byte, by the number of its content.
fn loaded(content: u8) -> Loaded {
    let digest = Digest::from_bytes([content; 32]);
    let adapter = lorafleet_backend::HostAdapter { digest, bytes: vec![content], fitted: Default::default() };
    Loaded { adapter: Arc::new(adapter), bytes: 1, pages: 1, rank: 8, modules: 1, on_disk: false }
}

#[test]
fn a_content_is_kept_as_all_of_its_names_want_it_and_comes_from_any_of_their_sources() {
    let (sender, commands) = mpsc::sync_channel(16);
    let (_snapshot, shown) = watch::channel(Arc::default());
    let budget = PageBudget { page_bytes: 64, pages: 8, page_tokens: 4 };
    let engine = Engine::new(sender, shown, Arc::new(Limits::default()), budget);
    let fleet = Fleet::new("boot".into(), Mode::Standalone, "base".into(), engine, Arc::new(Never), None);
    let take_in = |name: &str, source: &str, pinned: bool, content: u8| {
        let floor = if pinned { Floor::Device } else { Floor::None };
        let (name, source, namespace) = (name.to_owned(), source.to_owned(), String::new());
        fleet.take_in(Placed { name, namespace, source, pinned, floor, base_digest: None }, loaded(content)).unwrap();
    };
    // Of the last change: what is enrolled (content, sources, pin, with its bytes at hand), and what is retired.
    let told = || {
        let Some(Command::Change { enrol, retire }) = commands.try_iter().last() else { panic!("nothing was told") };
        let enrol = enrol.into_iter().map(|Newcomer { enrolment, loaded, .. }| {
            let content = enrolment.digest.as_bytes()[0];
            (content, enrolment.sources.join(" "), enrolment.pinned, loaded.is_some())
        });
        let retire = retire.into_iter().map(|digest| digest.as_bytes()[0]);
        (enrol.collect::<Vec<_>>(), retire.collect::<Vec<_>>())
    };
    let one = |content, sources: &str, pinned, loaded| (content, sources.to_owned(), pinned, loaded);
    take_in("a", "/a", true, 1);
    assert_eq!(told(), (vec![one(1, "/a", true, true)], vec![]));
    take_in("b", "/b", false, 1);
    assert_eq!(told(), (vec![one(1, "/a /b", true, true)], vec![]));
    // The same again, from elsewhere.
    take_in("b", "/c", false, 1);
    assert_eq!(told(), (vec![one(1, "/a /c", true, true)], vec![]));
    // One of them means another content now.
    take_in("a", "/d", false, 2);
    assert_eq!(told(), (vec![one(2, "/d", false, true), one(1, "/c", false, false)], vec![]));
    take_in("b", "/d", false, 2);
    assert_eq!(told(), (vec![one(2, "/d", false, true)], vec![1]));
    fleet.unload("a").unwrap();
    assert_eq!(told(), (vec![one(2, "/d", false, false)], vec![]));
    fleet.unload("b").unwrap();
    assert_eq!(told(), (vec![], vec![2]));
    assert!(fleet.catalog().placed.is_empty());
}
