//! Files mapped for reading: the one place that maps a file into memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A read-only view of a whole file.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// # Errors
    /// What opening or mapping says; an empty file cannot be mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: weights are read-only artifacts. Who truncates one under a running server gets SIGBUS, as with every
        // server that maps its weights; the docs say to replace files, not to rewrite them.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Gives back the memory of the pages that lie wholly in the range; they come again from the file if read again.
    pub fn forget(&self, offset: usize, len: usize) {
        #[cfg(unix)]
        {
            const PAGE: usize = 4096;
            let start = offset.next_multiple_of(PAGE);
            let end = (offset + len).min(self.map.len()) / PAGE * PAGE;
            if start < end {
                // SAFETY: the map is a read-only file mapping; dropped pages are read again from the file.
                let advised =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
                if let Err(error) = advised {
                    tracing::debug!(%error, "could not give mapped pages back");
                }
            }
        }
        #[cfg(not(unix))]
        let _ = (offset, len);
    }
}
