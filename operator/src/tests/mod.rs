//! Tests of the plans: golden transcripts, and a simulated cluster that is killed at every step.

mod api;
mod event;
mod golden;
mod invariants;
mod simulation;
mod world;
