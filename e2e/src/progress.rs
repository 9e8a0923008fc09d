//! Progress lines with times, so that a long run shows where it is and a slow step shows itself.
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// From now on the work goes on where nobody reads what is printed. A test does not ask for it: its runner takes what is printed
/// only in the usual way.
pub fn outlive_readers() {
    OUTLIVE_READERS.store(true, Ordering::Relaxed);
}

static OUTLIVE_READERS: AtomicBool = AtomicBool::new(false);

/// Prints text as it is.
pub fn print(text: &str) {
    if OUTLIVE_READERS.load(Ordering::Relaxed) {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    } else {
        print!("{text}");
    }
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
