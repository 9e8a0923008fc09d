//! Where the arithmetic is. Three methods; `cpu` is the definition of right.

#[allow(unsafe_code)]
pub mod cpu;

use crate::batch::{Batch, PageBudget, Sampled};

/// Names one submitted batch until it has been waited for.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A batch that breaks its own contract (a page out of range, an unknown resident): a bug in the scheduler, and
    /// nothing was computed.
    #[error("step {step}: {what}")]
    BadBatch { step: u64, what: String },
    #[error("the backend failed: {0}")]
    Failed(String),
}

pub trait Backend: Send {
    fn page_budget(&self) -> PageBudget;
    /// Takes the uploads and starts the step. At most one ticket is outstanding for a backend that does not overlap.
    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError>;
    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError>;
}
