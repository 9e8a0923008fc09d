//! What an adapter is: PEFT's rules, digests, source matching and costs.
//!
//! Pure: no file, no socket, no clock. Operator and engine both decide with this crate; there is no second copy of a
//! rule. `Verification` is the place to start: it judges an adapter while its bytes arrive.

mod verify;

mod base;
mod config;
mod cost;
mod digest;
mod fit;
pub mod gguf;
mod json;
mod outline;
mod pattern;
mod policy;
mod reason;
pub mod safetensors;
mod scan;
mod source;

pub use base::{Architecture, BaseFormat, BaseShape, HuggingFaceConfig, ModuleId, ModuleKind, Width, base_files};
pub use config::{AdapterConfig, CONFIG_BYTES_MAX};
pub use cost::HALF_BYTES;
pub use digest::{Digest, DigestParseError, digest_of_files};
pub use fit::{BaseCopy, Fitted, FittedModule, FloatType, TensorRef, fit};
pub use gguf::HeaderError;
pub use outline::Outline;
pub use policy::{Claims, Policy, Traits, declared_base};
pub use reason::{Reason, Refusal};
pub use safetensors::{BASE_DIGEST_KEY, Safetensors, SafetensorsLimits};
pub use source::{Scheme, SourceUri, check_file_name};
pub use verify::{CONFIG_FILE, Verification, Verified, WEIGHTS_FILE, check_folder};
