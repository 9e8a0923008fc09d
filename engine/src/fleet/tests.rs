//! What the step thread is told, and in which order.

use std::sync::mpsc;

use lorafleet_backend::batch::PageBudget;
use tokio::sync::watch;

use super::*;
use crate::limits::Limits;

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
    let mut asked = None;
    let submitted = fleet.submit("a", |owner| {
        asked = Some(owner);
        // The placement that would retire it again cannot come in between.
        assert!(fleet.catalog.try_lock().is_err());
        Ok(Vec::new())
    });
    assert_eq!((submitted.unwrap(), asked), (adapter(new), Some(KvOwner::Adapter(new))));
    let last = commands.try_iter().last();
    assert!(matches!(last, Some(Command::Submit(_))), "{last:?}");
    let refused = fleet.submit("b", |_| panic!("it has no sequences")).unwrap_err();
    assert_eq!((refused.status, refused.code.as_ref()), (404, "ModelNotFound"));
}
