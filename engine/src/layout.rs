//! Where an adapter's rows lie in pages. Pure.
//!
//! Row j of A (`[in]`) and row j of B transposed (`[out]`) are the two vectors that rank j needs, so both lie as rows:
//! contiguous, 64-byte aligned, never across two pages. Ranks are exact: nothing is padded to another adapter's rank.

use lorafleet_artifact::{FittedModule, FloatType, ModuleId};

/// Each row starts at a multiple of this many bytes, and its stride is one.
pub const ROW_ALIGN: u64 = 64;

/// A run of rows: `count` rows from (`page`, `offset`), as many in each page as fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Index into the adapter's own list of pages.
    pub page: u32,
    pub offset: u64,
    pub stride: u64,
    pub count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleLayout {
    pub module: ModuleId,
    /// `rank` rows as wide as the module's input.
    pub a: Rows,
    /// `rank` rows as wide as its output: B transposed.
    pub b: Rows,
}

/// Deterministic: the same adapter and page size give the same layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub page_bytes: u64,
    pub pages: u32,
    /// In the order given.
    pub modules: Vec<ModuleLayout>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error("{module}: a row of {row_bytes} bytes does not fit a page of {page_bytes}")]
    RowTooLong { module: ModuleId, row_bytes: u64, page_bytes: u64 },
    #[error("the adapter needs more than {} pages of {page_bytes} bytes", u32::MAX)]
    TooManyPages { page_bytes: u64 },
}

/// Bytes from one row to the next.
pub fn row_stride(element: FloatType, columns: u32) -> u64 {
    (element.bytes() * u64::from(columns)).next_multiple_of(ROW_ALIGN)
}

impl Layout {
    /// # Errors
    /// A row longer than a page, or more pages than can be named.
    pub fn of(modules: &[FittedModule], page_bytes: u64) -> Result<Self, LayoutError> {
        let mut cursor = Cursor { page: 0, offset: 0, page_bytes };
        let mut placed = Vec::with_capacity(modules.len());
        for FittedModule { module, rank, a, b, .. } in modules {
            let a = cursor.rows(*module, row_stride(a.dtype, a.columns), *rank)?;
            let b = cursor.rows(*module, row_stride(b.dtype, b.rows), *rank)?;
            placed.push(ModuleLayout { module: *module, a, b });
        }
        let last = u64::from(cursor.offset > 0);
        let pages = u32::try_from(cursor.page + last).map_err(|_| LayoutError::TooManyPages { page_bytes })?;
        Ok(Self { page_bytes, pages, modules: placed })
    }

    /// Bytes of the pages that it takes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes
    }
}

impl Rows {
    /// Page (index into the adapter's list) and byte offset of each row, in order.
    pub fn places(self, page_bytes: u64) -> impl Iterator<Item = (u32, u64)> {
        let (mut page, mut offset) = (self.page, self.offset);
        (0..self.count).map(move |_| {
            if offset + self.stride > page_bytes {
                (page, offset) = (page + 1, 0);
            }
            let place = (page, offset);
            offset += self.stride;
            place
        })
    }
}

struct Cursor {
    page: u64,
    offset: u64,
    page_bytes: u64,
}

impl Cursor {
    fn rows(&mut self, module: ModuleId, stride: u64, count: u32) -> Result<Rows, LayoutError> {
        let page_bytes = self.page_bytes;
        if stride > page_bytes {
            return Err(LayoutError::RowTooLong { module, row_bytes: stride, page_bytes });
        }
        let page = u32::try_from(self.page).map_err(|_| LayoutError::TooManyPages { page_bytes })?;
        let rows = Rows { page, offset: self.offset, stride, count };
        for _ in 0..count {
            if self.offset + stride > page_bytes {
                (self.page, self.offset) = (self.page + 1, 0);
            }
            self.offset += stride;
        }
        Ok(rows)
    }
}
