//! A process beside a run, which ends what the run started however the run ends: by itself, by Ctrl-C, by any signal. A run is a
//! command of `xtask`, or a program of tests that starts a cluster.
//!
//! The run holds the other end of the guard's standard input, so the kernel tells the guard. Every program that the run starts is
//! in the guard's process group, and so is what those start; a cluster that is to stay up leaves it by a session of its own.
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::cluster::{Cluster, Process, processes};
use crate::measure;
use crate::shell::Shell;

/// Name of the hidden subcommand that [`start`] runs.
pub const SUBCOMMAND: &str = "guard";

/// Time for programs to clear up after themselves once they are asked to end, for compilers to end their file, and then for all
/// to be gone.
const MANNERS: Duration = Duration::from_secs(3);
const COMPILING_MAX: Duration = Duration::from_secs(120);
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// What the run says when it ends by itself.
const DONE: &[u8] = b"done";

/// Flag of [`SUBCOMMAND`] for a [`Run::Tests`].
pub const OF_TESTS: &str = "of-tests";

/// Whose guard it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Says [`done`] when it ends by itself.
    Command,
    /// A test runner has no place for a last word: its end is the same to the guard, however it comes.
    Tests,
}

struct Guard {
    process: Child,
    word: ChildStdin,
}

static GUARD: OnceLock<Mutex<Guard>> = OnceLock::new();

/// Starts the guard of this process; from now on [`place`] puts programs under it. `xtask` is the program with [`SUBCOMMAND`].
///
/// # Errors
/// When it cannot be started.
pub fn start(xtask: &Path, run: Run) -> Result<()> {
    let mut command = Command::new(xtask);
    command.arg(SUBCOMMAND).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
    if run == Run::Tests {
        command.arg(format!("--{OF_TESTS}"));
    }
    let mut process = command.spawn().with_context(|| format!("start the guard {}", xtask.display()))?;
    let word = process.stdin.take().context("speak to the guard")?;
    // There is one guard per process: a second call finds the first.
    let _ = GUARD.set(Mutex::new(Guard { process, word }));
    Ok(())
}

/// Puts a program that is about to be started under the guard, if there is one.
pub fn place(command: &mut Command) {
    let Some(guard) = GUARD.get() else { return };
    let mut guard = guard.lock().unwrap_or_else(PoisonError::into_inner);
    // Nobody can enter the group of a guard that somebody has killed.
    if let (Ok(None), Ok(group)) = (guard.process.try_wait(), i32::try_from(guard.process.id())) {
        command.process_group(group);
    }
}

/// The run ends by itself: nothing of it is left, and the guard need not say a word.
pub fn done() {
    let Some(guard) = GUARD.get() else { return };
    let mut guard = guard.lock().unwrap_or_else(PoisonError::into_inner);
    // A guard that is gone needs no word.
    let _ = guard.word.write_all(DONE);
}

/// The guard's own work: waits for the end of the run that started it, and clears up.
///
/// # Errors
/// When something cannot be ended or removed.
pub fn watch(run: Run) -> Result<()> {
    let mut said = Vec::new();
    std::io::stdin().read_to_end(&mut said).context("wait for the end of the run")?;
    let left = end_group()?;
    let cache = Cache::open()?;
    let clusters = Cluster::end_orphans(&cache)?;
    measure::clear(&cache)?;
    let what = match run {
        Run::Command if said == DONE => return Ok(()),
        Run::Command => "ended from outside",
        Run::Tests if left == 0 && clusters.is_empty() => return Ok(()),
        Run::Tests => "the tests have ended",
    };
    let clusters: String = clusters.iter().map(|name| format!(", cluster {name}")).collect();
    let programs = if left == 1 { "program" } else { "programs" };
    say(&format!("{what}, and with it: {left} {programs}{clusters}"));
    let kept = if run == Run::Command { Cluster::kept(&cache) } else { Vec::new() };
    for name in kept {
        say(&format!("cluster {name} stays up; to end it: cargo xtask down --name {name}"));
    }
    Ok(())
}

/// Ends every other process of this one's group; how many there were.
fn end_group() -> Result<usize> {
    let begun = Instant::now();
    let first = members().len();
    let mut told = false;
    loop {
        let left = members();
        if left.is_empty() {
            return Ok(first);
        }
        let waited = begun.elapsed();
        if waited > COMPILING_MAX + PATIENCE {
            bail!("still running after {waited:?}: {left:?}");
        }
        if !told && left.iter().any(|process| role(process) == Role::Compiler) {
            told = true;
            say("ended; a compiler that is at work ends its file first");
        }
        for process in &left {
            if let Some(signal) = order(role(process), left.iter().map(role), waited) {
                // It may have ended by itself meanwhile.
                Shell::new("kill").args([signal, &process.id.to_string()]).finish()?;
            }
        }
        std::thread::sleep(POLL);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Starts compilers, and holds the lock on what they write.
    Cargo,
    /// With an incremental cache.
    Compiler,
    /// Started by a compiler.
    Linker,
    Other,
}

fn role(process: &Process) -> Role {
    let program = process.words.first().map(String::as_str).unwrap_or_default();
    match program.rsplit('/').next().unwrap_or_default() {
        "cargo" => Role::Cargo,
        "rustc" | "clippy-driver" if process.words.iter().any(|word| word.contains("incremental=")) => Role::Compiler,
        "cc" | "gcc" | "collect2" | "ld" | "ld.lld" | "rust-lld" => Role::Linker,
        _ => Role::Other,
    }
}

/// The signal for one of several processes so long after the end of the run. A compiler that is killed may leave an incremental
/// cache from which the next build makes a program that does not link: it may end its file, and cargo, which would start another
/// one, stands still so long, with its lock on the folder.
fn order(one: Role, mut all: impl Iterator<Item = Role>, waited: Duration) -> Option<&'static str> {
    let compiling = waited < COMPILING_MAX && all.any(|role| role == Role::Compiler);
    match one {
        Role::Cargo if compiling => Some("-STOP"),
        Role::Compiler | Role::Linker if compiling => None,
        Role::Other if waited < MANNERS => Some("-INT"),
        _ => Some("-KILL"),
    }
}

/// The other processes in this one's group.
fn members() -> Vec<Process> {
    let own = std::process::id();
    let others = processes().into_iter().filter(|process| process.id != own);
    others.filter(|process| group(process.id) == Some(own)).collect()
}

/// Number of a process's group.
fn group(process: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // A program's name may hold anything, but is the last thing in parentheses. After it: state, parent, group.
    text.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

/// Whoever read it may be gone as well.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_ends_its_file_and_all_else_ends_at_once() {
        use Role::{Cargo, Compiler, Linker, Other};
        let (now, later) = (Duration::ZERO, COMPILING_MAX);
        for (all, waited, orders) in [
            (&[Cargo, Compiler, Other][..], now, &[Some("-STOP"), None, Some("-INT")][..]),
            (&[Cargo, Compiler, Linker, Other], MANNERS, &[Some("-STOP"), None, None, Some("-KILL")]),
            (&[Cargo, Compiler], later, &[Some("-KILL"), Some("-KILL")]),
            (&[Cargo, Linker, Other], now, &[Some("-KILL"), Some("-KILL"), Some("-INT")]),
        ] {
            let given: Vec<_> = all.iter().map(|one| order(*one, all.iter().copied(), waited)).collect();
            assert_eq!(given, orders, "{all:?} after {waited:?}");
        }
    }
}
