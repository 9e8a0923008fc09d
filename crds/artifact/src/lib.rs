//! What an adapter is: PEFT's rules, digests, source matching and costs.
//!
//! Pure: no file, no socket, no clock. Operator and engine both decide with this crate; there is no second copy of a
//! rule.

mod digest;
pub mod gguf;
mod reason;

pub use digest::{Digest, DigestParseError, digest_of_files};
pub use reason::{Reason, Refusal};
