//! The inference server: one frozen base model, thousands of adapters, every request with another one.
//!
//! Read `step` first; then `state` (what there is), `schedule` and `moves` (what to do, pure), `pages`.

// The loop and what it owns.
pub mod step;

pub mod state;

pub mod accounts;
pub mod answers;

pub mod moves;
pub mod schedule;
pub mod upload;

pub mod pace;
pub mod pages;
pub mod residency;
pub mod sequence;
pub mod snapshot;

// The base and adapters on their way in.
pub mod base;

pub mod adapter;

pub mod flights;
pub mod loader;

// Adapters for people.
pub mod inspect;

// The process around the loop.
pub mod serve;

pub mod config;
pub mod http;
pub mod limits;
pub mod refusal;

pub mod engine;
pub mod queue;

pub mod fleet;
pub mod names;
pub mod report;

pub mod exposition;
pub mod metrics;

pub mod text;

#[cfg(test)]
mod simulation;
