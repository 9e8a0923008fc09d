//! The digest of a base, computed beside its loading.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::JoinHandle;

use lorafleet_artifact::{Digest, digest_of_files};
use sha2::{Digest as _, Sha256};

use super::ModelError;

pub(super) struct Identity {
    state: Mutex<State>,
}

enum State {
    Running(JoinHandle<Result<Digest, (PathBuf, std::io::Error)>>),
    Done(Digest),
    /// Said once with its cause, then by name.
    Failed,
}

impl Identity {
    /// Starts reading. `files` are the model's config, tokenizer and weight files.
    pub fn of(files: Vec<PathBuf>) -> Result<Self, ModelError> {
        let thread = std::thread::Builder::new()
            .name("model-digest".into())
            .spawn(move || digest(&files))
            .map_err(|source| ModelError::Io { path: PathBuf::from("thread model-digest"), cause: source })?;
        Ok(Self { state: Mutex::new(State::Running(thread)) })
    }

    pub fn digest(&self) -> Result<Digest, ModelError> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let failed = || ModelError::Malformed("the model's files could not be read for its digest".into());
        match std::mem::replace(&mut *state, State::Failed) {
            State::Done(digest) => {
                *state = State::Done(digest);
                Ok(digest)
            }
            State::Failed => Err(failed()),
            State::Running(thread) => {
                let digest = thread.join().map_err(|_| failed())?;
                let digest = digest.map_err(|(path, source)| ModelError::Io { path, cause: source })?;
                *state = State::Done(digest);
                Ok(digest)
            }
        }
    }
}

fn digest(files: &[PathBuf]) -> Result<Digest, (PathBuf, std::io::Error)> {
    let mut digests = BTreeMap::new();
    for path in files {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        digests.insert(name, sha256(path).map_err(|source| (path.clone(), source))?);
    }
    Ok(digest_of_files(&digests))
}

fn sha256(path: &Path) -> std::io::Result<[u8; 32]> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().into()),
            read => hasher.update(&chunk[..read]),
        }
    }
}
