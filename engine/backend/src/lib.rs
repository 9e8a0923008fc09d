//! What a backend is given and asked: the base's weights, host copies of adapters, pages, batches.
//!
//! Every backend is a crate of its own and depends on this one; the engine depends on both.

pub mod batch;

pub mod layout;
pub mod model;

use lorafleet_artifact::{Digest, Fitted, Verified};

use batch::{Batch, PageBudget, Sampled};

/// Where the arithmetic is. The CPU backend is the definition of right.
pub trait Backend: Send {
    fn page_budget(&self) -> PageBudget;
    /// Takes the uploads and starts the step. At most one ticket is outstanding for a backend that does not overlap.
    ///
    /// # Errors
    /// `BadBatch` if the batch breaks its contract; `Failed` if the machine did not do it; `Lost` if it never will again.
    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError>;
    /// # Errors
    /// `BadBatch` if no such step is outstanding; `Failed` if the machine did not do it; `Lost` if it never will again.
    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError>;
}

/// Names one submitted batch until it has been waited for.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A batch that breaks its own contract (a page out of range, an unknown resident): a bug in the scheduler, and
    /// nothing was computed.
    #[error("step {step}: {what}")]
    BadBatch { step: u64, what: String },
    /// The step's drops are done all the same, and the residents of its uploads are gone with all their pieces.
    #[error("the backend failed: {0}")]
    Failed(String),
    /// As `Failed`, and no later step will be done either: whoever owns the backend should end, and be started again.
    #[error("the backend is lost: {0}")]
    Lost(String),
}

/// A verified adapter in host memory. Immutable once made: loads share it by `Arc`, uploads read it, nothing writes it.
#[derive(Debug)]
pub struct HostAdapter {
    pub digest: Digest,
    /// The safetensors file's data section, as verified, with F32 in place of F64.
    pub bytes: Vec<u8>,
    /// The modules, with ranges in `bytes`.
    pub fitted: Fitted,
}

impl HostAdapter {
    /// From the whole file that was verified.
    pub fn of(verified: Verified, mut file: Vec<u8>) -> Self {
        let Verified { digest, header, mut fitted, .. } = verified;
        let data_start = usize::try_from(header.data_start).unwrap_or(usize::MAX).min(file.len());
        file.drain(..data_start);
        fitted.round_doubles(&mut file);
        Self { digest, bytes: file, fitted }
    }

    /// The stored bytes of one of its tensors; empty for a range that is not in it.
    pub fn tensor(&self, range: &std::ops::Range<u64>) -> &[u8] {
        let range = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
        range.and_then(|(start, end)| self.bytes.get(start..end)).unwrap_or_default()
    }
}
