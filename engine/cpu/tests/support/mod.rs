//! A small scheduler over a backend: sequences in, greedy tokens out. No policy, only what a test steers.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lorafleet_artifact::{AdapterConfig, BaseShape, Digest, Safetensors, SafetensorsLimits, fit};
use lorafleet_backend::Backend;
use lorafleet_backend::HostAdapter;
use lorafleet_backend::batch::{Batch, PageId, ResidentId, SampleSpec, SampledRow, Segment, SequenceId, Upload};
use lorafleet_backend::layout::Layout;
use lorafleet_backend::model::Model;
use lorafleet_cpu::{CpuBackend, CpuOptions};
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
pub struct Answer {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
}

#[derive(Debug, Deserialize)]
pub struct Case {
    pub base: String,
    pub expect: String,
    #[serde(default)]
    pub answers: Vec<Answer>,
}

pub fn cases_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crds/artifact/tests/cases")
}

pub fn json<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The cases of a base that are served, by name.
pub fn served_cases(base: &str) -> BTreeMap<String, Case> {
    let mut cases = BTreeMap::new();
    for entry in std::fs::read_dir(cases_folder()).unwrap() {
        let path = entry.unwrap().path();
        let file = path.join("case.json");
        if file.is_file() {
            let case: Case = json(&file);
            if case.base == base && case.expect == "serve" {
                cases.insert(path.file_name().unwrap().to_string_lossy().into_owned(), case);
            }
        }
    }
    assert!(!cases.is_empty(), "no served case of {base} in {}", cases_folder().display());
    cases
}

pub fn load_adapter(folder: &Path, base: &BaseShape) -> Arc<HostAdapter> {
    let config = AdapterConfig::parse(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
    let file = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let header = Safetensors::parse(&file, file.len() as u64, &SafetensorsLimits::default()).unwrap();
    let fitted = fit(&config, &header, base).unwrap();
    let bytes = file[header.data_start as usize..].to_vec();
    Arc::new(HostAdapter { digest: Digest::from_bytes([0; 32]), bytes, fitted })
}

pub fn greedy() -> SampleSpec {
    SampleSpec { logprobs: Some(2), ..SampleSpec::greedy() }
}

/// One request of a test.
#[derive(Clone, Debug)]
pub struct Job {
    pub adapter: Option<ResidentId>,
    pub prompt: Vec<u32>,
    pub new_tokens: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generated {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    /// Between the best two tokens of each step.
    pub gaps: Vec<f32>,
}

pub struct Runner {
    pub backend: CpuBackend,
    pub model: Model,
    free: Vec<PageId>,
    step: u64,
    next_resident: u64,
    pending: Vec<Upload>,
    pub drops: Vec<ResidentId>,
    held: BTreeMap<ResidentId, Vec<PageId>>,
}

impl Runner {
    pub fn new(path: &Path, page_bytes_total: u64, threads: usize) -> Self {
        let model = Model::open(path).unwrap();
        let threads = threads.try_into().unwrap();
        let backend = CpuBackend::new(&model, CpuOptions { page_bytes_total, threads }).unwrap();
        let free = (0..backend.page_budget().pages).map(PageId).collect();
        Self {
            backend,
            model,
            free,
            step: 0,
            next_resident: 0,
            pending: Vec::new(),
            drops: Vec::new(),
            held: BTreeMap::new(),
        }
    }

    pub fn take(&mut self, pages: usize) -> Vec<PageId> {
        (0..pages).map(|_| self.free.pop().expect("pages")).collect()
    }

    pub fn give(&mut self, pages: Vec<PageId>) {
        self.free.extend(pages);
    }

    pub fn upload(&mut self, adapter: &Arc<HostAdapter>) -> ResidentId {
        let layout = Layout::of(&adapter.fitted.modules, self.backend.page_budget().page_bytes).unwrap();
        let pages = self.take(layout.pages as usize);
        self.next_resident += 1;
        let resident = ResidentId(self.next_resident);
        self.held.insert(resident, pages.clone());
        let part = 0..layout.pages;
        self.pending.push(Upload { resident, adapter: Arc::clone(adapter), pages, part });
        resident
    }

    /// Writes what is pending, so many pages of each adapter in a step.
    pub fn write_pending(&mut self, pages_per_step: u32) {
        let mut left = std::mem::take(&mut self.pending);
        while !left.is_empty() {
            for upload in &mut left {
                let start = upload.part.start;
                let part = start..(start + pages_per_step).min(upload.part.end);
                self.pending.push(Upload { part: part.clone(), ..upload.clone() });
                upload.part.start = part.end;
            }
            left.retain(|upload| !upload.part.is_empty());
            self.step(Vec::new());
        }
    }

    pub fn drop_resident(&mut self, resident: ResidentId) {
        self.free.extend(self.held.remove(&resident).unwrap());
        self.drops.push(resident);
    }

    pub fn step(&mut self, mut segments: Vec<Segment>) -> Vec<SampledRow> {
        segments.sort_by_key(|segment| segment.adapter);
        self.step += 1;
        let (drops, uploads) = (std::mem::take(&mut self.drops), std::mem::take(&mut self.pending));
        let batch = Batch { step: self.step, drops, uploads, segments };
        let ticket = self.backend.submit(&batch).unwrap();
        self.backend.wait(ticket).unwrap().rows
    }

    /// All jobs at once, prompts in chunks of at most `chunk` tokens, the next chunk beside the others' decoding.
    pub fn generate(&mut self, jobs: &[Job], chunk: usize) -> Vec<Generated> {
        let page_tokens = self.backend.page_budget().page_tokens as usize;
        let tables: Vec<Vec<PageId>> =
            jobs.iter().map(|job| self.take((job.prompt.len() + job.new_tokens).div_ceil(page_tokens))).collect();
        let mut done = vec![0usize; jobs.len()];
        let mut out = vec![Generated::default(); jobs.len()];
        loop {
            let mut segments = Vec::new();
            for (index, job) in jobs.iter().enumerate() {
                if out[index].tokens.len() == job.new_tokens {
                    continue;
                }
                let known: Vec<u32> = job.prompt.iter().chain(&out[index].tokens).copied().collect();
                let end = known.len().min(done[index].saturating_add(chunk));
                segments.push(Segment {
                    sequence: SequenceId(index as u64),
                    adapter: job.adapter,
                    tokens: known[done[index]..end].to_vec(),
                    position: done[index] as u32,
                    pages: tables[index].clone(),
                    sample: (end == known.len()).then(greedy),
                });
                done[index] = end;
            }
            if segments.is_empty() {
                break;
            }
            for row in self.step(segments) {
                let out = &mut out[row.sequence.0 as usize];
                out.tokens.push(row.token);
                out.logprobs.push(row.logprob);
                out.gaps.push(row.alternatives[0].1 - row.alternatives[1].1);
            }
        }
        for table in tables {
            self.free.extend(table);
        }
        out
    }
}
