//! One pass over the bytes of a weights file: its SHA-256, numbers that are none, and whether anything has an effect.

use std::ops::Range;

use sha2::{Digest as _, Sha256};

use crate::fit::{Fitted, FloatType};
use crate::reason::{Reason, Refusal, excerpt};

/// Takes a file in pieces of any size. Holds a few bytes, whatever the size of the file.
#[derive(Debug)]
pub(crate) struct Scan {
    hasher: Sha256,
    /// Bytes taken so far.
    position: u64,
    /// Sorted by range; ranges are in the file.
    spans: Vec<Span>,
    /// The first span that is not yet behind us.
    current: usize,
    /// The first bytes of an element whose rest comes with the next piece.
    carry: Vec<u8>,
}

#[derive(Debug)]
struct Span {
    name: String,
    dtype: FloatType,
    /// It is stored as F64, and becomes F32.
    double: bool,
    range: Range<u64>,
    any_set: bool,
}

impl Scan {
    /// `data_start` is the offset of the data section in the file.
    pub(crate) fn new(fitted: &Fitted, data_start: u64) -> Self {
        let pairs = fitted.modules.iter().flat_map(|module| [&module.a, &module.b]);
        let pairs = pairs.map(|tensor| (&tensor.name, tensor.dtype, tensor.double, &tensor.range));
        let copies = fitted.base_copies.iter().map(|copy| (&copy.name, copy.dtype, copy.double, &copy.range));
        let mut spans: Vec<Span> = pairs
            .chain(copies)
            .map(|(name, dtype, double, range)| Span {
                name: name.clone(),
                dtype,
                double,
                range: range.start + data_start..range.end + data_start,
                any_set: false,
            })
            .collect();
        spans.sort_by_key(|span| span.range.start);
        Self { hasher: Sha256::new(), position: 0, spans, current: 0, carry: Vec::new() }
    }

    /// # Errors
    /// Malformed at the first element that is NaN or infinite.
    pub(crate) fn push(&mut self, mut piece: &[u8]) -> Result<(), Refusal> {
        self.hasher.update(piece);
        while !piece.is_empty() {
            let Some(span) = self.spans.get_mut(self.current) else {
                self.position += piece.len() as u64;
                return Ok(());
            };
            // Up to the span, or up to its end.
            let inside = self.position >= span.range.start;
            let until = if inside { span.range.end } else { span.range.start };
            let count = usize::try_from(until - self.position).unwrap_or(usize::MAX).min(piece.len());
            let (part, rest) = piece.split_at(count);
            if inside {
                span.take(part, self.position, &mut self.carry)?;
            }
            self.position += count as u64;
            if inside && self.position == span.range.end {
                self.current += 1;
            }
            piece = rest;
        }
        Ok(())
    }

    /// SHA-256 of everything that was pushed, after the judgement whether the adapter changes anything.
    ///
    /// # Errors
    /// NoEffect if in every module A or B is all zeros, or the scale is.
    pub(crate) fn finish(self, fitted: &Fitted) -> Result<[u8; 32], Refusal> {
        let set: std::collections::BTreeSet<&str> =
            self.spans.iter().filter(|span| span.any_set).map(|span| span.name.as_str()).collect();
        let acts = |module: &crate::fit::FittedModule| {
            module.scale != 0.0 && set.contains(module.a.name.as_str()) && set.contains(module.b.name.as_str())
        };
        if !fitted.modules.iter().any(acts) {
            let count = fitted.modules.len();
            return Err(Refusal::new(
                Reason::NoEffect,
                format!("the adapter changes nothing: in each of its {count} modules A, B or the scale is all zeros"),
            ));
        }
        Ok(self.hasher.finalize().into())
    }
}

impl Span {
    /// `at` is the file offset of the first byte of `part`.
    fn take(&mut self, part: &[u8], at: u64, carry: &mut Vec<u8>) -> Result<(), Refusal> {
        let size = self.element_bytes();
        // An element that began in the piece before comes first.
        let begun = carry.len();
        let (head, part) = part.split_at(if begun == 0 { 0 } else { (size - begun).min(part.len()) });
        if begun > 0 {
            carry.extend_from_slice(head);
            if carry.len() < size {
                return Ok(());
            }
            let element = std::mem::take(carry);
            self.elements(&element, at - begun as u64)?;
        }
        let whole = part.len() - part.len() % size;
        let (elements, rest) = part.split_at(whole);
        carry.extend_from_slice(rest);
        self.elements(elements, at + head.len() as u64)
    }

    /// `at` is the file offset of the first of these whole elements.
    fn elements(&mut self, bytes: &[u8], at: u64) -> Result<(), Refusal> {
        // Branch-free sums over the exponents, so that this runs at memory speed.
        let (bad, any) = match self.dtype {
            FloatType::F32 if self.double => {
                let (words, _) = bytes.as_chunks::<8>();
                singles(words.iter().map(|word| rounded(*word)))
            }
            FloatType::F32 => {
                let (words, _) = bytes.as_chunks::<4>();
                singles(words.iter().map(|word| u32::from_le_bytes(*word)))
            }
            FloatType::F16 => halves(bytes, 0x7c00),
            FloatType::Bf16 => halves(bytes, 0x7f80),
        };
        self.any_set |= any != 0;
        if bad {
            let name = excerpt(&self.name, 200);
            let at = at + self.first_bad(bytes) as u64;
            let what = if self.double { "no number of single precision" } else { "a NaN or an infinity" };
            return Err(Refusal::malformed(format!("tensor '{name}' holds {what} at byte {at} of the file")));
        }
        Ok(())
    }

    fn element_bytes(&self) -> usize {
        if self.double { size_of::<f64>() } else { self.dtype.bytes() as usize }
    }

    /// Offset of the first element that is no number.
    fn first_bad(&self, bytes: &[u8]) -> usize {
        let size = self.element_bytes();
        if self.double {
            let (words, _) = bytes.as_chunks::<8>();
            return words.iter().position(|word| rounded(*word) & MAGNITUDE >= INFINITY).unwrap_or(0) * size;
        }
        let infinity = match self.dtype {
            FloatType::F32 => INFINITY,
            FloatType::F16 => 0x7c00,
            FloatType::Bf16 => 0x7f80,
        };
        let magnitude = |element: &[u8]| {
            let bits = element.iter().rev().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
            bits & (u32::MAX >> (33 - 8 * size))
        };
        bytes.chunks_exact(size).position(|element| magnitude(element) >= infinity).unwrap_or(0) * size
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// The bits of an F64 as the F32 that it becomes.
fn rounded(word: [u8; 8]) -> u32 {
    (f64::from_le_bytes(word) as f32).to_bits()
}

/// Whether an element has an exponent of all ones, and the union of all magnitudes.
fn singles(elements: impl Iterator<Item = u32>) -> (bool, u32) {
    elements.fold((false, 0_u32), |(bad, any), element| {
        let magnitude = element & MAGNITUDE;
        (bad | (magnitude >= INFINITY), any | magnitude)
    })
}

/// The same.
fn halves(bytes: &[u8], infinity: u16) -> (bool, u32) {
    let (words, _) = bytes.as_chunks::<2>();
    let (bad, any) = words.iter().fold((false, 0_u16), |(bad, any), word| {
        let magnitude = u16::from_le_bytes(*word) & 0x7fff;
        (bad | (magnitude >= infinity), any | magnitude)
    });
    (bad, any.into())
}
