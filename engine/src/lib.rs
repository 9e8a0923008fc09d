//! The inference server: one frozen base model, thousands of adapters, every request with another one.

pub mod adapter;
pub mod backend;
pub mod batch;
