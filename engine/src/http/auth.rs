//! Keys: read from files, read again when they change, compared in constant time.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::refusal::Refusal;

/// A changed key file counts after this time at the latest.
const KEY_AGE_MAX: Duration = Duration::from_secs(1);
const KEY_FILE_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot read the key file {path}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the key file {0} holds no key")]
    Empty(String),
    #[error("the key file {path} has {bytes} bytes, the limit is {KEY_FILE_BYTES_MAX}")]
    TooLarge { path: String, bytes: usize },
}

/// Who may do what. Without an admin key nobody may change anything; without an API key everybody may ask.
#[derive(Debug)]
pub struct Keys {
    admin: Option<KeyFile>,
    api: Option<KeyFile>,
}

impl Keys {
    /// # Errors
    /// A file that is given must be there and hold a key.
    pub fn open(admin: Option<PathBuf>, api: Option<PathBuf>) -> Result<Self, KeyError> {
        Ok(Self { admin: admin.map(KeyFile::open).transpose()?, api: api.map(KeyFile::open).transpose()? })
    }

    /// For routes that change state.
    ///
    /// # Errors
    /// 401 without a key, 403 with another one than the admin's, or if there is none.
    pub fn admin(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(admin) = &self.admin else {
            return Err(Refusal::new(403, "NoAdminKey", "this server was started without --admin-key-file"));
        };
        match bearer(headers) {
            None => Err(Refusal::new(401, "KeyMissing", "this route needs the admin key as 'Authorization: Bearer'")),
            Some(given) if admin.holds(given) => Ok(()),
            Some(_) => Err(Refusal::new(403, "KeyWrong", "this route needs the admin key; the given key is another")),
        }
    }

    /// For routes that ask the model, and for the report.
    ///
    /// # Errors
    /// 401 without a known key, where keys are asked for.
    pub fn client(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(api) = &self.api else { return Ok(()) };
        let Some(given) = bearer(headers) else {
            return Err(Refusal::new(401, "KeyMissing", "this route needs a key as 'Authorization: Bearer'"));
        };
        let known = api.holds(given) | self.admin.as_ref().is_some_and(|admin| admin.holds(given));
        if known { Ok(()) } else { Err(Refusal::new(401, "KeyWrong", "the given key is not known")) }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

#[derive(Debug)]
struct KeyFile {
    path: PathBuf,
    known: Mutex<Known>,
}

/// Hashes of the keys: comparing hashes takes the same time whatever the key and its length.
#[derive(Debug)]
struct Known {
    hashes: Vec<[u8; 32]>,
    read_at: Instant,
}

impl KeyFile {
    fn open(path: PathBuf) -> Result<Self, KeyError> {
        let known = Mutex::new(Known { hashes: read(&path)?, read_at: Instant::now() });
        Ok(Self { path, known })
    }

    fn holds(&self, given: &[u8]) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.read_at.elapsed() >= KEY_AGE_MAX {
            known.read_at = Instant::now();
            match read(&self.path) {
                Ok(hashes) => known.hashes = hashes,
                Err(error) => tracing::warn!(%error, "the key file cannot be read again; the keys before stay valid"),
            }
        }
        let given: [u8; 32] = Sha256::digest(given).into();
        let mut found = Choice::from(0);
        for hash in &known.hashes {
            found |= hash.ct_eq(&given);
        }
        found.into()
    }
}

/// One key a line; empty lines do not count.
fn read(path: &PathBuf) -> Result<Vec<[u8; 32]>, KeyError> {
    let shown = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|source| KeyError::Read { path: shown.clone(), source })?;
    if bytes.len() > KEY_FILE_BYTES_MAX {
        return Err(KeyError::TooLarge { path: shown, bytes: bytes.len() });
    }
    let keys = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|key| !key.is_empty());
    let hashes: Vec<[u8; 32]> = keys.map(|key| Sha256::digest(key).into()).collect();
    if hashes.is_empty() { Err(KeyError::Empty(shown)) } else { Ok(hashes) }
}
