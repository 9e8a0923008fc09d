//! Waiting for a condition with a limit, and saying what was seen last when it did not come.
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

const POLL: Duration = Duration::from_millis(100);

/// Asks `look` until it gives something. A look may fail: what it failed with last is told when time is up.
///
/// # Errors
/// When `limit` is over; the message names what was awaited.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = Instant::now();
    loop {
        let last = match look() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => anyhow!("not yet so"),
            Err(error) => error,
        };
        if begun.elapsed() >= limit {
            return Err(last.context(format!("waited {}s until {what}", limit.as_secs())));
        }
        std::thread::sleep(POLL);
    }
}
