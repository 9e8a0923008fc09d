//! The places of the queue, and who may have one: no adapter's flood takes those of the others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::pages::KvOwner;
use crate::refusal::Refusal;

/// An owner may hold so many times the places that are free.
const SHARE: u64 = 4;

/// Whether an owner that holds `held` of the `taken` places may have one more of `most`. Pure.
///
/// The more places are free, the more one owner may have of them: a single flood comes to four fifths of the queue, and
/// `n` floods leave one place in `4 n + 1` free. The last one is for who holds none. So whoever comes finds a place,
/// whatever the others ask for, and nobody's share is set aside while he asks for nothing. Source of the rule: Choudhury and Hahne, "Dynamic queue length
/// thresholds for shared-memory packet switches", IEEE/ACM Transactions on Networking 6 (1998).
pub fn admits(held: u32, taken: u32, most: u32) -> bool {
    match most.saturating_sub(taken) {
        0 => false,
        free => held == 0 || u64::from(held) < SHARE * u64::from(free - 1),
    }
}

/// The places of one engine: so many sequences wait or run.
#[derive(Clone, Debug)]
pub struct Queue {
    most: u32,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    places: u32,
    held: BTreeMap<KvOwner, u32>,
}

/// A place for one sequence; dropping it gives it back.
#[derive(Debug)]
pub struct Place {
    owner: KvOwner,
    taken: Arc<Mutex<Taken>>,
}

impl Queue {
    pub fn new(most: u32) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// A place for one more sequence of `owner`.
    ///
    /// # Errors
    /// 429 if there is none, or none that the others could spare.
    pub fn place(&self, owner: KvOwner) -> Result<Place, Refusal> {
        let mut taken = lock(&self.taken);
        let (places, held, most) = (taken.places, taken.held.get(&owner).copied().unwrap_or(0), self.most);
        if !admits(held, places, most) {
            let whose = match owner {
                KvOwner::Base => "of the base".to_owned(),
                KvOwner::Adapter(digest) => format!("of adapter {digest}"),
            };
            return Err(Refusal::busy(format!(
                "{held} sequences {whose} wait or run, {places} of all: the limit is {most}, and who holds more than {SHARE} \
                 times what is free leaves the rest to others"
            )));
        }
        taken.places += 1;
        *taken.held.entry(owner).or_default() += 1;
        Ok(Place { owner, taken: self.taken.clone() })
    }

    /// Places that are taken.
    pub fn taken(&self) -> u32 {
        lock(&self.taken).places
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        taken.places -= 1;
        if let Some(held) = taken.held.get_mut(&self.owner) {
            *held -= 1;
            if *held == 0 {
                taken.held.remove(&self.owner);
            }
        }
    }
}

fn lock(taken: &Mutex<Taken>) -> MutexGuard<'_, Taken> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use lorafleet_artifact::Digest;

    use super::*;

    #[test]
    fn floods_leave_a_place_for_whoever_has_none() {
        for most in [1, 2, 7, 1024] {
            let queue = Queue::new(most);
            assert!(queue.place(KvOwner::Base).is_ok(), "of {most}");
        }
        let queue = Queue::new(1024);
        let owner = |number: u8| KvOwner::Adapter(Digest::from_bytes([number; 32]));
        let flood = |number: u8| std::iter::from_fn(|| queue.place(owner(number)).ok()).collect::<Vec<_>>();
        // Alone it may have four fifths; whoever comes later gets the same of what is left.
        let first = flood(1);
        assert_eq!(first.len(), 819);
        let second = flood(2);
        assert_eq!(second.len(), 164);
        let refused = queue.place(owner(1)).unwrap_err();
        assert_eq!((refused.status, refused.code.as_ref()), (429, "Busy"));
        assert!(refused.message.contains("819") && refused.message.contains("1024"), "{refused}");
        let third = queue.place(KvOwner::Base).unwrap();
        assert_eq!(queue.taken(), 984);
        // What comes free goes to those who hold less.
        drop(first);
        assert_eq!(flood(2).len(), 654);
        drop((second, third));
        assert_eq!(queue.taken(), 0);
        assert!(lock(&queue.taken).held.is_empty());
    }
}
