//! The OpenAI front door of a pool.
//!
//! ```text
//! request -> key -> body -> resolve the model to one digest -> route to a pod that holds it -> forward -> stream back
//! ```
//! `resolve` and `route` are pure and decide from a `FleetView`, which the sources keep up to date.

pub mod body;
pub mod keys;
pub mod resolve;
pub mod route;
pub mod sse;
pub mod view;
