//! Programs that end with this process, however it ends: a run that was killed leaves no server behind.
use std::ffi::OsStr;
use std::io;
use std::process::{Child, Command};
use std::sync::{LazyLock, mpsc};

use crate::{guard, shell};

/// A command that the kernel kills when the thread that starts it ends.
pub fn command<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).args(words);
    shell::forget_cargo(&mut command);
    guard::place(&mut command);
    command
}

/// Starts such a command from a thread that lives as long as the process: whoever asks for it may end before it.
///
/// # Errors
/// When it cannot be started.
pub fn spawn(command: Command) -> io::Result<Child> {
    let (answer, started) = mpsc::channel();
    let gone = |_| io::Error::other("the thread that starts programs has ended");
    STARTER.send((command, answer)).map_err(|_| gone(()))?;
    started.recv().map_err(|_| gone(()))?
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

static STARTER: LazyLock<mpsc::Sender<Order>> = LazyLock::new(|| {
    let (sender, orders) = mpsc::channel::<Order>();
    std::thread::spawn(move || {
        for (mut command, answer) in orders {
            // Who no longer waits for the answer has ended, and so has its need.
            let _ = answer.send(command.spawn());
        }
    });
    sender
});
