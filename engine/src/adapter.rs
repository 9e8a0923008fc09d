//! A verified adapter in host memory.

use lorafleet_artifact::Digest;

/// Immutable once made: loads share it by `Arc`, uploads read it, nothing writes it.
#[derive(Debug)]
pub struct HostAdapter {
    pub digest: Digest,
    /// The safetensors file's data section, as verified.
    pub bytes: Vec<u8>,
}
