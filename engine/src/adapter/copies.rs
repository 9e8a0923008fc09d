//! Adapters that carry copies of the base's own tensors, as PEFT saves them beside an adapted head.
//!
//! An unchanged copy says nothing new and is left out. A changed one would be part of the adapter's mathematics: the
//! adapter is refused then, because applying it is not supported and dropping it would be a silent lie.

use half::{bf16, f16};
use lorafleet_artifact::{BaseCopy, FloatType};
use lorafleet_backend::HostAdapter;

/// The base's weights by their Hugging Face names, row by row.
pub trait BaseTensors: Send + Sync {
    /// Writes one row (a vector has one) as f32 into `out`, which is exactly as long as the row. Returns how far the
    /// stored values may be from those that the base was quantised from: 0 for floats, half a quantisation step (or
    /// more) per value otherwise. `None` if the base has no such tensor or row.
    fn row(&self, name: &str, row: usize, out: &mut [f32]) -> Option<Exactness>;
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exactness {
    /// The base holds what it was published as, in this type.
    Stored(FloatType),
    /// Each value is within this distance of what it was made from.
    Within(f32),
}

/// A copy that is not the base's tensor.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CopyDiffers {
    #[error(
        "tensor '{name}' is a changed copy of the base's '{base_name}': row {row} column {column} is {copy}, the base has {base}; changed base weights are not supported"
    )]
    Changed { name: String, base_name: String, row: usize, column: usize, copy: f32, base: f32 },
    #[error("tensor '{name}' is a copy of the base's '{base_name}', which cannot be compared here")]
    NotComparable { name: String, base_name: String },
}

/// # Errors
/// The first copy that differs, by name, place and both values.
pub fn check_copies(adapter: &HostAdapter, base: Option<&dyn BaseTensors>) -> Result<(), CopyDiffers> {
    adapter.fitted.base_copies.iter().try_for_each(|copy| check_copy(copy, adapter.tensor(&copy.range), base))
}

fn check_copy(copy: &BaseCopy, bytes: &[u8], base: Option<&dyn BaseTensors>) -> Result<(), CopyDiffers> {
    let not_comparable = || CopyDiffers::NotComparable { name: copy.name.clone(), base_name: copy.base_name.clone() };
    let columns = copy.shape.last().and_then(|columns| usize::try_from(*columns).ok()).unwrap_or(0);
    let row_bytes = columns * copy.dtype.bytes() as usize;
    let (Some(base), true) = (base, row_bytes > 0) else { return Err(not_comparable()) };
    let mut expected = vec![0.0; columns];
    for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
        let exactness = base.row(&copy.base_name, row, &mut expected).ok_or_else(not_comparable)?;
        let differs = |(_, (copied, base)): &(usize, (f32, &f32))| !same(*copied, **base, copy.dtype, exactness);
        if let Some((column, (copied, base))) = values(bytes, copy.dtype).zip(&expected).enumerate().find(differs) {
            return Err(CopyDiffers::Changed {
                name: copy.name.clone(),
                base_name: copy.base_name.clone(),
                row,
                column,
                copy: copied,
                base: *base,
            });
        }
    }
    Ok(())
}

fn values(bytes: &[u8], dtype: FloatType) -> impl Iterator<Item = f32> {
    let size = dtype.bytes() as usize;
    bytes.chunks_exact(size).map(move |element| match (dtype, element) {
        (FloatType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (FloatType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (FloatType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    })
}

/// Whether a copied value can be the base's. PEFT writes the copies over the base's tensors, in the base's type: that must
/// change nothing, or for a quantised base no more than the quantiser has. A copy that was stored coarser than the base
/// changes it.
fn same(copied: f32, base: f32, dtype: FloatType, exactness: Exactness) -> bool {
    match exactness {
        Exactness::Stored(stored) => round(copied, stored) == base,
        // Both the copy's own rounding and the arithmetic of the quantiser leave a little more.
        Exactness::Within(distance) => (copied - base).abs() <= distance * 1.01 + copied.abs() * rounding(dtype),
    }
}

fn round(value: f32, dtype: FloatType) -> f32 {
    match dtype {
        FloatType::F32 => value,
        FloatType::F16 => f16::from_f32(value).to_f32(),
        FloatType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// Largest relative error of storing a value in this type.
fn rounding(dtype: FloatType) -> f32 {
    match dtype {
        FloatType::F32 => f32::EPSILON,
        FloatType::F16 => f16::EPSILON.to_f32(),
        FloatType::Bf16 => bf16::EPSILON.to_f32(),
    }
}
