//! Memory that many share: the bodies of all requests, the reports of all pods, all loads at a time.

use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory that many share, counted in KiB. Clones share it too.
#[derive(Clone, Debug)]
pub struct Room {
    bytes: u64,
    free: Arc<Semaphore>,
}

/// Nothing is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// What there is in all.
    pub bytes: u64,
}

/// A part of a room; gives it back when it is dropped.
#[derive(Debug)]
pub struct Share {
    room: Room,
    kib: u32,
    taken: Option<OwnedSemaphorePermit>,
}

impl Room {
    pub fn new(bytes: u64) -> Self {
        let kib = usize::try_from(bytes.div_ceil(1024)).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { bytes, free: Arc::new(Semaphore::new(kib)) }
    }

    /// Nothing yet.
    pub fn share(&self) -> Share {
        Share { room: self.clone(), kib: 0, taken: None }
    }

    /// Waits for so many bytes, or for all there are where they are more. First come, first served.
    pub async fn take(&self, bytes: u64) -> Share {
        let all = u32::try_from(self.bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(all);
        // An error would mean that the semaphore was closed, which nobody does.
        let taken = Arc::clone(&self.free).acquire_many_owned(kib).await.ok();
        Share { room: self.clone(), kib, taken }
    }

    /// What nobody has taken.
    pub fn free_bytes(&self) -> u64 {
        (self.free.available_permits() as u64).saturating_mul(1024)
    }
}

impl Share {
    /// Makes it one of `bytes` in all, at once or not at all: nobody waits for others while holding a part.
    ///
    /// # Errors
    /// If others have taken what is missing. What was held stays.
    pub fn grow(&mut self, bytes: u64) -> Result<(), Full> {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let more = kib.saturating_sub(self.kib);
        let taken = Arc::clone(&self.room.free).try_acquire_many_owned(more);
        let taken = taken.map_err(|_| Full { bytes: self.room.bytes })?;
        match &mut self.taken {
            Some(held) => held.merge(taken),
            none => *none = Some(taken),
        }
        self.kib += more;
        Ok(())
    }
}

/// A whole body with its share. As the owner of `Bytes` it gives the room back with the last of them.
#[derive(Debug)]
pub struct Received {
    pub bytes: Vec<u8>,
    pub share: Share,
}

impl AsRef<[u8]> for Received {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// What each byte of a body costs.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    /// This many first bytes of each body cost nothing: the number of bodies bounds them, and small ones go on while large
    /// ones fill the room.
    pub free_bytes: u64,
    /// Copies of it that are made on its way, itself included.
    pub copies: u64,
}

/// Why a body did not become whole.
#[derive(Debug)]
pub enum NotReceived<E> {
    /// More bytes have come than it may have.
    TooLarge {
        bytes: usize,
    },
    /// The bodies of others take all the room there is.
    NoRoom(Full),
    Broken(E),
}

/// The pieces of a body of at most `bytes_max` put together. Room is taken for what has come, not for what is announced:
/// who sends slowly holds little of it.
///
/// # Errors
/// If it is too large, if there is no room, or if a piece does not come.
pub async fn receive<B: AsRef<[u8]>, E>(
    mut pieces: impl Stream<Item = Result<B, E>> + Unpin,
    bytes_max: usize,
    room: &Room,
    price: Price,
) -> Result<Received, NotReceived<E>> {
    let mut received = Received { bytes: Vec::new(), share: room.share() };
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(NotReceived::Broken)?;
        let piece = piece.as_ref();
        let bytes = received.bytes.len().saturating_add(piece.len());
        if bytes > bytes_max {
            return Err(NotReceived::TooLarge { bytes });
        }
        let cost = (bytes as u64).saturating_sub(price.free_bytes).saturating_mul(price.copies);
        received.share.grow(cost).map_err(NotReceived::NoRoom)?;
        received.bytes.extend_from_slice(piece);
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;

    use super::*;

    const PLAIN: Price = Price { free_bytes: 0, copies: 1 };

    async fn take(
        sizes: &[usize],
        bytes_max: usize,
        room: &Room,
        price: Price,
    ) -> Result<Received, NotReceived<Infallible>> {
        let pieces = sizes.iter().map(|size| Ok(vec![0; *size])).collect::<Vec<_>>();
        receive(futures::stream::iter(pieces), bytes_max, room, price).await
    }

    #[tokio::test]
    async fn bodies_share_one_room_and_give_it_back() {
        let room = Room::new(8 << 10);
        let first = take(&[1000, 1000, 2096], 4096, &room, PLAIN).await.unwrap();
        assert_eq!((first.bytes.len(), room.free_bytes()), (4096, 4 << 10));
        // The share of one that is refused half way comes back at once.
        let refused = take(&[4096, 1], 5000, &room, PLAIN).await;
        assert!(matches!(refused, Err(NotReceived::NoRoom(Full { bytes: 8192 }))), "{refused:?}");
        assert_eq!(room.free_bytes(), 4 << 10);
        let large = take(&[4096, 1], 4096, &room, PLAIN).await;
        assert!(matches!(large, Err(NotReceived::TooLarge { bytes: 4097 })), "{large:?}");
        drop(first);
        assert_eq!(room.free_bytes(), 8 << 10);
    }

    #[tokio::test]
    async fn the_first_bytes_are_free_and_copies_are_counted() {
        let room = Room::new(8 << 10);
        let price = Price { free_bytes: 1 << 10, copies: 2 };
        let _small = take(&[1024], 4096, &room, price).await.unwrap();
        assert_eq!(room.free_bytes(), 8 << 10);
        let _large = take(&[5120], 8192, &room, price).await.unwrap();
        assert_eq!(room.free_bytes(), 0);
        assert!(take(&[1025], 4096, &room, price).await.is_err());
        assert!(take(&[1024], 4096, &room, price).await.is_ok());
    }
}
