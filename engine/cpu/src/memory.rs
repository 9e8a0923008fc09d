//! Large zeroed memory that costs nothing until it is touched, and floats on whole cache lines.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Page-aligned, zero at first, committed by the kernel on first touch. Never moves.
pub struct Memory {
    map: Option<MmapMut>,
}

impl Memory {
    /// # Errors
    /// What the operating system says if it has not so much address space.
    pub fn zeroed(bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self { map: None });
        }
        let map = MmapMut::map_anon(bytes)?;
        // Weights and pages are read front to back in megabytes: large pages spare the address translation.
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages");
        }
        Ok(Self { map: Some(map) })
    }

    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or(&mut [])
    }
}

/// Sixteen floats, a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Floats that begin on a cache line: a vector lies in one line, and two threads' columns in different ones.
#[derive(Default)]
pub struct Floats {
    lines: Vec<Line>,
}

impl Floats {
    /// Makes room for at least so many; those that come are zero.
    pub fn grow(&mut self, floats: usize) {
        let lines = floats.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; 16]));
        }
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: lines are sixteen floats each and nothing else.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), 16 * self.lines.len()) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), 16 * self.lines.len()) }
    }
}

/// A pointer that may be shared between the threads of a step: each writes its own part.
#[derive(Debug)]
pub struct Shared<T>(*mut T);

// By hand: a pointer is copied whatever it points to.
impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: only the pool's jobs use it, and a job's items write disjoint parts of what it points to.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn of(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// A method, so that closures capture the whole wrapper and not its bare pointer.
    pub fn get(self) -> *mut T {
        self.0
    }
}
