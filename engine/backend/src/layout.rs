//! Where an adapter's rows lie in pages. Pure.
//!
//! Row j of A (`[in]`) and row j of B transposed (`[out]`) are the two vectors that rank j needs, so both lie as rows:
//! contiguous, 64-byte aligned, never across two pages. Ranks are exact: nothing is padded to another adapter's rank.

use std::ops::Range;

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

    /// Those of the rows, counted from 0, that lie in some of the adapter's pages.
    pub fn within(self, pages: &Range<u32>, page_bytes: u64) -> Range<u32> {
        // Rows in pages before this one. The page of the first row may have been full already.
        let before = |page: u32| {
            let Some(further) = page.checked_sub(self.page).filter(|further| *further > 0) else { return 0 };
            let first = page_bytes.saturating_sub(self.offset) / self.stride;
            let each = page_bytes / self.stride;
            (first + u64::from(further - 1) * each).min(self.count.into()) as u32
        };
        before(pages.start)..before(pages.end)
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

#[cfg(test)]
mod tests {
    use lorafleet_artifact::{ModuleKind, TensorRef};

    use super::*;

    fn module(layer: u32, kind: ModuleKind, rank: u32, input: u32, output: u32, dtype: FloatType) -> FittedModule {
        let tensor =
            |rows, columns| TensorRef { name: String::new(), dtype, double: false, rows, columns, range: 0..0 };
        let (a, b) = (tensor(rank, input), tensor(output, rank));
        FittedModule { module: ModuleId::in_layer(layer, kind), rank, scale: 1.0, a, b }
    }

    #[test]
    fn rows_lie_in_their_pages_and_apart() {
        let modules = [
            module(0, ModuleKind::Q, 100, 576, 576, FloatType::Bf16),
            module(0, ModuleKind::Down, 1, 1536, 577, FloatType::F32),
            module(1, ModuleKind::K, 31, 576, 192, FloatType::F16),
            module(7, ModuleKind::Up, 256, 576, 1536, FloatType::F32),
        ];
        for page_bytes in [6144, 8192, 65_536, 1 << 20] {
            let layout = Layout::of(&modules, page_bytes).unwrap();
            let mut taken: Vec<(u32, u64, u64)> = Vec::new();
            for rows in layout.modules.iter().flat_map(|module| [module.a, module.b]) {
                let places: Vec<(u32, u64)> = rows.places(page_bytes).collect();
                assert_eq!(places.len(), rows.count as usize);
                for (start, end) in [(0, 1), (1, 3), (0, layout.pages), (layout.pages / 2, layout.pages)] {
                    let within = rows.within(&(start..end), page_bytes);
                    let lies = |page: &(u32, u64)| (start..end).contains(&page.0);
                    assert_eq!(within.len(), places.iter().filter(|place| lies(place)).count());
                    assert!(places[within.start as usize..within.end as usize].iter().all(lies));
                }
                taken.extend(places.into_iter().map(|(page, offset)| (page, offset, offset + rows.stride)));
            }
            assert_eq!(taken.len(), 2 * (100 + 1 + 31 + 256));
            for (page, offset, end) in &taken {
                assert!(*page < layout.pages && *end <= page_bytes && offset % ROW_ALIGN == 0);
            }
            // In the order of placing, no row begins before the last one ends.
            assert!(
                taken.windows(2).all(|pair| (pair[0].0, pair[0].2) <= (pair[1].0, pair[1].1) || pair[0].0 < pair[1].0)
            );
            assert_eq!(taken.last().map(|row| row.0 + 1), Some(layout.pages));
            assert_eq!(layout.bytes(), u64::from(layout.pages) * page_bytes);
        }
    }

    #[test]
    fn a_row_longer_than_a_page_is_refused_with_both_values() {
        let wide = [module(3, ModuleKind::Down, 8, 1536, 576, FloatType::F32)];
        let error = Layout::of(&wide, 6080).unwrap_err();
        assert_eq!(error.to_string(), "model.layers.3.mlp.down_proj: a row of 6144 bytes does not fit a page of 6080");
        assert_eq!(Layout::of(&[], 64).unwrap().pages, 0);
    }
}
