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
    range: Range<u64>,
    any_set: bool,
}

impl Scan {
    /// `data_start` is the offset of the data section in the file.
    pub(crate) fn new(fitted: &Fitted, data_start: u64) -> Self {
        let pairs = fitted.modules.iter().flat_map(|module| [&module.a, &module.b]);
        let pairs = pairs.map(|tensor| (&tensor.name, tensor.dtype, &tensor.range));
        let copies = fitted.base_copies.iter().map(|copy| (&copy.name, copy.dtype, &copy.range));
        let mut spans: Vec<Span> = pairs
            .chain(copies)
            .map(|(name, dtype, range)| Span {
                name: name.clone(),
                dtype,
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
        let size = self.dtype.bytes() as usize;
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
            FloatType::F32 => {
                let (words, _) = bytes.as_chunks::<4>();
                words.iter().fold((false, 0_u32), |(bad, any), word| {
                    let magnitude = u32::from_le_bytes(*word) & 0x7fff_ffff;
                    (bad | (magnitude >= 0x7f80_0000), any | magnitude)
                })
            }
            FloatType::F16 => halves(bytes, 0x7c00),
            FloatType::Bf16 => halves(bytes, 0x7f80),
        };
        self.any_set |= any != 0;
        if bad {
            let name = excerpt(&self.name, 200);
            let at = at + self.first_bad(bytes) as u64;
            return Err(Refusal::malformed(format!(
                "tensor '{name}' holds a NaN or an infinity at byte {at} of the file"
            )));
        }
        Ok(())
    }

    /// Offset of the first element that is no number.
    fn first_bad(&self, bytes: &[u8]) -> usize {
        let size = self.dtype.bytes() as usize;
        let infinity = match self.dtype {
            FloatType::F32 => 0x7f80_0000_u32,
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

/// Whether an element has an exponent of all ones, and the union of all magnitudes.
fn halves(bytes: &[u8], infinity: u16) -> (bool, u32) {
    let (words, _) = bytes.as_chunks::<2>();
    let (bad, any) = words.iter().fold((false, 0_u16), |(bad, any), word| {
        let magnitude = u16::from_le_bytes(*word) & 0x7fff;
        (bad | (magnitude >= infinity), any | magnitude)
    });
    (bad, any.into())
}
