//! The CPU backend: the definition of right.
//!
//! Weights stay as stored and are made floats in registers; activations, keys and values are f32. Every output of every
//! row is computed in an order that depends on the row alone, so that a request's bits do not depend on its batch mates,
//! on how its prompt was cut, or on the number of threads.
#![allow(unsafe_code)]

mod check;
mod forward;
mod kernels;
mod kv;
mod linear;
mod memory;
mod panel;
mod pool;
mod resident;
mod rows;
mod sample;
mod scratch;
mod weights;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Instant;

use lorafleet_backend::batch::{Batch, PageBudget, ResidentId, Sampled, SampledRow, SequenceId, Upload};
use lorafleet_backend::layout::Layout;
use lorafleet_backend::model::{Model, Shape};
use lorafleet_backend::{Backend, BackendError, Ticket};

use forward::{Forward, Parts};
use kernels::Kernels;
use kv::KvLayout;
use memory::{Memory, Shared};
use pool::Pool;
use resident::Resident;
use rows::Rows;
use scratch::{Scratch, logits_stride};
use weights::PackedWeights;

pub use kv::page_budget;
pub use sample::sample;

/// What a CPU backend may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// For KV and adapters together. Address space at first, memory once it is used.
    pub page_bytes_total: u64,
    pub threads: NonZeroUsize,
}

impl CpuOptions {
    /// All cores that this process may use.
    pub fn new(page_bytes_total: u64) -> Self {
        let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self { page_bytes_total, threads }
    }
}

pub struct CpuBackend {
    kernels: &'static Kernels,
    pool: Pool,
    shape: Shape,
    weights: PackedWeights,
    frequencies: Vec<f32>,
    budget: PageBudget,
    kv: KvLayout,
    arena: Memory,
    residents: BTreeMap<ResidentId, Resident>,
    /// For each page the adapter that holds it.
    holders: Vec<Option<ResidentId>>,
    scratch: Scratch,
    last_step: Option<u64>,
    done: Option<(u64, Sampled)>,
}

impl CpuBackend {
    /// Packs the model's weights (their mapped memory is given back on the way) and reserves the pages.
    ///
    /// # Errors
    /// `Failed` if the memory or the threads cannot be had, or the budget holds no two pages.
    pub fn new(model: &Model, options: CpuOptions) -> Result<Self, BackendError> {
        Self::with_kernels(model, options, Kernels::for_this_machine())
    }

    fn with_kernels(model: &Model, options: CpuOptions, kernels: &'static Kernels) -> Result<Self, BackendError> {
        let shape = model.shape().clone();
        let budget = page_budget(&shape, options.page_bytes_total).map_err(BackendError::Failed)?;
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: std::io::Error| BackendError::Failed(format!("{what}: {error}"))
        };
        let mut pool = Pool::new(options.threads).map_err(failed("starting compute threads"))?;
        let weights = PackedWeights::pack(model, &mut pool).map_err(BackendError::Failed)?;
        let bytes = budget.page_bytes * u64::from(budget.pages);
        let bytes = usize::try_from(bytes).map_err(|_| BackendError::Failed(format!("{bytes} bytes of pages")))?;
        let arena = Memory::zeroed(bytes).map_err(failed("reserving pages"))?;
        tracing::info!(
            kernels = kernels.name,
            threads = pool.threads(),
            weight_bytes = weights.bytes(),
            pages = budget.pages,
            page_bytes = budget.page_bytes,
            "CPU backend is ready"
        );
        Ok(Self {
            kernels,
            pool,
            frequencies: shape.rope.frequencies(shape.head_dim),
            kv: KvLayout::of(&shape, budget),
            shape,
            weights,
            budget,
            arena,
            residents: BTreeMap::new(),
            holders: vec![None; budget.pages as usize],
            scratch: Scratch::default(),
            last_step: None,
            done: None,
        })
    }

    /// For each upload that begins, where its rows lie.
    fn check(&self, batch: &Batch) -> Result<Vec<Option<Layout>>, String> {
        let known = check::Known {
            shape: &self.shape,
            budget: self.budget,
            residents: &self.residents,
            holders: &self.holders,
            last_step: self.last_step,
        };
        if let Some((ticket, _)) = self.done {
            return Err(format!("step {ticket} has not been waited for"));
        }
        check::check(batch, &known)?;
        let begins = |upload: &&Upload| upload.part.start == 0;
        batch
            .uploads
            .iter()
            .map(|upload| Some(upload).filter(begins).map(|upload| self.layout(upload)).transpose())
            .collect()
    }

    fn layout(&self, upload: &Upload) -> Result<Layout, String> {
        let modules = &upload.adapter.fitted.modules;
        let layout = Layout::of(modules, self.budget.page_bytes).map_err(|error| error.to_string())?;
        if layout.pages as usize == upload.pages.len() {
            Ok(layout)
        } else {
            Err(format!("{:?} needs {} pages, {} are given", upload.resident, layout.pages, upload.pages.len()))
        }
    }

    fn drop_residents(&mut self, ids: &[ResidentId]) {
        for id in ids {
            for page in self.residents.remove(id).into_iter().flat_map(|resident| resident.pages) {
                self.holders[page.0 as usize] = None;
            }
        }
    }

    /// Writes one piece. `layout` is given with the first.
    fn upload(&mut self, upload: &Upload, layout: Option<Layout>) -> Result<(), String> {
        if let Some(layout) = layout {
            let arena = Shared::of(self.arena.bytes_mut());
            let resident = Resident::new(&self.shape, layout, upload, arena)?;
            for page in &upload.pages {
                self.holders[page.0 as usize] = Some(upload.resident);
            }
            self.residents.insert(upload.resident, resident);
        }
        let resident = self.residents.get_mut(&upload.resident);
        resident.ok_or_else(|| format!("{:?} has not begun", upload.resident))?.write(upload, &mut self.pool)
    }

    fn do_step(&mut self, batch: &Batch, layouts: Vec<Option<Layout>>) -> Result<Sampled, BackendError> {
        self.drop_residents(&batch.drops);
        let begun = Instant::now();
        for (upload, layout) in batch.uploads.iter().zip(layouts) {
            self.upload(upload, layout).map_err(BackendError::Failed)?;
        }
        let upload_time = begun.elapsed();
        let sampled = self.compute(batch);
        if self.pool.poisoned() {
            // It is gone, and what its siblings have computed since cannot be told from what they should have.
            return Err(BackendError::Lost("a compute thread has panicked".into()));
        }
        Ok(Sampled { upload_time, ..sampled })
    }

    /// Computes the segments and draws the tokens that are asked for.
    fn compute(&mut self, batch: &Batch) -> Sampled {
        let rows = Rows::of(batch, self.kernels.row_tiles);
        if rows.len() == 0 {
            return Sampled::default();
        }
        Forward::run(Parts {
            kernels: self.kernels,
            pool: &mut self.pool,
            shape: &self.shape,
            weights: &self.weights,
            kv: self.kv,
            arena: Shared::of(self.arena.bytes_mut()),
            frequencies: &self.frequencies,
            residents: &self.residents,
            batch,
            rows: &rows,
            scratch: &mut self.scratch,
        });
        self.draw(batch, &rows)
    }

    fn draw(&mut self, batch: &Batch, rows: &Rows) -> Sampled {
        let (stride, vocabulary) = (logits_stride(&self.shape), self.shape.vocabulary);
        let sampled = &rows.sampled.rows;
        let logits = Shared::of(&mut self.scratch.logits);
        let mut drawn: Vec<Option<Result<SampledRow, SequenceId>>> = vec![None; sampled.len()];
        let out = Shared::of(&mut drawn);
        self.pool.run(sampled.len(), 1, &|item, _| {
            let segment = &batch.segments[sampled[item].1];
            let Some(spec) = &segment.sample else { return };
            // SAFETY: each item has its own row of logits and its own result.
            unsafe {
                let logits = std::slice::from_raw_parts_mut(logits.get().add(item * stride), vocabulary);
                // All of them are looked at: a loop that may stop early is not done in vectors.
                let finite = logits.iter().fold(true, |finite, logit| finite & logit.is_finite());
                let row = if finite { Ok(sample(segment.sequence, logits, spec)) } else { Err(segment.sequence) };
                *out.get().add(item) = Some(row);
            }
        });
        let mut result = Sampled::default();
        for row in drawn.into_iter().flatten() {
            match row {
                Ok(row) => result.rows.push(row),
                Err(sequence) => result.not_finite.push(sequence),
            }
        }
        result
    }
}

impl Backend for CpuBackend {
    fn page_budget(&self) -> PageBudget {
        self.budget
    }

    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        let bad = |what: String| BackendError::BadBatch { step: batch.step, what };
        let layouts = self.check(batch).map_err(bad)?;
        self.last_step = Some(batch.step);
        let sampled = self.do_step(batch, layouts).inspect_err(|_| {
            self.drop_residents(&batch.uploads.iter().map(|upload| upload.resident).collect::<Vec<_>>());
        })?;
        self.done = Some((batch.step, sampled));
        Ok(Ticket(batch.step))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError> {
        match self.done.take() {
            Some((step, sampled)) if step == ticket.0 => Ok(sampled),
            other => {
                self.done = other;
                Err(BackendError::BadBatch { step: ticket.0, what: "no such step is outstanding".into() })
            }
        }
    }
}
