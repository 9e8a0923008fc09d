//! Why a text could not be read or written.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The model's files contradict themselves. Only while loading.
    #[error("{what}: {why}")]
    Malformed { what: String, why: String },
    /// The model needs something that is not built in. Only while loading.
    #[error("{what} is not supported: {why}")]
    Unsupported { what: String, why: String },
    #[error("the text has {bytes} bytes, the limit is {limit}")]
    TooLong { bytes: usize, limit: usize },
    #[error("the tokenizer failed: {why}")]
    Tokenizer { why: String },
    #[error("this model has no chat template: use the completions route")]
    NoTemplate,
    /// What the template raised, or the limit that it broke.
    #[error("the chat template refuses the messages: {why}")]
    Template { why: String },
    #[error("role '{role}' of message {index} is not one of system, developer, user, assistant, tool, function")]
    UnknownRole { index: usize, role: String },
    #[error("{count} stop strings, the limit is {limit}")]
    TooManyStops { count: usize, limit: usize },
    #[error("stop string {index} has {bytes} bytes, expected 1 to {limit}")]
    StopLength { index: usize, bytes: usize, limit: usize },
}

impl TextError {
    /// The stable code of this error: `Malformed` and `UnsupportedFeature` are the vocabulary of adapters and bases,
    /// the others belong to requests.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Read { .. } => "NotFound",
            Self::Malformed { .. } => "Malformed",
            Self::Unsupported { .. } => "UnsupportedFeature",
            Self::TooLong { .. } => "TooLarge",
            Self::Tokenizer { .. } => "TokenizerFailed",
            Self::NoTemplate => "NoChatTemplate",
            Self::Template { .. } => "ChatTemplateRefused",
            Self::UnknownRole { .. } => "UnknownRole",
            Self::TooManyStops { .. } | Self::StopLength { .. } => "StopLimit",
        }
    }

    pub(super) fn malformed(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Malformed { what: what.into(), why: why.into() }
    }

    pub(super) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), why: why.into() }
    }
}
