//! What loads may hold in memory at the same time, before their adapters are counted elsewhere.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use lorafleet_artifact::{Scheme, SourceUri};
use lorafleet_listen::{Room, Share};

/// A room for what comes from this machine's disks, which comes at once and waits for no slow store; and one for all
/// buckets, of which each may have three quarters: whoever drips leaves the rest to others. One load counts as three
/// quarters of its bucket's part at most, so that small ones of the same bucket go on beside it.
#[derive(Debug)]
pub struct Rooms {
    here: Room,
    away: Room,
    part_bytes: u64,
    /// By scheme and host or bucket: no more than the allowed sources name.
    stores: Mutex<BTreeMap<(Scheme, String), Room>>,
}

/// Room for one load; dropping it gives it back.
#[derive(Debug)]
pub struct Held {
    _of_store: Option<Share>,
    _of_all: Share,
}

impl Rooms {
    /// What is larger than `bytes` waits until it is alone.
    pub fn new(bytes: u64) -> Self {
        Self {
            here: Room::new(bytes),
            away: Room::new(bytes),
            part_bytes: three_quarters(bytes),
            stores: Mutex::default(),
        }
    }

    /// For a copy on this machine's disks.
    pub async fn here(&self, bytes: u64) -> Held {
        Held { _of_store: None, _of_all: self.here.take(bytes).await }
    }

    /// For what comes from `uri`. First come, first served.
    pub async fn of(&self, uri: &SourceUri, bytes: u64) -> Held {
        if uri.scheme() == Scheme::File {
            return self.here(bytes).await;
        }
        let of_store = self.store(uri).take(bytes.min(three_quarters(self.part_bytes))).await;
        Held { _of_store: Some(of_store), _of_all: self.away.take(bytes).await }
    }

    fn store(&self, uri: &SourceUri) -> Room {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let part = || Room::new(self.part_bytes);
        stores.entry((uri.scheme(), uri.authority().to_owned())).or_insert_with(part).clone()
    }
}

fn three_quarters(bytes: u64) -> u64 {
    bytes - bytes / 4
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_store_leaves_room_to_others_and_files_wait_for_none() {
        let rooms = Rooms::new(100 << 10);
        let uri = |text: &str| text.parse::<SourceUri>().unwrap();
        let now = |from: &str, kib: u64| rooms.of(&uri(from), kib << 10).now_or_never();
        let slow = [now("s3://slow/a", 30).unwrap(), now("s3://slow/b", 30).unwrap()];
        assert!(now("s3://slow/c", 20).is_none(), "it has its part");
        let other = now("s3://other/a", 40).unwrap();
        assert!(now("s3://third/a", 1).is_none(), "all is taken");
        assert!(now("/adapters/a", 100).is_some() && rooms.here(100 << 10).now_or_never().is_some());
        drop(slow);
        assert!(now("s3://slow/c", 61).is_none(), "others hold the rest");
        drop(other);
        // A large one, and small ones of the same store and of others beside it.
        let large = now("s3://slow/c", 90).unwrap();
        assert!(now("s3://slow/a", 10).is_some() && now("s3://other/a", 10).is_some());
        drop(large);
        assert!(now("s3://slow/c", 100).is_some());
    }
}
