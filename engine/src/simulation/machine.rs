//! The backend of the simulation: it knows of every cell of every page who wrote it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::{Batch, PageBudget, ResidentId, Sampled, SampledRow, Segment, Upload};
use lorafleet_backend::{Backend, BackendError, Ticket};

use super::next_token;
use super::random::Random;
use crate::limits::Limits;

#[derive(Clone, Debug, PartialEq)]
enum Cell {
    Unwritten,
    Adapter(ResidentId),
    Token(u32, Option<ResidentId>),
}

/// The machine as the test sees it.
#[derive(Default)]
pub(super) struct Watched {
    /// Fail now and then.
    pub(super) faults: AtomicBool,
    /// Adapters that were made whole by a second or later piece.
    pub(super) pieces: AtomicU64,
    /// Adapters that it holds, whole or not.
    pub(super) residents: AtomicU64,
}

pub(super) struct Machine {
    budget: PageBudget,
    limits: Limits,
    pages: Vec<Vec<Cell>>,
    residents: BTreeMap<ResidentId, (Digest, Vec<u32>)>,
    digests: BTreeMap<ResidentId, Digest>,
    /// Residents of which so many pages are written.
    begun: BTreeMap<ResidentId, (u32, Vec<u32>)>,
    watched: Arc<Watched>,
    random: Random,
    result: Option<Sampled>,
}

impl Machine {
    pub(super) fn new(seed: u64, budget: PageBudget, limits: Limits, watched: Arc<Watched>) -> Self {
        Self {
            pages: vec![vec![Cell::Unwritten; budget.page_tokens as usize]; budget.pages as usize],
            budget,
            limits,
            residents: BTreeMap::new(),
            digests: BTreeMap::new(),
            begun: BTreeMap::new(),
            watched,
            random: Random::new(seed),
            result: None,
        }
    }

    fn upload(&mut self, upload: &Upload) {
        let pages: Vec<u32> = upload.pages.iter().map(|page| page.0).collect();
        assert!(!upload.part.is_empty(), "an empty piece");
        assert!(!self.residents.contains_key(&upload.resident), "whole already");
        let (written, before) = self.begun.remove(&upload.resident).unwrap_or((0, pages.clone()));
        assert_eq!((upload.part.start, &pages), (written, &before), "not the next piece");
        for page in &pages[upload.part.start as usize..upload.part.end as usize] {
            self.pages[*page as usize].fill(Cell::Adapter(upload.resident));
        }
        self.digests.insert(upload.resident, upload.adapter.digest);
        if upload.part.end as usize == pages.len() {
            self.watched.pieces.fetch_add(u64::from(upload.part.start > 0), Ordering::Relaxed);
            self.residents.insert(upload.resident, (upload.adapter.digest, pages));
        } else {
            self.begun.insert(upload.resident, (upload.part.end, pages));
        }
    }

    fn write(&mut self, segment: &Segment) -> Vec<u32> {
        let width = self.budget.page_tokens as usize;
        if let Some(resident) = segment.adapter {
            let (_, pages) = &self.residents[&resident];
            for page in pages {
                assert_eq!(self.pages[*page as usize][0], Cell::Adapter(resident), "an adapter's page was overwritten");
            }
        }
        for (offset, token) in segment.tokens.iter().enumerate() {
            let position = segment.position as usize + offset;
            let page = segment.pages[position / width].0 as usize;
            self.pages[page][position % width] = Cell::Token(*token, segment.adapter);
        }
        let weights = segment.adapter.map(|resident| self.digests[&resident]);
        (0..segment.position as usize + segment.tokens.len())
            .map(|position| match &self.pages[segment.pages[position / width].0 as usize][position % width] {
                Cell::Token(token, adapter) => {
                    let written_under = adapter.map(|resident| self.digests[&resident]);
                    assert_eq!(written_under, weights, "keys of other weights were read");
                    *token
                }
                other => panic!("position {position} of {:?} reads {other:?}", segment.sequence),
            })
            .collect()
    }
}

impl Backend for Machine {
    fn page_budget(&self) -> PageBudget {
        self.budget
    }

    fn submit(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        let faults = self.watched.faults.load(Ordering::Relaxed);
        if faults && self.random.below(300) == 0 {
            let what = "broken on purpose".to_owned();
            return Err(BackendError::BadBatch { step: batch.step, what });
        }
        for resident in &batch.drops {
            let known = self.residents.remove(resident).is_some() || self.begun.remove(resident).is_some();
            assert!(known, "an unknown resident was dropped");
        }
        batch.uploads.iter().for_each(|upload| self.upload(upload));
        if faults && self.random.below(300) == 0 {
            for upload in &batch.uploads {
                self.residents.remove(&upload.resident);
                self.begun.remove(&upload.resident);
            }
            return Err(BackendError::Failed("broken on purpose".to_owned()));
        }
        self.watched.residents.store((self.residents.len() + self.begun.len()) as u64, Ordering::Relaxed);
        let rows: usize = batch.segments.iter().map(|segment| segment.tokens.len()).sum();
        assert!(rows <= self.limits.max_step_tokens as usize);
        assert!(batch.segments.len() <= self.limits.max_sequences as usize);
        let mut adapters: Vec<_> = batch.segments.iter().map(|segment| segment.adapter).collect();
        adapters.dedup();
        let distinct = adapters.len();
        adapters.sort();
        adapters.dedup();
        assert_eq!(distinct, adapters.len(), "segments of one adapter stand side by side");
        assert!(adapters.iter().flatten().count() <= self.limits.max_adapters_per_batch as usize);
        let mut sampled = Sampled::default();
        for segment in &batch.segments {
            let tokens = self.write(segment);
            if segment.sample.is_some() {
                let weights = segment.adapter.map(|resident| self.digests[&resident]);
                let token = next_token(weights, &tokens);
                let row = SampledRow { sequence: segment.sequence, token, logprob: 0.0, alternatives: Vec::new() };
                sampled.rows.push(row);
            }
        }
        self.result = Some(sampled);
        Ok(Ticket(batch.step))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, BackendError> {
        self.result.take().ok_or(BackendError::BadBatch { step: ticket.0, what: "not submitted".into() })
    }
}
