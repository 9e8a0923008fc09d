//! How much of an adapter one step writes to the device, as the steps before it show. Pure.

use std::time::Duration;

use crate::limits::Limits;

/// Before anything is known.
const BYTES_PER_SECOND: f64 = 1e9;
/// Shorter than this, a piece says more about its beginning than about its bytes.
const BYTES_MIN: u64 = 256 << 10;
/// The last piece counts for one part in so many.
const MEMORY: f64 = 4.0;

/// How fast this machine writes adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UploadPace {
    bytes_per_second: f64,
}

impl Default for UploadPace {
    fn default() -> Self {
        Self { bytes_per_second: BYTES_PER_SECOND }
    }
}

impl UploadPace {
    /// A step wrote so many bytes and took so much longer for it.
    pub fn wrote(&mut self, bytes: u64, took: Duration) {
        let seconds = took.as_secs_f64();
        if bytes >= BYTES_MIN && seconds > 0.0 {
            self.bytes_per_second += (bytes as f64 / seconds - self.bytes_per_second) / MEMORY;
        }
    }

    /// Bytes that the next step may write. Where somebody waits for the step's tokens, it may take longer by
    /// `upload_time_per_step`, or by half of the `step` that he waits for anyhow, up to `upload_time_max`: so a large
    /// adapter is there in a few steps. What small adapters need is written all the same.
    pub fn bytes(&self, limits: &Limits, step: Option<Duration>) -> u64 {
        let most = limits.upload_bytes_per_step;
        let Some(step) = step else { return most };
        let pause = limits.upload_time_per_step.max(limits.upload_time_max.min(step / 2));
        let in_time = (self.bytes_per_second * pause.as_secs_f64()) as u64;
        in_time.max(limits.upload_bytes_min).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_writes_what_it_has_time_for_and_always_something() {
        let limits = Limits {
            upload_bytes_per_step: 64 << 20,
            upload_bytes_min: 4 << 20,
            upload_time_per_step: Duration::from_millis(10),
            upload_time_max: Duration::from_millis(40),
            ..Limits::default()
        };
        let mut pace = UploadPace::default();
        let millis = Duration::from_millis;
        assert_eq!(pace.bytes(&limits, Some(millis(1))), 10_000_000);
        assert_eq!(pace.bytes(&limits, None), 64 << 20);
        // Half of a longer step.
        assert_eq!(pace.bytes(&limits, Some(millis(50))), 25_000_000);
        assert_eq!(pace.bytes(&limits, Some(millis(5000))), 40_000_000);
        let mut settle = |bytes: u64, took: u64| {
            (0..50).for_each(|_| pace.wrote(bytes, millis(took)));
            pace.bytes(&limits, Some(millis(20)))
        };
        assert!(settle(20_000_000, 10).abs_diff(20_000_000) < 1000);
        assert_eq!(settle(1 << 20, 100), 4 << 20);
        assert_eq!(settle(1 << 30, 1), 64 << 20);
        // Small pieces, and those that took no time, say nothing.
        assert_eq!(settle(1000, 1000), 64 << 20);
        assert_eq!(settle(1 << 30, 0), 64 << 20);
    }
}
