//! Being told to end, by SIGTERM or Ctrl-C, from the first moment of a process on.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Hears signals. A process that is the first of its container is not ended by one that it has no handler for, so this
/// is made before anything that may take long.
#[derive(Debug)]
pub struct Told {
    terminate: Signal,
    interrupt: Signal,
}

/// What was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    Terminate,
    Interrupt,
}

impl Told {
    /// # Errors
    /// If the system has no room for another handler.
    pub fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Heard {
        tokio::select! {
            _ = self.terminate.recv() => Heard::Terminate,
            _ = self.interrupt.recv() => Heard::Interrupt,
        }
    }
}

impl Heard {
    pub fn name(self) -> &'static str {
        match self {
            Self::Terminate => "SIGTERM",
            Self::Interrupt => "SIGINT",
        }
    }
}

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As it was told to.
    Drained,
    /// It was told a second time, before all that ran had ended.
    CutOff(Heard),
}

impl End {
    /// 0, or what a shell shows for a process that the signal ended.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Drained => 0,
            Self::CutOff(Heard::Interrupt) => 128 + 2,
            Self::CutOff(Heard::Terminate) => 128 + 15,
        }
    }
}
