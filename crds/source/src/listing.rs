//! What a store says about files.

use std::fmt;

use lorafleet_artifact::{Refusal, SourceUri};

use crate::access::ReadLimits;
use crate::error::{ErrorKind, SourceError};

/// The plain files of one folder, sorted by name; or the one file that a URI names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub uri: SourceUri,
    pub files: Vec<FileInfo>,
    /// The URI itself is the file.
    pub single: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Without folder.
    pub name: String,
    pub bytes: u64,
    pub version: Version,
}

/// What a store tells apart the versions of a file by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    pub tag: Option<String>,
    /// Seconds since 1970.
    pub modified_s: Option<i64>,
}

impl Listing {
    pub fn file(&self, name: &str) -> Option<&FileInfo> {
        self.files.iter().find(|file| file.name == name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.name.as_str())
    }

    /// What is refused about the names in a folder, with the folder's own.
    pub(crate) fn refused(&self, refusal: Refusal) -> Refusal {
        Refusal::new(refusal.reason, format!("'{}': {}", self.uri, refusal.message))
    }
}

/// Whether a folder in which so many files and entries have been seen may be listed further.
pub(crate) fn bounded(uri: &SourceUri, files: usize, entries: usize, limits: &ReadLimits) -> Result<(), SourceError> {
    let too_many = |most: usize, of: &str| {
        Err(SourceError::new(ErrorKind::TooLarge, format!("'{uri}' holds more than {most} {of}")))
    };
    if files > limits.files {
        return too_many(limits.files, "files");
    }
    if entries > limits.entries {
        return too_many(limits.entries, "files and folders");
    }
    Ok(())
}

impl Version {
    /// Whether both are said about the same file and cannot both be true. A store that tells nothing contradicts
    /// nothing; the digest decides then.
    pub(crate) fn contradicts(&self, other: &Self) -> bool {
        match (&self.tag, &other.tag, self.modified_s, other.modified_s) {
            (Some(left), Some(right), ..) => left != right,
            (_, _, Some(left), Some(right)) => left != right,
            _ => false,
        }
    }
}

/// For status and history: opaque.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.tag, self.modified_s) {
            (Some(tag), _) => f.write_str(tag.trim_matches('"')),
            (None, Some(modified)) => write!(f, "modified-{modified}"),
            (None, None) => f.write_str("unknown"),
        }
    }
}
