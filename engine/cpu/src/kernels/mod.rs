//! The inner loops, each written once and instantiated for the instruction sets that we know.

// Every function here is unsafe as a whole: raw pointers into shared buffers, an instruction set that must be present.
// A block round each line would say nothing more. Indexed loops over constant bounds are what unrolls into registers.
#![allow(unsafe_op_in_unsafe_fn, clippy::needless_range_loop)]

/// The body once for each value of an index below a constant of at most 24, spelled out. A loop that the compiler is left
/// to unroll is at times unrolled too late for the sums to stay in registers, and then takes twice the time.
macro_rules! each {
    ($index:ident < $count:expr, $body:expr) => {
        each!($index, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23)
    };
    ($index:ident, $count:expr, $body:expr, $($value:literal)*) => {
        $(if $value < $count {
            let $index = $value;
            $body;
        })*
    };
}

pub mod attention;
pub mod gemm;
pub mod lora;
pub mod rows;
pub mod simd;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use attention::AttentionItem;
use gemm::GemmItem;
use lora::{ExpandItem, ShrinkItem};
use rows::{GateItem, NormItem, RotateItem};
use simd::{Portable, Simd};

/// One instantiation of every kernel.
///
/// # Safety
/// Calling any of them asks that the item's pointers are valid for what its counts say; [`Kernels::for_this_machine`]
/// and [`Kernels::all_here`] give only tables whose instruction set is present.
pub struct Kernels {
    pub name: &'static str,
    /// Row counts of the matrix kernel's tiles, largest first.
    pub row_tiles: &'static [usize],
    pub gemm: unsafe fn(&GemmItem<'_>),
    pub shrink: unsafe fn(&ShrinkItem<'_>),
    pub expand: unsafe fn(&ExpandItem<'_>),
    pub attention: unsafe fn(&AttentionItem<'_>),
    pub norm: unsafe fn(&NormItem),
    pub gate: unsafe fn(&GateItem),
    pub rotate: unsafe fn(&RotateItem),
}

macro_rules! instantiate {
    ($module:ident, $simd:ty, $name:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;
            $(#[target_feature(enable = $features)])?
            unsafe fn gemm(item: &GemmItem<'_>) {
                super::gemm::gemm::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn shrink(item: &ShrinkItem<'_>) {
                super::lora::shrink::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn expand(item: &ExpandItem<'_>) {
                super::lora::expand::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attention(item: &AttentionItem<'_>) {
                super::attention::attention::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn norm(item: &NormItem) {
                super::rows::norm::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gate(item: &GateItem) {
                super::rows::gate::<$simd>(item);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(item: &RotateItem) {
                super::rows::rotate::<$simd>(item);
            }
            pub static KERNELS: Kernels = Kernels {
                name: $name,
                row_tiles: <$simd as Simd>::ROW_TILES,
                gemm,
                shrink,
                expand,
                attention,
                norm,
                gate,
                rotate,
            };
        }
    };
}

instantiate!(portable, Portable, "portable");
#[cfg(target_arch = "x86_64")]
instantiate!(avx2, x86::Avx2, "avx2", "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
instantiate!(avx512, x86::Avx512, "avx512", "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c");

impl Kernels {
    /// The fastest that this machine has.
    pub fn for_this_machine() -> &'static Self {
        Self::all_here().first().copied().unwrap_or(&portable::KERNELS)
    }

    /// All that run on this machine, fastest first: they agree bit for bit.
    pub fn all_here() -> Vec<&'static Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            if avx2 && avx512 {
                all.push(&avx512::KERNELS);
            }
            if avx2 {
                all.push(&avx2::KERNELS);
            }
        }
        all.push(&portable::KERNELS);
        all
    }
}
