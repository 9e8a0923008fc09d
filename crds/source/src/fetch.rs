//! A base model from a store onto this machine's disk, whole or not at all.
//!
//! Its folder is called `<source>-<version>-<digest>`: a hash of the URI, a hash of what the store says about the files,
//! and the digest of the files as they were written. So a copy is found again by its content, without asking the store.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use lorafleet_artifact::{BaseFormat, Digest, Reason, Refusal, SourceUri, base_files, digest_of_files};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

use crate::access::Sources;
use crate::adapter::Progress;
use crate::base::BaseError;
use crate::error::SourceError;
use crate::listing::{FileInfo, Listing};

/// A base in a folder of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalBase {
    pub folder: PathBuf,
    /// What to open: the folder, or the GGUF file in it.
    pub path: PathBuf,
    /// Names of the files that make it.
    pub files: Vec<String>,
    /// Of the files as they were written. Whoever opens them later computes it again.
    pub digest: Digest,
    /// They came from the store just now; otherwise they were here.
    pub fetched: bool,
}

impl LocalBase {
    /// Reads all files once more: whether they are still what the folder's name says.
    pub async fn is_whole(&self) -> bool {
        let Self { folder, files, .. } = self.clone();
        let digest = tokio::task::spawn_blocking(move || digest_of_folder(&folder, &files)).await;
        digest.is_ok_and(|digest| digest.is_ok_and(|digest| digest == self.digest))
    }

    /// A copy that is not what its name says is removed, so that the next fetch asks the store.
    ///
    /// # Errors
    /// If the disk does not let go of it.
    pub async fn discard(self) -> Result<(), SourceError> {
        let what = format!("'{}'", self.folder.display());
        tokio::fs::remove_dir_all(&self.folder).await.map_err(|error| SourceError::io("removing", &what, error))
    }
}

/// Brings the files of a base into a folder below `cache`. With `expected`, a copy of that content is taken wherever it
/// came from and the store is not asked; without, the store says which version is the present one. Older versions of the
/// same source are removed once a new one is whole.
///
/// # Errors
/// Refused if the source holds no base, or another one than `expected`; Source for the way to it or for the disk.
pub async fn fetch_base(
    sources: &Sources,
    uri: &SourceUri,
    expected: Option<Digest>,
    cache: &Path,
    progress: &Progress,
) -> Result<LocalBase, BaseError> {
    let disk = |error| SourceError::io("reading", &format!("'{}'", cache.display()), error);
    let copies = copies(cache).await.map_err(disk)?;
    if let Some(copy) = copies.iter().find(|copy| expected == Some(copy.digest)) {
        return copy.open(false).await;
    }
    let mut listing = sources.list(uri).await?;
    let (_, chosen) = base_files(listing.names()).map_err(|refusal| listing.refused(refusal))?;
    listing.files.retain(|file| chosen.contains(&file.name));
    let source = short_hash([uri.to_string()]);
    let version = short_hash(listing.files.iter().map(|file| format!("{} {} {}", file.name, file.bytes, file.version)));
    let known = copies.iter().find(|copy| copy.source == source && copy.version == version);
    let copy = match known {
        Some(copy) => copy.clone(),
        None => {
            let digest =
                bring(sources, &listing, expected, &cache.join(format!(".unfinished-{source}")), progress).await?;
            keep(
                cache,
                Copy { folder: cache.join(format!("{source}-{version}-{}", digest.hex())), source, version, digest },
                &copies,
            )
            .await?
        }
    };
    check(uri, copy.digest, expected)?;
    copy.open(known.is_none()).await
}

fn check(uri: &SourceUri, digest: Digest, expected: Option<Digest>) -> Result<(), Refusal> {
    match expected {
        Some(expected) if expected != digest => Err(Refusal::new(
            Reason::DigestMismatch,
            format!("the base at '{uri}' has digest {digest}, expected was {expected}"),
        )),
        _ => Ok(()),
    }
}

/// Writes all files into a folder of its own; nothing of it is left if they are not what was expected.
async fn bring(
    sources: &Sources,
    listing: &Listing,
    expected: Option<Digest>,
    unfinished: &Path,
    progress: &Progress,
) -> Result<Digest, BaseError> {
    let disk = |error| SourceError::io("writing", &format!("'{}'", unfinished.display()), error);
    progress.start(listing.files.iter().map(|file| file.bytes).sum());
    // What a killed process left of the same source.
    remove(unfinished).await.map_err(disk)?;
    tokio::fs::create_dir_all(unfinished).await.map_err(disk)?;
    let mut sums = BTreeMap::new();
    let written = async {
        for file in &listing.files {
            let sum = fetch_file(sources, listing, file, &unfinished.join(&file.name), progress).await?;
            sums.insert(file.name.clone(), sum);
        }
        let digest = digest_of_files(&sums);
        check(&listing.uri, digest, expected)?;
        Ok(digest)
    };
    let written = written.await;
    if written.is_err() {
        // The error counts; what cannot be removed now is removed by the next fetch.
        let _ = remove(unfinished).await;
    }
    written
}

async fn fetch_file(
    sources: &Sources,
    listing: &Listing,
    file: &FileInfo,
    path: &Path,
    progress: &Progress,
) -> Result<[u8; 32], SourceError> {
    let disk = |error| SourceError::io("writing", &format!("'{}'", path.display()), error);
    let mut written = tokio::fs::File::create(path).await.map_err(disk)?;
    let mut download = sources.open(listing, file, 0..file.bytes)?;
    let mut hasher = Sha256::new();
    while let Some(piece) = download.next().await? {
        hasher.update(&piece);
        written.write_all(&piece).await.map_err(disk)?;
        progress.add(piece.len());
    }
    // The rename that follows must not come to the disk before the bytes.
    written.sync_all().await.map_err(disk)?;
    Ok(hasher.finalize().into())
}

/// Gives the finished folder its name, after the older versions of the same source have gone.
async fn keep(cache: &Path, copy: Copy, others: &[Copy]) -> Result<Copy, SourceError> {
    let disk = |error| SourceError::io("writing", &format!("'{}'", copy.folder.display()), error);
    for old in others.iter().filter(|old| old.source == copy.source) {
        remove(&old.folder).await.map_err(disk)?;
    }
    tokio::fs::rename(cache.join(format!(".unfinished-{}", copy.source)), &copy.folder).await.map_err(disk)?;
    Ok(copy)
}

fn digest_of_folder(folder: &Path, files: &[String]) -> std::io::Result<Digest> {
    let mut sums = BTreeMap::new();
    for name in files {
        let mut file = std::fs::File::open(folder.join(name))?;
        let mut hasher = Sha256::new();
        let mut chunk = vec![0; 1 << 20];
        loop {
            match file.read(&mut chunk)? {
                0 => break,
                read => hasher.update(chunk.get(..read).unwrap_or_default()),
            }
        }
        sums.insert(name.clone(), hasher.finalize().into());
    }
    Ok(digest_of_files(&sums))
}

async fn remove(folder: &Path) -> std::io::Result<()> {
    match tokio::fs::remove_dir_all(folder).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A finished folder of the cache.
#[derive(Clone, Debug)]
struct Copy {
    folder: PathBuf,
    source: String,
    version: String,
    digest: Digest,
}

impl Copy {
    async fn open(&self, fetched: bool) -> Result<LocalBase, BaseError> {
        let disk = |error| SourceError::io("reading", &format!("'{}'", self.folder.display()), error);
        let mut names = Vec::new();
        let mut entries = tokio::fs::read_dir(&self.folder).await.map_err(disk)?;
        while let Some(entry) = entries.next_entry().await.map_err(disk)? {
            names.extend(entry.file_name().into_string());
        }
        let (format, chosen) = base_files(names.iter().map(String::as_str))?;
        let path = match (format, chosen.first()) {
            (BaseFormat::Gguf, Some(file)) => self.folder.join(file),
            _ => self.folder.clone(),
        };
        Ok(LocalBase { folder: self.folder.clone(), path, files: chosen, digest: self.digest, fetched })
    }
}

async fn copies(cache: &Path) -> std::io::Result<Vec<Copy>> {
    let mut copies = Vec::new();
    let mut entries = match tokio::fs::read_dir(cache).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(copies),
        entries => entries?,
    };
    while let Some(entry) = entries.next_entry().await? {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let &[source, version, hex] = &name.split('-').collect::<Vec<_>>()[..] else { continue };
        let Ok(digest) = format!("sha256:{hex}").parse() else { continue };
        copies.push(Copy { folder: entry.path(), source: source.to_owned(), version: version.to_owned(), digest });
    }
    Ok(copies)
}

fn short_hash(lines: impl IntoIterator<Item = String>) -> String {
    let mut hasher = Sha256::new();
    for line in lines {
        hasher.update(line.as_bytes());
        hasher.update(b"\n");
    }
    hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
