//! Adapters on their way into host memory: source or disk, verified, compared with the base, immutable from then on.
//!
//! `Loader::load` is the place to start. Loading the same adapter only once at a time is the matter of `flights`.

mod loader;

mod base;
mod copies;
mod disk;
mod rooms;

pub use copies::{BaseTensors, CopyDiffers, Exactness, check_copies};
pub use disk::DiskCache;
pub use loader::{LoadError, LoadedAdapter, Loader, Origin};
pub use rooms::Rooms;
