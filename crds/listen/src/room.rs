//! Memory that many share: the bodies of all requests, the reports of all pods, all loads at a time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use futures::{Stream, StreamExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory that many share, counted in KiB. Clones share it too.
///
/// A room may have parts, one for each of those who share it, and they may have parts again. Where there are several, each may
/// hold half of the room, and the last eighth is kept for those who hold less than their equal part of it: so none of them, and
/// not all others together, can take the little that one needs.
#[derive(Clone, Debug)]
pub struct Room(Arc<Place>);

#[derive(Debug)]
struct Place {
    /// All that there is of it and of what it is a part of.
    whole: Arc<Whole>,
    part_of: Option<Room>,
    /// KiB that shares of it and of its parts hold.
    held: AtomicU64,
    /// Parts that somebody has.
    parts: AtomicU64,
}

#[derive(Debug)]
struct Whole {
    bytes: u64,
    free: Arc<Semaphore>,
    /// Held while a share of a part grows: what it may have depends on what others hold.
    growing: Mutex<()>,
}

/// Nothing is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// What there is in all.
    pub bytes: u64,
    /// Whether there is more, but for others.
    pub part: bool,
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
        let whole = Whole { bytes, free: Arc::new(Semaphore::new(kib)), growing: Mutex::default() };
        Self::of(Arc::new(whole), None)
    }

    fn of(whole: Arc<Whole>, part_of: Option<Self>) -> Self {
        Self(Arc::new(Place { whole, part_of, held: AtomicU64::new(0), parts: AtomicU64::new(0) }))
    }

    /// A part of it for one of several, who is one of them until the last clone and share of his part are gone.
    pub fn part(&self) -> Self {
        self.0.parts.fetch_add(1, Relaxed);
        Self::of(self.0.whole.clone(), Some(self.clone()))
    }

    /// Nothing yet.
    pub fn share(&self) -> Share {
        Share { room: self.clone(), kib: 0, taken: None }
    }

    /// Waits for so many bytes, or for all there are where they are more. First come, first served.
    pub async fn take(&self, bytes: u64) -> Share {
        let whole = &self.0.whole;
        let all = u32::try_from(whole.bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(all);
        // An error would mean that the semaphore was closed, which nobody does.
        let taken = Arc::clone(&whole.free).acquire_many_owned(kib).await.ok();
        self.0.hold(kib);
        Share { room: self.clone(), kib, taken }
    }

    /// What nobody has taken.
    pub fn free_bytes(&self) -> u64 {
        (self.0.whole.free.available_permits() as u64).saturating_mul(1024)
    }
}

impl Place {
    fn with_those_it_is_part_of(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |place| place.part_of.as_ref().map(|room| room.0.as_ref()))
    }

    fn hold(&self, kib: u32) {
        for place in self.with_those_it_is_part_of() {
            place.held.fetch_add(kib.into(), Relaxed);
        }
    }

    fn let_go(&self, kib: u32) {
        for place in self.with_those_it_is_part_of() {
            place.held.fetch_sub(kib.into(), Relaxed);
        }
    }

    /// KiB that it may hold at most.
    fn most(&self) -> u64 {
        match &self.part_of {
            None => self.whole.bytes.div_ceil(1024),
            Some(Room(outer)) if outer.has_several_parts() => outer.most() / 2,
            Some(Room(outer)) => outer.most(),
        }
    }

    fn has_several_parts(&self) -> bool {
        self.parts.load(Relaxed) > 1
    }

    fn is_within(&self) -> bool {
        self.held.load(Relaxed) <= self.most()
    }

    /// It leaves those who hold little what is kept for them, or is one of them.
    fn leaves_what_is_kept(&self) -> bool {
        let Some(Room(outer)) = self.part_of.as_ref().filter(|outer| outer.0.has_several_parts()) else { return true };
        let kept = outer.most() / KEPT_PART;
        let little = kept / outer.parts.load(Relaxed).max(1);
        self.held.load(Relaxed) <= little || outer.held.load(Relaxed) <= outer.most() - kept
    }
}

/// One in so many is kept for those who hold little.
const KEPT_PART: u64 = 8;

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(Room(outer)) = &self.part_of {
            outer.parts.fetch_sub(1, Relaxed);
        }
    }
}

impl Share {
    /// Makes it one of `bytes` in all, at once or not at all: nobody waits for others while holding a part.
    ///
    /// # Errors
    /// If others have taken what is missing, or shall have it. What was held stays.
    pub fn grow(&mut self, bytes: u64) -> Result<(), Full> {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let more = kib.saturating_sub(self.kib);
        let (place, whole) = (&self.room.0, &self.room.0.whole);
        let full = |part| Full { bytes: whole.bytes, part };
        let turn = whole.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = Arc::clone(&whole.free).try_acquire_many_owned(more).map_err(|_| full(false))?;
        place.hold(more);
        if !place.with_those_it_is_part_of().all(|place| place.is_within() && place.leaves_what_is_kept()) {
            place.let_go(more);
            return Err(full(true));
        }
        drop(turn);
        match &mut self.taken {
            Some(held) => held.merge(taken),
            none => *none = Some(taken),
        }
        self.kib += more;
        Ok(())
    }

    /// Whether its part holds no more than it may: parts that came later have made it smaller.
    pub fn is_within_its_part(&self) -> bool {
        self.room.0.with_those_it_is_part_of().all(Place::is_within)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.0.let_go(self.kib);
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
        assert!(matches!(refused, Err(NotReceived::NoRoom(Full { bytes: 8192, part: false }))), "{refused:?}");
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

    /// Takes all that it can get, in steps of a KiB.
    fn most(room: &Room) -> (Share, u64) {
        let (mut share, mut kib) = (room.share(), 0);
        while share.grow((kib + 1) << 10).is_ok() {
            kib += 1;
        }
        (share, kib)
    }

    #[test]
    fn who_has_a_part_leaves_the_others_theirs() {
        let room = Room::new(96 << 10);
        let greedy = room.part();
        let (all, kib) = most(&greedy);
        assert_eq!((kib, all.is_within_its_part()), (96, true), "alone he gets everything");
        let modest = room.part();
        assert!(!all.is_within_its_part(), "there are two now");
        drop(all);
        let (half, kib) = most(&greedy);
        assert_eq!((kib, half.is_within_its_part()), (48, true));
        assert_eq!(half.room.share().grow(1 << 10), Err(Full { bytes: 96 << 10, part: true }));
        // Two who take what they can get leave an eighth to the third, who may have his part of it.
        let second = room.part();
        let (rest, kib) = most(&second);
        assert_eq!(kib, 96 - 12 - 48);
        assert_eq!(most(&modest).1, 4);
        let (_little, kib) = most(&modest);
        assert_eq!((kib, rest.is_within_its_part()), (4, true));
        drop(half);
        assert_eq!(most(&modest).1, 44, "up to his half");
    }

    #[test]
    fn parts_have_parts() {
        let room = Room::new(96 << 10);
        let [ours, others] = [room.part(), room.part()];
        let [first, second] = [ours.part(), ours.part()];
        let (all_of_first, kib) = most(&first);
        assert_eq!(kib, 24, "half of half");
        // Of our 48 an eighth is kept for who holds little.
        let (all_of_second, kib) = most(&second);
        assert_eq!(kib, 48 - 6 - 24);
        assert_eq!(most(&ours.part()).1, 2);
        // What is given back is there again, and a part that nobody has any more is none.
        drop((all_of_first, all_of_second, first, second, ours));
        assert_eq!(most(&others).1, 96);
        assert_eq!(room.free_bytes(), 96 << 10);
    }
}
