//! The harness: a real one-node cluster from public packages, the images, the demo, and what the tests on them share.
pub mod check;
pub mod demo;
pub mod measure;
pub mod world;
pub mod place;
pub mod ways;
pub mod guest;
pub mod install;
pub mod images;
pub mod cluster;
pub mod s3;
pub mod chat;
pub mod forward;
pub mod kubectl;
pub mod tools;
pub mod cache;
pub mod debian;
pub mod wait;
pub mod shell;
pub mod tied;
pub mod guard;
pub mod progress;

/// The root of the repository that this crate was compiled in.
pub fn repository() -> std::path::PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
