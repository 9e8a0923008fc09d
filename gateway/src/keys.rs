//! API keys of clients, and the models that each may use. Pure; `secret_files` reads the folder.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use crate::resolve::Permitted;

/// Entries of one folder that are read.
pub const CLIENTS_MAX: usize = 4_096;
pub const ENTRY_BYTES_MAX: usize = 64 << 10;
const KEY_BYTES_MIN: usize = 8;
const KEY_BYTES_MAX: usize = 512;
const MODELS_MAX: usize = 1_000;

/// One client as its entry gives it: `{"key": "...", "models": ["smollm2", "support"]}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    models: Vec<String>,
}

/// A known client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Name of its entry: safe to log.
    pub name: String,
    pub permitted: Permitted,
}

/// All clients. Keys are kept as SHA-256, so that every comparison is of 32 bytes and no key lies in memory.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys {
    clients: Vec<([u8; 32], Client)>,
}

/// What is wrong with one entry; the others count all the same. Never holds the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("entry '{entry}' is not {{\"key\": \"...\", \"models\": [...]}}: {kind} at line {line}, column {column}")]
    Malformed { entry: String, kind: &'static str, line: usize, column: usize },
    #[error(
        "entry '{entry}' has a key of {bytes} bytes; {KEY_BYTES_MIN} to {KEY_BYTES_MAX} visible ASCII characters are allowed"
    )]
    KeyForm { entry: String, bytes: usize },
    #[error("entry '{entry}' has the same key as '{other}'; '{other}' keeps it")]
    SameKey { entry: String, other: String },
    #[error("entry '{entry}' lists {count} models, above the limit of {MODELS_MAX}")]
    TooManyModels { entry: String, count: usize },
    #[error("entry '{entry}' has {bytes} bytes, above the limit of {ENTRY_BYTES_MAX}")]
    TooLarge { entry: String, bytes: usize },
    #[error("entry '{entry}' is beyond the limit of {CLIENTS_MAX} clients")]
    TooMany { entry: String },
}

impl Keys {
    /// From the folder's entries, and every entry that does not count. `namespace` is the pool's: a model written with it
    /// means the same as without.
    pub fn parse(entries: &BTreeMap<String, Vec<u8>>, namespace: &str) -> (Self, Vec<EntryError>) {
        let mut keys = Self::default();
        let mut errors = Vec::new();
        for (entry, bytes) in entries {
            match keys.client(entry, bytes, namespace) {
                Ok(client) => keys.clients.push(client),
                Err(error) => errors.push(error),
            }
        }
        (keys, errors)
    }

    fn client(&self, entry: &str, bytes: &[u8], namespace: &str) -> Result<([u8; 32], Client), EntryError> {
        let name = || entry.to_owned();
        if self.clients.len() >= CLIENTS_MAX {
            return Err(EntryError::TooMany { entry: name() });
        }
        if bytes.len() > ENTRY_BYTES_MAX {
            return Err(EntryError::TooLarge { entry: name(), bytes: bytes.len() });
        }
        let parsed: Entry = serde_json::from_slice(bytes).map_err(|error| malformed(entry, &error))?;
        let visible = parsed.key.bytes().all(|byte| byte.is_ascii_graphic());
        if !visible || !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&parsed.key.len()) {
            return Err(EntryError::KeyForm { entry: name(), bytes: parsed.key.len() });
        }
        if parsed.models.len() > MODELS_MAX {
            return Err(EntryError::TooManyModels { entry: name(), count: parsed.models.len() });
        }
        let hash: [u8; 32] = Sha256::digest(parsed.key.as_bytes()).into();
        if let Some((_, other)) = self.clients.iter().find(|(known, _)| known.ct_eq(&hash).into()) {
            return Err(EntryError::SameKey { entry: name(), other: other.name.clone() });
        }
        let own = format!("{namespace}/");
        let canonical = |model: String| model.strip_prefix(&own).map(str::to_owned).unwrap_or(model);
        let permitted = if parsed.models.iter().any(|model| model == "*") {
            Permitted::All
        } else {
            Permitted::Only(parsed.models.into_iter().map(canonical).collect::<BTreeSet<_>>())
        };
        Ok((hash, Client { name: name(), permitted }))
    }

    /// The client whose key this is. Compares with every key, equal or not, so that time tells nothing.
    pub fn find(&self, presented: &[u8]) -> Option<&Client> {
        let hash: [u8; 32] = Sha256::digest(presented).into();
        let mut found = u64::MAX;
        for (index, (known, _)) in (0_u64..).zip(&self.clients) {
            let equal: Choice = known.ct_eq(&hash);
            found.conditional_assign(&index, equal);
        }
        let (_, client) = self.clients.get(usize::try_from(found).ok()?)?;
        Some(client)
    }

    pub fn len(&self) -> usize {
        self.clients.len()
    }

    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }
}

/// Only the kind and the place: the parser's own message may quote the key.
fn malformed(entry: &str, error: &serde_json::Error) -> EntryError {
    let kind = match error.classify() {
        serde_json::error::Category::Data => "a missing, unknown or wrongly typed field",
        serde_json::error::Category::Eof => "an early end",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "broken JSON",
    };
    EntryError::Malformed { entry: entry.to_owned(), kind, line: error.line(), column: error.column() }
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
