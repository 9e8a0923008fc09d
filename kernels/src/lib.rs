//! CUDA kernels for batches in which each row may have another adapter. See README.md for the table of kernels.
//!
//! The contract to an engine is plain data: images ([`image`]), argument structs ([`plain`]), work lists and launches
//! ([`launch`]). There is no driver in here and no `unsafe`; the caller owns memory, streams and graphs.

pub mod decoder;
pub mod image;
pub mod launch;
pub mod lora;
pub mod plain;
pub mod tuning;
