//! Progress lines with times, so that a long run shows where it is and a slow step shows itself.
use std::io::Write;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

static START: OnceLock<Instant> = OnceLock::new();

/// Seconds since the first line of this run.
fn elapsed() -> Duration {
    START.get_or_init(Instant::now).elapsed()
}

/// Prints one line with the time since the start of the run.
pub fn say(text: impl AsRef<str>) {
    print(&format!("[{:7.1}s] {}\n", elapsed().as_secs_f64(), text.as_ref()));
}

/// Prints text as it is. Who no longer reads does not keep the work from being done.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Runs `work` between two lines: what begins, and how it ended after how long.
///
/// # Errors
/// Whatever `work` fails with, unchanged.
pub fn step<T>(name: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    say(format!("{name} ..."));
    let begun = Instant::now();
    let done = work();
    let word = if done.is_ok() { "done" } else { "FAILED" };
    say(format!("{name}: {word} in {:.1}s", begun.elapsed().as_secs_f64()));
    done
}
