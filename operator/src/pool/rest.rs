//! How soon a pool may be looked at again, however often something of it changes.
//!
//! While thousands of adapters arrive, each is an event, and a pass costs in proportion to all of them. So what happens
//! during a rest is taken together by the pass that follows it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest rest after a pass.
const REST_MIN: Duration = Duration::from_millis(100);

/// When each pool, by its uid, may be looked at again.
#[derive(Default)]
pub struct Rests(Mutex<HashMap<String, Instant>>);

impl Rests {
    /// How much of the pool's rest is left.
    pub(super) fn left(&self, uid: &str, now: Instant) -> Option<Duration> {
        let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uid)?;
        until.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// A pass that began then has ended.
    pub(super) fn begin(&self, uid: &str, started: Instant, now: Instant) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // What is over is nobody's rest; so pools that are gone are forgotten too.
        all.retain(|_, until| *until > now);
        all.insert(uid.to_owned(), now + rest(now.saturating_duration_since(started)));
    }
}

/// A pass takes at most half of the time, however long it is.
fn rest(took: Duration) -> Duration {
    took.max(REST_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_followed_by_a_rest_as_long_as_itself() {
        let (rests, start) = (Rests::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(rests.left("a", start), None);
        rests.begin("a", start, at(1));
        rests.begin("b", start, at(700));
        assert_eq!(rests.left("a", at(700)), None, "the short one is over");
        assert_eq!(rests.left("b", at(800)), Some(Duration::from_millis(600)));
        rests.begin("a", at(800), at(801));
        assert_eq!(rests.left("a", at(850)), Some(Duration::from_millis(51)));
        assert_eq!((rests.left("a", at(901)), rests.left("b", at(1400))), (None, None));
    }
}
