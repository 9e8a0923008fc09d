//! Copies of adapters on the pod's own disk, by digest, within a budget of bytes.
//!
//! A copy appears whole or not at all: it is written beside and renamed. Nothing read from here is believed before it
//! was verified again. A disk that fails costs speed, never an answer: its errors are logged and the source is asked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lorafleet_artifact::{CONFIG_BYTES_MAX, CONFIG_FILE, Digest, WEIGHTS_FILE};
use lorafleet_source::AdapterBytes;

/// Prefix of folders that are being written. What is left of a killed process is removed at the next start.
const UNFINISHED: &str = ".unfinished-";

#[derive(Debug)]
pub struct DiskCache {
    root: PathBuf,
    budget_bytes: u64,
    index: Arc<Mutex<Index>>,
}

#[derive(Debug, Default)]
struct Index {
    entries: BTreeMap<Digest, Entry>,
    used_bytes: u64,
    /// Of copies that are being written.
    writing_bytes: u64,
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
                match entry.metadata().and_then(|meta| Ok((meta.modified()?, folder_bytes(&entry.path())?))) {
                    Ok((modified, bytes)) => found.push((modified, digest, bytes)),
                    Err(error) => {
                        // A copy that cannot be used, such as a plain file in its place, must not keep the engine from
                        // starting, nor a new copy from taking its name.
                        tracing::warn!(%digest, %error, "what stands in the place of a copy is removed");
                        let path = entry.path();
                        if entry.file_type()?.is_dir() {
                            std::fs::remove_dir_all(path)?
                        } else {
                            std::fs::remove_file(path)?
                        }
                    }
                }
            }
        }
        found.sort_unstable();
        let cache = Self { root, budget_bytes, index: Arc::default() };
        for (_, digest, bytes) in found {
            cache.index().insert(digest, bytes);
        }
        let victims = cache.index().victims(budget_bytes);
        for digest in victims {
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

    /// Bytes of both files of a copy; 0 if there is none.
    pub fn bytes_of(&self, digest: Digest) -> u64 {
        self.index().entries.get(&digest).map_or(0, |entry| entry.bytes)
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

    /// Keeps a copy, letting go of the longest unused ones. Whether it is there now. What was begun is finished, also if
    /// nobody waits for it any more.
    pub async fn put(&self, digest: Digest, bytes: &Arc<AdapterBytes>) -> bool {
        if self.holds(digest) {
            return true;
        }
        let size = (bytes.config.len() + bytes.weights.len()) as u64;
        let Some(victims) = self.index().make_room(self.budget_bytes, size) else { return false };
        let (root, index, bytes) = (self.root.clone(), self.index.clone(), bytes.clone());
        let written = tokio::task::spawn_blocking(move || {
            let written = victims.iter().try_for_each(|victim| delete(&folder(&root, *victim)));
            let written = written.and_then(|()| write(&root, digest, &bytes));
            let mut index = lock(&index);
            index.writing_bytes -= size;
            match written {
                Ok(()) => index.insert(digest, size),
                Err(error) => tracing::warn!(%digest, %error, "the disk cache cannot keep a copy"),
            }
            index.entries.contains_key(&digest)
        });
        written.await.unwrap_or(false)
    }

    pub async fn remove(&self, digest: Digest) {
        self.index().forget(digest);
        self.delete(digest).await;
    }

    async fn delete(&self, digest: Digest) {
        let folder = self.folder(digest);
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || delete(&folder)).await {
            tracing::warn!(%digest, %error, "the disk cache cannot remove a copy");
        }
    }

    fn folder(&self, digest: Digest) -> PathBuf {
        folder(&self.root, digest)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

fn lock(index: &Mutex<Index>) -> MutexGuard<'_, Index> {
    index.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder(root: &Path, digest: Digest) -> PathBuf {
    root.join(digest.hex())
}

fn delete(folder: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write(root: &Path, digest: Digest, bytes: &AdapterBytes) -> std::io::Result<()> {
    let random = getrandom::u64().map_err(std::io::Error::other)?;
    let unfinished = root.join(format!("{UNFINISHED}{random:016x}"));
    let write = || {
        std::fs::create_dir(&unfinished)?;
        std::fs::write(unfinished.join(CONFIG_FILE), &bytes.config)?;
        std::fs::write(unfinished.join(WEIGHTS_FILE), &bytes.weights)?;
        std::fs::rename(&unfinished, folder(root, digest))
    };
    let written = write();
    if written.is_err() {
        // A full disk must not stay full of halves.
        let _ = delete(&unfinished);
        // Another load of the same adapter may have been first, which is as good.
        if folder(root, digest).join(WEIGHTS_FILE).exists() {
            return Ok(());
        }
    }
    written
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

    /// Forgets the longest unused until `bytes` more fit, counts these as being written, and says which must go; `None` if
    /// they cannot fit, or only beside what others are writing.
    fn make_room(&mut self, budget_bytes: u64, bytes: u64) -> Option<Vec<Digest>> {
        if self.writing_bytes.saturating_add(bytes) > budget_bytes {
            return None;
        }
        let victims = self.victims(budget_bytes - self.writing_bytes - bytes);
        self.writing_bytes += bytes;
        Some(victims)
    }

    /// Forgets the longest unused until no more than `most_bytes` are left, and says which.
    fn victims(&mut self, most_bytes: u64) -> Vec<Digest> {
        let mut victims = Vec::new();
        while self.used_bytes > most_bytes {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(digest, _)| *digest);
            let Some(digest) = oldest else { break };
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
