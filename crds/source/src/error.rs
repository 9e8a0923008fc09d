//! What can go wrong on the way to a store, and whether asking again may help.

use std::error::Error;
use std::fmt;

use lorafleet_artifact::{Reason, Refusal};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// On no allow-list, or a path that leads outside of its prefix.
    NotAllowed,
    /// No such bucket, folder or file.
    NotFound,
    /// The store knows us and says no, or does not know us.
    Forbidden,
    /// The store did not answer, or stopped in the middle, for longer than the limit.
    Timeout,
    /// The store, or the way to it, is broken.
    Unavailable,
    /// The file became another one between two reads.
    Changed,
    /// More files or bytes than the limits allow.
    TooLarge,
    /// An access that cannot work as it is written: an endpoint that is no store, another region or no bucket's name, keys that
    /// cannot be read.
    Misconfigured,
    /// A scheme that nothing here reads.
    Unsupported,
}

impl ErrorKind {
    /// Stable: an error's `code`, a metric's label.
    pub const fn as_str(self) -> &'static str {
        match self {
            // The first two are words of the adapters' own vocabulary.
            Self::NotAllowed => Reason::SourceForbidden.as_str(),
            Self::NotFound => Reason::NotFound.as_str(),
            Self::Forbidden => "SourceDenied",
            Self::Timeout => "SourceTimeout",
            Self::Unavailable => "SourceUnavailable",
            Self::Changed => Reason::SourceChanged.as_str(),
            Self::TooLarge => Reason::TooLarge.as_str(),
            Self::Misconfigured => "SourceMisconfigured",
            Self::Unsupported => Reason::UnsupportedFeature.as_str(),
        }
    }
}

/// Says what was being done to what, with the cause in `source()`.
#[derive(Debug)]
pub struct SourceError {
    pub kind: ErrorKind,
    message: String,
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl SourceError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), cause: None }
    }

    pub(crate) fn because(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    pub(crate) fn io(doing: &str, what: &str, error: std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Forbidden,
            _ => ErrorKind::Unavailable,
        };
        Self::new(kind, format!("{doing} {what}")).because(error)
    }

    /// Whether the same question may have another answer later, without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Changed)
    }
}

impl fmt::Display for SourceError {
    /// With the chain of causes: a condition's message has one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        let mut cause = self.cause.as_deref().map(|cause| cause as &dyn Error);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl Error for SourceError {}

impl From<Refusal> for SourceError {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal.reason {
            Reason::NotFound => ErrorKind::NotFound,
            Reason::TooLarge => ErrorKind::TooLarge,
            _ => ErrorKind::NotAllowed,
        };
        Self::new(kind, refusal.message)
    }
}
