//! Why an adapter or a base is not accepted.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The stable, typed reason of a refusal: a condition's `reason`, an error's `code`, a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// The source is on no allow-list.
    SourceForbidden,
    /// The source, or a file that an adapter must have, does not exist.
    NotFound,
    /// The bytes do not have the digest that was asked for.
    DigestMismatch,
    /// The bytes behind a pinned digest are others than when it was pinned.
    SourceChanged,
    /// The adapter does not say which base it was made for, and the policy wants it to.
    BaseUnknown,
    /// It says a base that is none of the identities of this one.
    BaseMismatch,
    RankTooHigh,
    RankNotAllowed,
    /// A module, layer or key that the base does not have; or not a single one that it has.
    ModuleUnknown,
    ModuleNotAllowed,
    ShapeMismatch,
    /// Understood, but not served: it would change the mathematics.
    UnsupportedFeature,
    TooLarge,
    SignatureInvalid,
    /// It changes nothing: every delta is exactly zero.
    NoEffect,
    /// The bytes break the rules of their own format.
    Malformed,
    NameConflict,
}

impl Reason {
    pub const ALL: [Self; 17] = [
        Self::SourceForbidden,
        Self::NotFound,
        Self::DigestMismatch,
        Self::SourceChanged,
        Self::BaseUnknown,
        Self::BaseMismatch,
        Self::RankTooHigh,
        Self::RankNotAllowed,
        Self::ModuleUnknown,
        Self::ModuleNotAllowed,
        Self::ShapeMismatch,
        Self::UnsupportedFeature,
        Self::TooLarge,
        Self::SignatureInvalid,
        Self::NoEffect,
        Self::Malformed,
        Self::NameConflict,
    ];

    /// As it stands in conditions, error codes and metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SourceForbidden => "SourceForbidden",
            Self::NotFound => "NotFound",
            Self::DigestMismatch => "DigestMismatch",
            Self::SourceChanged => "SourceChanged",
            Self::BaseUnknown => "BaseUnknown",
            Self::BaseMismatch => "BaseMismatch",
            Self::RankTooHigh => "RankTooHigh",
            Self::RankNotAllowed => "RankNotAllowed",
            Self::ModuleUnknown => "ModuleUnknown",
            Self::ModuleNotAllowed => "ModuleNotAllowed",
            Self::ShapeMismatch => "ShapeMismatch",
            Self::UnsupportedFeature => "UnsupportedFeature",
            Self::TooLarge => "TooLarge",
            Self::SignatureInvalid => "SignatureInvalid",
            Self::NoEffect => "NoEffect",
            Self::Malformed => "Malformed",
            Self::NameConflict => "NameConflict",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A final answer: asking again with the same bytes and the same policy gives the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub reason: Reason,
    /// For people: names the tensor, key or limit, and both values.
    pub message: String,
    /// The digest of what was refused, where all of it was read.
    pub found: Option<Digest>,
}

impl Refusal {
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), found: None }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(Reason::Malformed, message)
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Reason::UnsupportedFeature, message)
    }
}

/// At most `limit` characters of text that came from outside, with control characters made visible: for messages.
pub(crate) fn excerpt(text: &str, limit: usize) -> String {
    let mut out = String::new();
    for character in text.chars().take(limit) {
        match character {
            '\'' | '"' | '\\' => out.push(character),
            other => out.extend(other.escape_debug()),
        }
    }
    if text.chars().nth(limit).is_some() {
        out.push_str("...");
    }
    out
}
