//! The operator: three controllers over base models, adapters and serving pools.
//!
//! `model.rs`, `intake.rs` and `pool.rs` are the places to start: each is observe, plan (pure), apply, status.

pub mod model;

pub mod intake;

pub mod pool;

pub mod build;

pub mod conditions;
pub mod context;
pub mod election;
pub mod hash;
pub mod http;
pub mod job;
pub mod metrics;
mod owned;
pub mod rbac;
pub mod recheck;
pub mod run;
pub mod settings;
pub mod shape;
pub mod source;
pub mod status;
pub mod unreadable;
pub mod watch;

pub use run::{RunError, run};
pub use settings::{Limits, Settings};

#[cfg(test)]
mod tests;
