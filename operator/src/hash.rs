//! Short names of content, for noticing a change.

use serde::Serialize;
use sha2::{Digest as _, Sha256};

/// The first 16 hex digits of the SHA-256 of the value as JSON. Maps must be ordered, else it is not stable.
pub fn short_hash(value: &impl Serialize) -> String {
    // What cannot be written as JSON (a map with keys that are no text) is none of ours; it would hash as empty.
    let json = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(json).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A number from 0 to 1, the same for the same text and evenly spread over all texts.
pub fn share_of(text: &str) -> f64 {
    let first = Sha256::digest(text).iter().take(4).fold(0_u32, |number, byte| number << 8 | u32::from(*byte));
    f64::from(first) / f64::from(u32::MAX)
}
