//! Adapters on their way into host memory: source or disk, verified, compared with the base, immutable from then on.
//!
//! `Loader::load` is the place to start. Loading the same adapter only once at a time is the caller's matter.

mod loader;

mod copies;
mod disk;

use lorafleet_artifact::{Digest, Fitted};

pub use copies::{BaseTensors, CopyDiffers, Exactness, check_copies};
pub use disk::DiskCache;
pub use loader::{LoadError, LoadedAdapter, Loader, Origin};

/// Immutable once made: loads share it by `Arc`, uploads read it, nothing writes it.
#[derive(Debug)]
pub struct HostAdapter {
    pub digest: Digest,
    /// The safetensors file's data section, as verified.
    pub bytes: Vec<u8>,
    /// The modules, with ranges in `bytes`.
    pub fitted: Fitted,
}

impl HostAdapter {
    /// The stored bytes of one of its tensors; empty for a range that is not in it.
    pub fn tensor(&self, range: &std::ops::Range<u64>) -> &[u8] {
        let range = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
        range.and_then(|(start, end)| self.bytes.get(start..end)).unwrap_or_default()
    }
}
