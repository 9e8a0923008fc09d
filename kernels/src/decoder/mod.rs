//! The rest of a decoder: every op has its argument struct, its launch and its twin in f64.
//!
//! Twins take values as f64 and round where a model in the element type rounds, through [`Round`].

pub mod activation;
pub mod attention;
pub mod attention_chunk;
pub mod embedding;
pub mod exact;
pub mod kv;
pub mod norm;
pub mod pages;
pub mod rope;
pub mod sample;

/// Rounds a value to the element type; the identity for the exact answer.
pub type Round = fn(f64) -> f64;
