//! What users ask for, and what operator, gateway and engine say to each other.
//!
//! Absent here on purpose: any client, any runtime, any clock.

pub mod wire;
