//! The OpenAI front door of a pool.
//!
//! ```text
//! request -> key -> place -> body -> resolve -> route -> pod -> relay -> client
//!                                       \________/
//!                                   from one FleetView, which the sources keep up to date
//! ```
//! Start reading at [`front`]. `resolve`, `route`, `body`, `sse`, `keys`, `headers` and `models` are pure.

pub mod run;

pub mod front;
pub mod health;

pub mod body;
pub mod headers;
pub mod keys;
pub mod models;
pub mod resolve;
pub mod route;
pub mod view;

pub mod error;
pub mod relay;
pub mod sse;
pub mod upstream;

pub mod fleet;
pub mod limits;
pub mod load;
pub mod metrics;
pub mod secret_files;
pub mod sources;
pub mod vital;

use std::hash::{BuildHasher as _, RandomState};

/// Random bits for choices and request ids, not for secrets: the standard library seeds its hashers at random.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(())
}

pub(crate) fn random_u128() -> u128 {
    (u128::from(random_u64()) << 64) | u128::from(random_u64())
}
