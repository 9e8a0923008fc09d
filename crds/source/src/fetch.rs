//! A base model from a store onto this machine's disk, whole or not at all.

use std::path::{Path, PathBuf};

use lorafleet_artifact::{BaseFormat, SourceUri, base_files};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

use crate::access::Sources;
use crate::adapter::Progress;
use crate::base::BaseError;
use crate::error::SourceError;
use crate::listing::{FileInfo, Listing};

/// Brings the files of a base into a folder below `cache` and gives the path to open: that folder, or the GGUF file in
/// it. Files of the same version that are there already are not fetched again; an older version of the same source is
/// removed.
///
/// # Errors
/// Refused if the source holds no base; Source for the way to it or for the disk.
pub async fn fetch_base(
    sources: &Sources,
    uri: &SourceUri,
    cache: &Path,
    progress: &Progress,
) -> Result<PathBuf, BaseError> {
    let mut listing = sources.list(uri).await?;
    let (format, chosen) = base_files(listing.names())?;
    listing.files.retain(|file| chosen.contains(&file.name));
    progress.start(listing.files.iter().map(|file| file.bytes).sum());
    let source = short_hash([uri.to_string()]);
    let version = short_hash(listing.files.iter().map(|file| format!("{} {} {}", file.name, file.bytes, file.version)));
    let folder = cache.join(format!("{source}-{version}"));
    let disk = |error| SourceError::io("writing", &format!("'{}'", folder.display()), error);
    if !tokio::fs::try_exists(&folder).await.map_err(disk)? {
        let unfinished = cache.join(format!(".unfinished-{source}"));
        // What a killed process left of the same source.
        let _ = tokio::fs::remove_dir_all(&unfinished).await;
        tokio::fs::create_dir_all(&unfinished).await.map_err(disk)?;
        for file in &listing.files {
            fetch_file(sources, &listing, file, &unfinished.join(&file.name), progress).await?;
        }
        remove_versions(cache, &source).await.map_err(disk)?;
        tokio::fs::rename(&unfinished, &folder).await.map_err(disk)?;
    }
    Ok(match (format, listing.files.first()) {
        (BaseFormat::Gguf, Some(file)) => folder.join(&file.name),
        _ => folder,
    })
}

async fn fetch_file(
    sources: &Sources,
    listing: &Listing,
    file: &FileInfo,
    path: &Path,
    progress: &Progress,
) -> Result<(), SourceError> {
    let disk = |error| SourceError::io("writing", &format!("'{}'", path.display()), error);
    let mut written = tokio::fs::File::create(path).await.map_err(disk)?;
    let mut download = sources.open(listing, file, 0..file.bytes)?;
    while let Some(piece) = download.next().await? {
        written.write_all(&piece).await.map_err(disk)?;
        progress.add(piece.len());
    }
    // The rename that follows must not come to the disk before the bytes.
    written.sync_all().await.map_err(disk)
}

async fn remove_versions(cache: &Path, source: &str) -> std::io::Result<()> {
    let mut entries = tokio::fs::read_dir(cache).await?;
    while let Some(entry) = entries.next_entry().await? {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&format!("{source}-"))) {
            tokio::fs::remove_dir_all(entry.path()).await?;
        }
    }
    Ok(())
}

fn short_hash(lines: impl IntoIterator<Item = String>) -> String {
    let mut hasher = Sha256::new();
    for line in lines {
        hasher.update(line.as_bytes());
        hasher.update(b"\n");
    }
    hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
