//! Adapters in pages.

use std::ops::Range;

use lorafleet_artifact::{FittedModule, FloatType, ModuleId, ModuleKind, TensorRef};
use lorafleet_backend::batch::{PageId, Upload};
use lorafleet_backend::layout::{Layout, ModuleLayout, Rows};
use lorafleet_backend::model::Shape;

use super::kernels::lora::RowPtr;
use super::memory::Shared;
use super::pool::Pool;

/// One adapted module, ready for the kernels.
pub struct Module {
    pub a_type: FloatType,
    pub b_type: FloatType,
    pub scale: f32,
    /// One row for each rank.
    pub a: Vec<RowPtr>,
    /// One row of B transposed for each rank.
    pub b: Vec<RowPtr>,
}

pub struct Resident {
    pub pages: Vec<PageId>,
    pub rank_max: usize,
    layout: Layout,
    /// So many of `pages` hold what they shall.
    written: u32,
    layers: Vec<[Option<Module>; 7]>,
    head: Option<Module>,
}

impl Resident {
    /// Looks at every module and at where it will lie; nothing is written yet.
    ///
    /// # Errors
    /// If a module is not of this model, or a tensor does not lie in the data with the bytes that its shape says.
    pub fn new(shape: &Shape, layout: Layout, upload: &Upload, arena: Shared<u8>) -> Result<Self, String> {
        let mut layers: Vec<[Option<Module>; 7]> = (0..shape.layers).map(|_| Default::default()).collect();
        let (mut head, mut rank_max) = (None, 0);
        for (fitted, place) in upload.adapter.fitted.modules.iter().zip(&layout.modules) {
            let id = fitted.module;
            let rows = |rows: Rows| row_pointers(rows, layout.page_bytes, &upload.pages, arena);
            let (outputs, inputs) = shape.width(id.kind);
            let rank = fitted.rank as usize;
            values(&upload.adapter.bytes, &fitted.a, rank, inputs)?;
            values(&upload.adapter.bytes, &fitted.b, outputs, rank)?;
            rank_max = rank_max.max(rank);
            let module = Module {
                a_type: fitted.a.dtype,
                b_type: fitted.b.dtype,
                scale: fitted.scale,
                a: rows(place.a)?,
                b: rows(place.b)?,
            };
            let slot = match (id.layer, id.kind) {
                (None, ModuleKind::LmHead) => Some(&mut head),
                (Some(layer), kind) => layers.get_mut(layer as usize).and_then(|slots| slots.get_mut(kind as usize)),
                _ => None,
            };
            *slot.ok_or_else(|| format!("the model has no module {id}"))? = Some(module);
        }
        Ok(Self { pages: upload.pages.clone(), rank_max, layout, written: 0, layers, head })
    }

    /// Copies what lies in the next pages into them, on all threads.
    ///
    /// # Errors
    /// As for `new`; it would have been refused there.
    pub fn write(&mut self, upload: &Upload, pool: &mut Pool) -> Result<(), String> {
        let mut copies = Vec::new();
        for (fitted, place) in upload.adapter.fitted.modules.iter().zip(&self.layout.modules) {
            if let Some(module) = self.module(fitted.module) {
                let part = Part { pages: &upload.part, page_bytes: self.layout.page_bytes };
                part.copies(module, fitted, place, &upload.adapter.bytes, &mut copies)?;
            }
        }
        pool.run(copies.len(), 1, &|item, _| copies[item].run());
        drop(copies);
        self.written = upload.part.end;
        Ok(())
    }

    pub fn written(&self) -> u32 {
        self.written
    }

    /// Every page holds what it shall: segments may use it.
    pub fn is_whole(&self) -> bool {
        self.written as usize == self.pages.len()
    }

    pub fn module(&self, id: ModuleId) -> Option<&Module> {
        match id.layer {
            None => self.head.as_ref(),
            Some(layer) => self.layers.get(layer as usize)?.get(id.kind as usize)?.as_ref(),
        }
    }
}

/// Pages to write of an adapter's.
struct Part<'a> {
    pages: &'a Range<u32>,
    page_bytes: u64,
}

/// Bytes of one item of the pool: some tens of microseconds.
const ITEM_BYTES: usize = 128 << 10;
/// Transposed in blocks of one cache line of the stored rows times so many outputs: a block of both sides stays in the
/// first-level cache, whatever the strides.
const LINE_BYTES: usize = 64;
const BLOCK_OUTPUTS: usize = 32;

impl Part<'_> {
    /// What of one module lies in these pages, as copies that do not overlap.
    fn copies<'a>(
        &self,
        module: &'a Module,
        fitted: &FittedModule,
        place: &ModuleLayout,
        data: &'a [u8],
        copies: &mut Vec<Copy<'a>>,
    ) -> Result<(), String> {
        let rank = fitted.rank as usize;
        let (a, b) = (self.rows(place.a), self.rows(place.b));
        let (inputs, outputs) = (fitted.a.columns as usize, fitted.b.rows as usize);
        let row_bytes = inputs * fitted.a.dtype.bytes() as usize;
        let from = values(data, &fitted.a, rank, inputs)?;
        let each = (ITEM_BYTES / row_bytes).max(1);
        for first in a.clone().step_by(each) {
            let rows = first..(first + each).min(a.end);
            let from = &from[rows.start * row_bytes..rows.end * row_bytes];
            copies.push(Copy::Rows { to: &module.a[rows], from, row_bytes });
        }
        if b.is_empty() {
            return Ok(());
        }
        let element_bytes = fitted.b.dtype.bytes() as usize;
        let from = values(data, &fitted.b, outputs, rank)?;
        let each = (ITEM_BYTES / (b.len() * element_bytes)).max(1).next_multiple_of(BLOCK_OUTPUTS);
        for first in (0..outputs).step_by(each) {
            let outputs = first..(first + each).min(outputs);
            let from = &from[outputs.start * rank * element_bytes..outputs.end * rank * element_bytes];
            let to = &module.b[b.clone()];
            copies.push(Copy::Transposed { to, from, first_row: b.start, first_output: first, rank, element_bytes });
        }
        Ok(())
    }

    fn rows(&self, rows: Rows) -> Range<usize> {
        let within = rows.within(self.pages, self.page_bytes);
        within.start as usize..within.end as usize
    }
}

/// One item of an upload.
enum Copy<'a> {
    /// Rows as they are stored.
    Rows { to: &'a [RowPtr], from: &'a [u8], row_bytes: usize },
    /// `from` is `[outputs][rank]`: element (o, `first_row` + j) goes to element `first_output` + o of row j.
    Transposed {
        to: &'a [RowPtr],
        from: &'a [u8],
        first_row: usize,
        first_output: usize,
        rank: usize,
        element_bytes: usize,
    },
}

impl Copy<'_> {
    fn run(&self) {
        match *self {
            Self::Rows { to, from, row_bytes } => {
                for (row, from) in to.iter().zip(from.chunks_exact(row_bytes)) {
                    // SAFETY: the row is as long as the layout says, and nobody reads pages while uploads are written.
                    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), row.0.cast_mut(), row_bytes) };
                }
            }
            Self::Transposed { to, from, first_row, first_output, rank, element_bytes: 2 } => {
                transpose::<2>(to, from, first_row, first_output, rank);
            }
            Self::Transposed { to, from, first_row, first_output, rank, .. } => {
                transpose::<4>(to, from, first_row, first_output, rank);
            }
        }
    }
}

fn transpose<const BYTES: usize>(to: &[RowPtr], from: &[u8], first_row: usize, first_output: usize, rank: usize) {
    let stored_bytes = rank * BYTES;
    let ranks = LINE_BYTES / BYTES;
    for (block, stored) in from.chunks(BLOCK_OUTPUTS * stored_bytes).enumerate() {
        let output = first_output + block * BLOCK_OUTPUTS;
        for (group, rows) in to.chunks(ranks).enumerate() {
            for (j, row) in rows.iter().enumerate() {
                let column = (first_row + group * ranks + j) * BYTES;
                for (o, stored) in stored.chunks_exact(stored_bytes).enumerate() {
                    let element = &stored[column..column + BYTES];
                    // SAFETY: as for whole rows; the output is one of the module's, and the item's alone.
                    unsafe {
                        let to = row.0.cast_mut().add((output + o) * BYTES);
                        std::ptr::copy_nonoverlapping(element.as_ptr(), to, BYTES);
                    }
                }
            }
        }
    }
}

fn values<'a>(data: &'a [u8], tensor: &TensorRef, rows: usize, columns: usize) -> Result<&'a [u8], String> {
    let bytes = rows * columns * tensor.dtype.bytes() as usize;
    let range = usize::try_from(tensor.range.start).ok().zip(usize::try_from(tensor.range.end).ok());
    let found = range.and_then(|(start, end)| data.get(start..end)).filter(|found| found.len() == bytes);
    let said = [tensor.rows as usize, tensor.columns as usize];
    found.filter(|_| said == [rows, columns]).ok_or_else(|| {
        let range = &tensor.range;
        format!("{} {said:?} at {range:?} of {}: [{rows}, {columns}] needs {bytes}", tensor.name, data.len())
    })
}

fn row_pointers(rows: Rows, page_bytes: u64, pages: &[PageId], arena: Shared<u8>) -> Result<Vec<RowPtr>, String> {
    rows.places(page_bytes)
        .map(|(page, offset)| {
            let id = pages.get(page as usize).ok_or_else(|| format!("page {page} of {} asked for", pages.len()))?;
            let at = u64::from(id.0) * page_bytes + offset;
            // SAFETY: the batch was checked: the id is in the pool, and the layout keeps a row within its page.
            Ok(RowPtr(unsafe { arena.get().add(at as usize) }))
        })
        .collect()
}
