//! The one reader of stores: folders of `s3://` and `file://`, within an allow-list.
//!
//! `Sources` is the place to start: it lists a folder and reads its files, in ranges or as a stream that survives cut
//! connections. `read_adapter` and `read_base` put that together with the rules of `lorafleet-artifact`.
//!
//! Absent here on purpose: writing to stores, caching of adapters, and any rule about what an adapter may be.

mod adapter;
mod base;
mod fetch;

mod access;
mod download;
mod error;
mod listing;
mod local;
mod s3;

pub use access::{Access, AccessConfig, Credentials, ReadLimits, Sources};
pub use adapter::{AdapterBytes, AdapterError, ListedAdapter, Progress, ReadAdapter, list_adapter, read_adapter};
pub use base::{BaseError, ReadBase, read_base};
pub use download::Download;
pub use error::{ErrorKind, SourceError};
pub use fetch::{LocalBase, fetch_base};
pub use listing::{FileInfo, Listing, Version};
