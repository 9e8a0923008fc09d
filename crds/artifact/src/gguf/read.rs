//! A cursor over the first bytes of a file. Every read is checked against the bytes, the file and the limits.

use super::{GgufLimits, HeaderError};
use crate::reason::{Reason, Refusal};

pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    file_bytes: u64,
    limits: &'a GgufLimits,
    position: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], file_bytes: u64, limits: &'a GgufLimits) -> Self {
        Self { bytes, file_bytes, limits, position: 0 }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn limits(&self) -> &'a GgufLimits {
        self.limits
    }

    pub(super) fn take(&mut self, count: u64) -> Result<&'a [u8], HeaderError> {
        let start = self.position;
        let end = start.checked_add(count).filter(|end| *end <= self.file_bytes).ok_or_else(|| {
            let file = self.file_bytes;
            Refusal::malformed(format!("the header wants {count} bytes at offset {start}, the file ends at {file}"))
        })?;
        if end > self.limits.header_bytes {
            let limit = self.limits.header_bytes;
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("the header is longer than {limit} bytes: it reaches {end}"),
            )
            .into());
        }
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        let taken = range.and_then(|(start, end)| self.bytes.get(start..end));
        let taken = taken.ok_or(HeaderError::Incomplete { bytes: end })?;
        self.position = end;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self) -> Result<u32, HeaderError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, HeaderError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn count(&mut self, what: &str, limit: u64) -> Result<u64, HeaderError> {
        let count = self.u64()?;
        if count > limit {
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("the header names {count} {what}, the limit is {limit}"),
            )
            .into());
        }
        Ok(count)
    }

    pub(super) fn name(&mut self, what: &str) -> Result<String, HeaderError> {
        self.text(what, self.limits.name_bytes)
    }

    pub(super) fn text(&mut self, what: &str, limit: u64) -> Result<String, HeaderError> {
        let at = self.position;
        let length = self.u64()?;
        if length > limit {
            return Err(Refusal::malformed(format!(
                "the {what} at offset {at} has {length} bytes, the limit is {limit}"
            ))
            .into());
        }
        let text = std::str::from_utf8(self.take(length)?);
        let text = text.map_err(|_| Refusal::malformed(format!("the {what} at offset {at} is not UTF-8")))?;
        Ok(text.to_owned())
    }
}
