//! Servers on 127.0.0.1 that live as long as a measurement, and the memory of processes.
use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::tied;

/// Longest time for a server to answer.
const START_TIME_MAX: Duration = Duration::from_secs(60);
/// Fine enough for a start of a second.
const POLL: Duration = Duration::from_millis(2);

/// A running program; it ends when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    log: PathBuf,
    port: u16,
}

impl Server {
    /// Starts a program that is to listen on `port`; what it prints goes to `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>, port: u16, log: &Path) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("make {}", log.display()))?;
        let mut command = tied::command(words);
        // Settings of the user's own shell do not count.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("LORAFLEET_") {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = tied::spawn(command).context("start a server")?;
        Ok(Self { child, log: log.to_owned(), port })
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn memory(&self) -> Result<Memory> {
        Memory::of(self.child.id())
    }

    /// Waits until `look` is true. Errors of a look are those of a server that is not there yet.
    ///
    /// # Errors
    /// When it has ended, or a minute is over; the message holds the end of what it printed.
    pub fn wait(&mut self, mut look: impl FnMut() -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !look().unwrap_or(false) {
            let ended = self.child.try_wait()?;
            if ended.is_some() || begun.elapsed() > START_TIME_MAX {
                let printed = fs::read_to_string(&self.log).unwrap_or_default();
                bail!(
                    "{}: {}\n{printed}",
                    self.log.display(),
                    ended.map_or("no answer".to_owned(), |it| it.to_string())
                );
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port of 127.0.0.1 that nobody has just now.
///
/// # Errors
/// When there is none.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").context("find a free port")?.local_addr()?.port())
}

/// Resident memory of a process in MiB.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub now: f64,
    pub most: f64,
}

impl Memory {
    /// # Errors
    /// When the process is gone.
    pub fn of(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kib: Option<f64> =
                line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok());
            kib.map(|kib| kib / 1024.0).with_context(|| format!("{path} has no {name}"))
        };
        Ok(Self { now: field("VmRSS:")?, most: field("VmHWM:")? })
    }
}

/// Seconds of processor that a process has had.
///
/// # Errors
/// When the process is gone.
pub fn processor_time(process: u32) -> Result<f64> {
    /// Linux counts hundredths of a second for whoever reads `/proc`.
    const TICKS_PER_SECOND: f64 = 100.0;
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // After the name in parentheses, `utime` and `stime` are the twelfth and thirteenth.
    let after = text.rsplit_once(')').map_or("", |(_, after)| after);
    let ticks: Vec<f64> = after.split_whitespace().skip(11).take(2).filter_map(|word| word.parse().ok()).collect();
    ensure!(ticks.len() == 2, "{path} has no times: {text}");
    Ok(ticks.iter().sum::<f64>() / TICKS_PER_SECOND)
}
