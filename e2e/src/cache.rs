//! Built tools, kept outside the tree: one folder per tool and key, made whole or not at all.
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::progress;

/// Where tools and clusters live: `LORAFLEET_CACHE`, else `~/.cache/lorafleet`.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache and makes its folder.
    ///
    /// # Errors
    /// When neither `LORAFLEET_CACHE` nor `HOME` is set, or the folder cannot be made.
    pub fn open() -> Result<Self> {
        let set = std::env::var_os("LORAFLEET_CACHE").filter(|root| !root.is_empty());
        let root = match set {
            Some(root) => PathBuf::from(root),
            None => PathBuf::from(std::env::var_os("HOME").context("neither LORAFLEET_CACHE nor HOME is set")?)
                .join(".cache/lorafleet"),
        };
        fs::create_dir_all(root.join("tools")).with_context(|| format!("make the cache {}", root.display()))?;
        let root = root.canonicalize().with_context(|| format!("find the cache {}", root.display()))?;
        Ok(Self { root })
    }

    /// The folder that holds everything.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Waits until no other process does `what`, and keeps others waiting while the result is held.
    ///
    /// # Errors
    /// When the lock cannot be made.
    pub fn alone(&self, what: &str) -> Result<File> {
        let (path, lock) = self.lock(what)?;
        if lock.try_lock().is_err() {
            progress::say(format!("another run is at work on {what}; waiting for it"));
            lock.lock().with_context(|| format!("lock {}", path.display()))?;
        }
        Ok(lock)
    }

    /// As [`Cache::alone`], but none where another process does `what`.
    ///
    /// # Errors
    /// When the lock cannot be made.
    pub fn free(&self, what: &str) -> Result<Option<File>> {
        let (_, lock) = self.lock(what)?;
        Ok(lock.try_lock().is_ok().then_some(lock))
    }

    fn lock(&self, what: &str) -> Result<(PathBuf, File)> {
        let path = self.root.join(format!("{what}.lock"));
        let lock = File::create(&path).with_context(|| format!("make {}", path.display()))?;
        Ok((path, lock))
    }

    /// Where [`Cache::keep`] keeps it, built or not.
    pub fn place(&self, name: &str, inputs: &[&[u8]]) -> PathBuf {
        self.root.join("tools").join(format!("{name}-{}", key(inputs)))
    }

    /// The folder `name-KEY`, where KEY is a digest over `inputs`; built by `build` in a folder beside it and renamed, so
    /// that a killed build leaves nothing that looks finished. Two processes build the same thing once. `doing` is told.
    ///
    /// # Errors
    /// What `build` fails with, or the file system.
    pub fn keep(
        &self,
        name: &str,
        inputs: &[&[u8]],
        doing: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let place = self.place(name, inputs);
        if place.is_dir() {
            return Ok(place);
        }
        let lock_path = place.with_extension("lock");
        let lock = File::create(&lock_path).with_context(|| format!("make {}", lock_path.display()))?;
        lock.lock().with_context(|| format!("lock {}", lock_path.display()))?;
        if place.is_dir() {
            return Ok(place);
        }
        let building = place.with_extension("building");
        if building.exists() {
            fs::remove_dir_all(&building).with_context(|| format!("clear {}", building.display()))?;
        }
        fs::create_dir_all(&building).with_context(|| format!("make {}", building.display()))?;
        progress::step(&format!("{doing} (once; kept in {})", place.display()), || build(&building))?;
        fs::rename(&building, &place).with_context(|| format!("finish {}", place.display()))?;
        Ok(place)
    }
}

/// Sixteen hex digits of SHA-256 over the inputs, each with its length before it.
pub fn key(inputs: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for input in inputs {
        hash.update((input.len() as u64).to_le_bytes());
        hash.update(input);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
