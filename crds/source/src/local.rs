//! Files of this machine. A path is opened only if its real place is inside the allowed folder.

use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use lorafleet_artifact::{SourceUri, check_file_name};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};

use crate::access::ReadLimits;
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing, Version, bounded};

/// Bytes of one piece.
const PIECE_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Reader {
    file: tokio::fs::File,
    /// As it was when it was opened.
    info: FileInfo,
}

impl Reader {
    /// The next piece, within what is still wanted.
    pub(crate) async fn next(&mut self, rest: &Range<u64>) -> std::io::Result<Option<Bytes>> {
        let wanted = usize::try_from(rest.end - rest.start).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        let mut piece = bytes::BytesMut::with_capacity(wanted);
        let count = (&mut self.file).take(wanted as u64).read_buf(&mut piece).await?;
        Ok((count > 0).then(|| piece.freeze()))
    }

    /// Nobody has written to it since it was opened: who writes in place changes what has been read already, or has not.
    pub(crate) async fn is_as_it_was(&self) -> std::io::Result<bool> {
        Ok(info(self.info.name.clone(), &self.file.metadata().await?) == self.info)
    }
}

pub(crate) async fn list(root: &SourceUri, uri: &SourceUri, limits: &ReadLimits) -> Result<Listing, SourceError> {
    let path = real_path(root, uri).await?;
    let doing = || format!("'{uri}'");
    let metadata = tokio::fs::metadata(&path).await.map_err(|error| SourceError::io("looking at", &doing(), error))?;
    if metadata.is_file() {
        let name = uri.segments().last().cloned().unwrap_or_default();
        return Ok(Listing { uri: uri.clone(), files: vec![info(name, &metadata)], single: true });
    }
    let (mut files, mut seen) = (Vec::new(), 0);
    let mut entries = tokio::fs::read_dir(&path).await.map_err(|error| SourceError::io("listing", &doing(), error))?;
    loop {
        let entry = entries.next_entry().await.map_err(|error| SourceError::io("listing", &doing(), error))?;
        let Some(entry) = entry else { break };
        seen += 1;
        bounded(uri, files.len(), seen, limits)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // Follows links, as their target is what would be read. A link to nowhere is no file.
        let Ok(metadata) = tokio::fs::metadata(entry.path()).await else { continue };
        if !metadata.is_file() || check_file_name(&name).is_err() {
            continue;
        }
        files.push(info(name, &metadata));
    }
    bounded(uri, files.len(), seen, limits)?;
    Ok(Listing { uri: uri.clone(), files, single: false })
}

pub(crate) async fn open(
    root: &SourceUri,
    listing: &Listing,
    file: &FileInfo,
    offset: u64,
) -> Result<Reader, SourceError> {
    let mut uri = listing.uri.clone();
    if !listing.single {
        uri = uri.join(&file.name)?;
    }
    let what = format!("'{uri}'");
    let path = real_path(root, &uri).await?;
    // The path has no link in it; should one have been put there since, the open fails. A pipe must not block it.
    let mut opened = tokio::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&path)
        .await
        .map_err(|error| SourceError::io("opening", &what, error))?;
    still_inside(root, &opened, &what).await?;
    let metadata = opened.metadata().await.map_err(|error| SourceError::io("looking at", &what, error))?;
    if !metadata.is_file() {
        return Err(SourceError::new(ErrorKind::NotAllowed, format!("{what} is no plain file")));
    }
    let now = info(file.name.clone(), &metadata);
    if now != *file {
        let (was, is) = (&file.version, &now.version);
        let message = format!(
            "{what} changed while it was read: version {was} of {} bytes, now {is} of {} bytes",
            file.bytes, now.bytes
        );
        return Err(SourceError::new(ErrorKind::Changed, message));
    }
    opened.seek(std::io::SeekFrom::Start(offset)).await.map_err(|error| SourceError::io("reading", &what, error))?;
    Ok(Reader { file: opened, info: now })
}

/// The path without links, after the check that it lies in the real place of the allowed folder.
async fn real_path(root: &SourceUri, uri: &SourceUri) -> Result<PathBuf, SourceError> {
    let real = async |uri: &SourceUri| {
        let path = Path::new("/").join(uri.path());
        tokio::fs::canonicalize(path).await.map_err(|error| SourceError::io("looking for", &format!("'{uri}'"), error))
    };
    let root = real(root).await?;
    let path = real(uri).await?;
    if path.starts_with(&root) { Ok(path) } else { Err(outside(&format!("'{uri}'"))) }
}

/// The same check on what was really opened: between the look and the open, a folder may have become a link.
async fn still_inside(root: &SourceUri, file: &tokio::fs::File, what: &str) -> Result<(), SourceError> {
    let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = tokio::fs::read_link(descriptor).await.map_err(|error| SourceError::io("checking", what, error))?;
    let root = Path::new("/").join(root.path());
    let root = tokio::fs::canonicalize(root).await.map_err(|error| SourceError::io("checking", what, error))?;
    if path.starts_with(root) { Ok(()) } else { Err(outside(what)) }
}

fn outside(what: &str) -> SourceError {
    SourceError::new(ErrorKind::NotAllowed, format!("{what} leads outside of its allowed prefix"))
}

fn info(name: String, metadata: &std::fs::Metadata) -> FileInfo {
    // The time of the last change as well: the one of the last writing can be set.
    let (modified, changed) = (metadata.mtime_nsec(), metadata.ctime_nsec());
    let seconds = format!("{:x}.{modified:x}-{:x}.{changed:x}", metadata.mtime(), metadata.ctime());
    let tag = format!("{:x}-{seconds}-{:x}", metadata.ino(), metadata.size());
    let version = Version { tag: Some(tag), modified_s: Some(metadata.mtime()) };
    FileInfo { name, bytes: metadata.size(), version }
}
