//! Copies of adapters on the pod's own disk, by digest, within a budget of bytes.
//!
//! A copy appears whole or not at all: it is written beside and renamed. Nothing read from here is believed before it
//! was verified again. A disk that fails costs speed, never an answer: its errors are logged and the source is asked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lorafleet_artifact::{CONFIG_BYTES_MAX, CONFIG_FILE, Digest, WEIGHTS_FILE};
use lorafleet_source::AdapterBytes;

/// Prefix of folders that are being written. What is left of a killed process is removed at the next start.
const UNFINISHED: &str = ".unfinished-";

#[derive(Debug)]
pub struct DiskCache {
    root: PathBuf,
    budget_bytes: u64,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    entries: BTreeMap<Digest, Entry>,
    used_bytes: u64,
    /// Counts uses; a larger number is a later use.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    used: u64,
}

impl DiskCache {
    /// Takes over what an earlier process left, oldest first to go.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(root: impl Into<PathBuf>, budget_bytes: u64) -> std::io::Result<Self> {
        let root = root.into();
        std::fs::create_dir_all(&root)?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&root)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(UNFINISHED) {
                std::fs::remove_dir_all(entry.path())?;
            } else if let Ok(digest) = format!("sha256:{name}").parse::<Digest>() {
                let modified = entry.metadata()?.modified()?;
                found.push((modified, digest, folder_bytes(&entry.path())?));
            }
        }
        found.sort_unstable();
        let cache = Self { root, budget_bytes, index: Mutex::default() };
        for (_, digest, bytes) in found {
            cache.index().insert(digest, bytes);
        }
        for digest in cache.index().victims(budget_bytes, 0) {
            std::fs::remove_dir_all(cache.folder(digest))?;
        }
        Ok(cache)
    }

    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    pub fn used_bytes(&self) -> u64 {
        self.index().used_bytes
    }

    pub fn holds(&self, digest: Digest) -> bool {
        self.index().entries.contains_key(&digest)
    }

    /// Both files of a copy. The caller verifies them.
    pub async fn get(&self, digest: Digest, weights_bytes_max: u64) -> Option<AdapterBytes> {
        if !self.index().touch(digest) {
            return None;
        }
        let folder = self.folder(digest);
        let read = tokio::task::spawn_blocking(move || read_copy(&folder, weights_bytes_max)).await;
        match read {
            Ok(Ok(bytes)) => Some(bytes),
            Ok(Err(error)) => {
                tracing::warn!(%digest, %error, "the disk cache's copy cannot be read");
                self.remove(digest).await;
                None
            }
            Err(_) => None,
        }
    }

    /// Keeps a copy, letting go of the longest unused ones. Whether it is there now.
    pub async fn put(&self, digest: Digest, bytes: &AdapterBytes) -> bool {
        let size = (bytes.config.len() + bytes.weights.len()) as u64;
        if size > self.budget_bytes {
            return false;
        }
        if self.holds(digest) {
            return true;
        }
        let victims = self.index().victims(self.budget_bytes, size);
        for victim in victims {
            self.delete(victim).await;
        }
        match self.write(digest, bytes).await {
            Ok(()) => {
                self.index().insert(digest, size);
                true
            }
            Err(error) => {
                tracing::warn!(%digest, %error, "the disk cache cannot keep a copy");
                false
            }
        }
    }

    pub async fn remove(&self, digest: Digest) {
        self.index().forget(digest);
        self.delete(digest).await;
    }

    async fn delete(&self, digest: Digest) {
        match tokio::fs::remove_dir_all(self.folder(digest)).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%digest, %error, "the disk cache cannot remove a copy");
            }
            _ => {}
        }
    }

    async fn write(&self, digest: Digest, bytes: &AdapterBytes) -> std::io::Result<()> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let unfinished = self.root.join(format!("{UNFINISHED}{:016x}", u64::from_le_bytes(random)));
        tokio::fs::create_dir(&unfinished).await?;
        let written = async {
            tokio::fs::write(unfinished.join(CONFIG_FILE), &bytes.config).await?;
            tokio::fs::write(unfinished.join(WEIGHTS_FILE), &bytes.weights).await?;
            tokio::fs::rename(&unfinished, self.folder(digest)).await
        };
        let written = written.await;
        if written.is_err() {
            // Another load of the same adapter may have been first, which is as good.
            let _ = tokio::fs::remove_dir_all(&unfinished).await;
            if tokio::fs::try_exists(self.folder(digest).join(WEIGHTS_FILE)).await.unwrap_or(false) {
                return Ok(());
            }
        }
        written
    }

    fn folder(&self, digest: Digest) -> PathBuf {
        self.root.join(digest.hex())
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn insert(&mut self, digest: Digest, bytes: u64) {
        self.forget(digest);
        self.clock += 1;
        self.used_bytes += bytes;
        self.entries.insert(digest, Entry { bytes, used: self.clock });
    }

    fn touch(&mut self, digest: Digest) -> bool {
        self.clock += 1;
        let clock = self.clock;
        self.entries.get_mut(&digest).map(|entry| entry.used = clock).is_some()
    }

    fn forget(&mut self, digest: Digest) {
        if let Some(entry) = self.entries.remove(&digest) {
            self.used_bytes -= entry.bytes;
        }
    }

    /// Forgets the longest unused until `bytes` more fit, and says which.
    fn victims(&mut self, budget_bytes: u64, bytes: u64) -> Vec<Digest> {
        let mut victims = Vec::new();
        while self.used_bytes + bytes > budget_bytes {
            let Some(digest) = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(digest, _)| *digest)
            else {
                break;
            };
            self.forget(digest);
            victims.push(digest);
        }
        victims
    }
}

fn folder_bytes(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}

fn read_copy(folder: &Path, weights_bytes_max: u64) -> std::io::Result<AdapterBytes> {
    let config = read_file(&folder.join(CONFIG_FILE), CONFIG_BYTES_MAX)?;
    let weights = read_file(&folder.join(WEIGHTS_FILE), weights_bytes_max)?;
    Ok(AdapterBytes { config: config.into(), weights })
}

fn read_file(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let bytes = std::fs::metadata(path)?.len();
    if bytes > limit {
        return Err(std::io::Error::other(format!("{} has {bytes} bytes, the limit is {limit}", path.display())));
    }
    std::fs::read(path)
}
