//! What may be let go for others, in the order in which it goes.

use std::cmp::Reverse;
use std::time::Instant;

use super::NOBODY;

#[derive(Clone, Copy)]
pub(super) struct Victim {
    pub index: usize,
    /// Goes for those with an earlier place.
    pub place: usize,
    /// Goes also for a floor, that is for one that nobody waits for either. Only for those with no place of their own.
    pub for_floors: bool,
    pub touched: Instant,
    /// Bytes or pages that are free once it is gone.
    pub size: u64,
}

/// Who is wanted latest goes first, and of those the longest untouched. Sorted once; whoever asks must not have an earlier
/// place than those who asked before, so that who was passed over is never wanted again.
pub(super) struct Victims {
    queue: Vec<Victim>,
    /// Sizes of all before an index, and of those among them that go for floors.
    sums: Vec<(u64, u64)>,
    next: usize,
}

impl Victims {
    pub fn new(mut queue: Vec<Victim>) -> Self {
        queue.sort_by_key(|victim| (Reverse(victim.place), victim.touched));
        let mut sums = vec![(0, 0)];
        let (mut all, mut for_floors) = (0_u64, 0_u64);
        for victim in &queue {
            all = all.saturating_add(victim.size);
            for_floors = for_floors.saturating_add(if victim.for_floors { victim.size } else { 0 });
            sums.push((all, for_floors));
        }
        Self { queue, sums, next: 0 }
    }

    /// The first to go for who is served at `place`. It is gone then.
    pub fn pop(&mut self, place: usize) -> Option<Victim> {
        while let Some(victim) = self.queue.get(self.next).copied() {
            if place != NOBODY && victim.place <= place {
                return None;
            }
            self.next += 1;
            if place != NOBODY || victim.for_floors {
                return Some(victim);
            }
        }
        None
    }

    /// Sizes of all that may still go for who is served at `place`.
    pub fn size(&self, place: usize) -> u64 {
        let sums = |index: usize| self.sums.get(index).copied().unwrap_or_default();
        let (gone, gone_for_floors) = sums(self.next);
        if place == NOBODY {
            let (_, all) = sums(self.queue.len());
            return all.saturating_sub(gone_for_floors);
        }
        let (all, _) = sums(self.queue.partition_point(|victim| victim.place > place));
        all.saturating_sub(gone)
    }
}
