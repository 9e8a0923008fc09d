//! Programs run from here: every failure names the command, its exit and the end of what it printed.
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{guard, progress};

/// Lines of a failed command's output that an error carries.
const ERROR_LINES_MAX: usize = 40;
/// The same of a command that builds something.
const WATCHED_LINES_MAX: usize = 400;
/// Pause between two lines that say how far a command is.
const TELL_EVERY: Duration = Duration::from_secs(20);

/// One command to run, with its words kept for errors.
#[derive(Debug)]
pub struct Shell {
    command: Command,
    words: Vec<String>,
    input: Option<Vec<u8>>,
}

/// What a command left: whether it ended well, and what it printed.
#[derive(Clone, Debug)]
pub struct Finished {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
    words: String,
    code: Option<i32>,
}

/// What `cargo run` and `cargo test` tell the program that they start is nobody else's: a build script that watches one of these
/// (ring's does) would run anew at each change from a shell's cargo to ours, and half of all crates after it.
pub fn forget_cargo(command: &mut Command) {
    const PREFIXES: [&str; 4] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if PREFIXES.iter().any(|prefix| text.starts_with(prefix))
            || text == "CARGO_PRIMARY_PACKAGE"
            || text == "OUT_DIR"
        {
            command.env_remove(&name);
        }
    }
}

impl Shell {
    /// A command by program name or path; standard input is empty.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let words = vec![program.as_ref().to_string_lossy().into_owned()];
        let mut command = Command::new(program);
        forget_cargo(&mut command);
        guard::place(&mut command);
        Self { command, words, input: None }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.words.push(arg.as_ref().to_string_lossy().into_owned());
        self.command.arg(arg);
        self
    }

    #[must_use]
    pub fn args<S: AsRef<OsStr>>(self, args: impl IntoIterator<Item = S>) -> Self {
        args.into_iter().fold(self, Self::arg)
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    #[must_use]
    pub fn env_remove(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    #[must_use]
    pub fn folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// What the command reads from its standard input.
    #[must_use]
    pub fn input(mut self, text: impl Into<Vec<u8>>) -> Self {
        self.input = Some(text.into());
        self
    }

    /// Runs to the end and keeps what was printed, whatever the exit.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn finish(mut self) -> Result<Finished> {
        let words = self.words.join(" ");
        let stdin = if self.input.is_some() { Stdio::piped() } else { Stdio::null() };
        let mut child = self
            .command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start `{words}`"))?;
        // The writer is a thread of its own: a command may print before it has read everything.
        let writer = child
            .stdin
            .take()
            .zip(self.input.take())
            .map(|(mut stdin, text)| std::thread::spawn(move || stdin.write_all(&text)));
        let output = child.wait_with_output().with_context(|| format!("wait for `{words}`"))?;
        if let Some(writer) = writer {
            // A command that ends before it has read all says so by its own exit.
            let _ = writer.join();
        }
        Ok(Finished {
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            words,
            code: output.status.code(),
        })
    }

    /// Runs to the end; its standard output.
    ///
    /// # Errors
    /// When it cannot be started or exits with anything but zero.
    pub fn output(self) -> Result<String> {
        Ok(self.finish()?.ok()?.stdout)
    }

    /// Runs to the end and forgets what it printed.
    ///
    /// # Errors
    /// As [`Shell::output`].
    pub fn run(self) -> Result<()> {
        self.output().map(drop)
    }

    /// Runs to the end without showing what it prints; every twenty seconds a line says how far it is.
    ///
    /// # Errors
    /// As [`Shell::output`]; the message holds more lines, since compilers need them.
    pub fn watch(mut self, name: &str) -> Result<()> {
        let words = self.words.join(" ");
        let command = self.command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start `{words}`"))?;
        let (sender, receiver) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            forward_lines(stdout, sender.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            forward_lines(stderr, sender);
        }
        let mut lines: Vec<String> = Vec::new();
        let mut told = Instant::now();
        loop {
            match receiver.recv_timeout(TELL_EVERY.saturating_sub(told.elapsed())) {
                Ok(line) => lines.push(line),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let last = lines.last().map_or("nothing yet", |line| line.trim());
                    progress::say(format!("  {name}: {} so far, now {last}", lines.len()));
                    told = Instant::now();
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = child.wait().with_context(|| format!("wait for `{words}`"))?;
        if !status.success() {
            bail!("`{words}`: {status}\n{}", tail(&lines.join("\n"), WATCHED_LINES_MAX));
        }
        Ok(())
    }

    /// Runs with both outputs shown as they come, and gives each line to `see`. True when it exits with zero.
    ///
    /// # Errors
    /// When it cannot be started or its output cannot be read.
    pub fn stream(mut self, mut see: impl FnMut(&str)) -> Result<bool> {
        let words = self.words.join(" ");
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("start `{words}`"))?;
        let stdout = child.stdout.take().with_context(|| format!("read `{words}`"))?;
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.with_context(|| format!("read `{words}`"))?;
            let line = String::from_utf8_lossy(&line);
            progress::print(&format!("{line}\n"));
            see(&line);
        }
        Ok(child.wait().with_context(|| format!("wait for `{words}`"))?.success())
    }
}

impl Finished {
    /// Itself when the exit was zero.
    ///
    /// # Errors
    /// Otherwise: the command, its exit code and the end of both outputs.
    pub fn ok(self) -> Result<Self> {
        if self.success {
            return Ok(self);
        }
        let exit = self.code.map_or_else(|| "killed by a signal".to_owned(), |code| format!("exit {code}"));
        bail!(
            "`{}`: {exit}\n{}{}",
            self.words,
            tail(&self.stdout, ERROR_LINES_MAX),
            tail(&self.stderr, ERROR_LINES_MAX)
        )
    }
}

/// Sends each line of an output from a thread of its own, which ends with the output.
fn forward_lines(output: impl Read + Send + 'static, sender: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
}

fn tail(text: &str, most: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let kept = &lines[lines.len().saturating_sub(most)..];
    kept.iter().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_hears_nothing_of_the_cargo_that_runs_this() {
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "run by cargo test");
        let printed = Shell::new("env").output().unwrap();
        let heard: Vec<&str> = printed.lines().filter(|it| it.starts_with("CARGO_MANIFEST_DIR=")).collect();
        assert!(heard.is_empty() && printed.contains("PATH="), "{printed}");
    }
}
