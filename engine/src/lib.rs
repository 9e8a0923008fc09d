//! The inference server: one frozen base model, thousands of adapters, every request with another one.
//!
//! Read `step` first; then `state` (what there is), `schedule` and `moves` (what to do, pure), `pages`.

pub mod adapter;
pub mod backend;
pub mod batch;
pub mod engine;
pub mod layout;
pub mod limits;
pub mod metrics;
pub mod model;
pub mod moves;
pub mod names;
pub mod pages;
pub mod refusal;
pub mod residency;
pub mod schedule;
pub mod sequence;
#[cfg(test)]
mod simulation;
pub mod snapshot;
pub mod state;
pub mod step;
pub mod text;
