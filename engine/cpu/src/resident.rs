//! Adapters in pages.

use lorafleet_artifact::{FittedModule, FloatType, ModuleId, ModuleKind, TensorRef};
use lorafleet_backend::batch::PageId;
use lorafleet_backend::layout::{Layout, Rows};
use lorafleet_backend::model::Shape;

use super::kernels::lora::RowPtr;
use super::memory::Shared;

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
    layers: Vec<[Option<Module>; 7]>,
    head: Option<Module>,
}

impl Resident {
    /// Copies every module into its pages. `data` is the data section that the modules' tensors refer to.
    ///
    /// # Errors
    /// If a module is not of this model, or a tensor does not lie in the data with the bytes that its shape says.
    pub fn upload(
        shape: &Shape,
        layout: &Layout,
        modules: &[FittedModule],
        data: &[u8],
        pages: &[PageId],
        arena: Shared<u8>,
    ) -> Result<Self, String> {
        let mut layers: Vec<[Option<Module>; 7]> = (0..shape.layers).map(|_| Default::default()).collect();
        let (mut head, mut rank_max) = (None, 0);
        for (fitted, place) in modules.iter().zip(&layout.modules) {
            let id = fitted.module;
            let rows = |rows: Rows| row_pointers(rows, layout.page_bytes, pages, arena);
            let (a, b) = (rows(place.a)?, rows(place.b)?);
            let (outputs, inputs) = shape.width(id.kind);
            let rank = fitted.rank as usize;
            let a_values = values(data, &fitted.a, rank, inputs)?;
            let b_values = values(data, &fitted.b, outputs, rank)?;
            write_rows(&a, a_values, inputs * fitted.a.dtype.bytes() as usize);
            match fitted.b.dtype {
                FloatType::F16 | FloatType::Bf16 => write_transposed::<2>(&b, b_values),
                FloatType::F32 => write_transposed::<4>(&b, b_values),
            }
            rank_max = rank_max.max(rank);
            let (a_type, b_type, scale) = (fitted.a.dtype, fitted.b.dtype, fitted.scale as f32);
            let module = Module { a_type, b_type, scale, a, b };
            let slot = match (id.layer, id.kind) {
                (None, ModuleKind::LmHead) => Some(&mut head),
                (Some(layer), kind) => layers.get_mut(layer as usize).and_then(|slots| slots.get_mut(kind as usize)),
                _ => None,
            };
            *slot.ok_or_else(|| format!("the model has no module {id}"))? = Some(module);
        }
        Ok(Self { pages: pages.to_vec(), rank_max, layers, head })
    }

    pub fn module(&self, id: ModuleId) -> Option<&Module> {
        match id.layer {
            None => self.head.as_ref(),
            Some(layer) => self.layers.get(layer as usize)?.get(id.kind as usize)?.as_ref(),
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

fn write_rows(rows: &[RowPtr], from: &[u8], row_bytes: usize) {
    for (row, from) in rows.iter().zip(from.chunks_exact(row_bytes)) {
        // SAFETY: the row is as long as the layout says, and nobody reads pages while uploads are written.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), row.0.cast_mut(), row_bytes) };
    }
}

/// `from` is `[out][rank]`: element (o, j) goes to element o of row j.
fn write_transposed<const BYTES: usize>(rows: &[RowPtr], from: &[u8]) {
    for (o, from) in from.chunks_exact(BYTES * rows.len()).enumerate() {
        for (row, element) in rows.iter().zip(from.chunks_exact(BYTES)) {
            // SAFETY: as in `write_rows`; o is below the module's outputs.
            unsafe { std::ptr::copy_nonoverlapping(element.as_ptr(), row.0.cast_mut().add(o * BYTES), BYTES) };
        }
    }
}
