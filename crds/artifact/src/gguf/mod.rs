//! The header of a GGUF file: metadata and tensor inventory.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

mod read;
mod types;
mod value;

use std::collections::{BTreeMap, BTreeSet};

pub use types::GgmlType;
pub use value::{Array, Value};

use crate::reason::{Refusal, excerpt};
use read::Reader;

/// What a header may ask for, so that a hostile file cannot make us hold more than the file itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufLimits {
    /// From the magic to the first byte of data.
    pub header_bytes: u64,
    pub metadata_entries: u64,
    pub tensors: u64,
    pub name_bytes: u64,
    pub string_bytes: u64,
    pub array_elements: u64,
}

impl Default for GgufLimits {
    fn default() -> Self {
        Self {
            header_bytes: 64 << 20,
            metadata_entries: 65_536,
            tensors: 65_536,
            name_bytes: 1024,
            string_bytes: 16 << 20,
            array_elements: 8 << 20,
        }
    }
}

/// Why a header could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The header goes on behind the bytes that were given, and the file is longer: give at least this many.
    #[error("the header needs at least {bytes} bytes of the file")]
    Incomplete { bytes: u64 },
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A parsed header. Tensors are in the order of the file's inventory; names are unique; byte ranges lie in the file
/// and do not overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct Gguf {
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<GgufTensor>,
    /// Of tensor data, in bytes: a power of two.
    pub alignment: u64,
    /// Offset in the file of the data section.
    pub data_start: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    pub name: String,
    /// Outermost dimension first, as Hugging Face writes shapes (GGUF itself stores the innermost first): a linear
    /// weight is `[out, in]`, its rows contiguous.
    pub shape: Vec<u64>,
    pub kind: GgmlType,
    /// From the start of the file.
    pub offset: u64,
    pub bytes: u64,
}

impl Gguf {
    /// Reads the header from the first bytes of a file that is `file_bytes` long. `bytes` may be the whole file.
    ///
    /// # Errors
    /// `Incomplete` if a longer prefix is needed; `Refused` (Malformed, TooLarge, UnsupportedFeature) otherwise.
    pub fn parse(bytes: &[u8], file_bytes: u64, limits: &GgufLimits) -> Result<Self, HeaderError> {
        let mut reader = Reader::new(bytes, file_bytes, limits);
        let version = preamble(&mut reader)?;
        let tensor_count = reader.count("tensors", limits.tensors)?;
        let entry_count = reader.count("metadata entries", limits.metadata_entries)?;
        let metadata = metadata(&mut reader, entry_count)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = inventory(&mut reader, tensor_count)?;
        let data_start = reader.position().next_multiple_of(alignment);
        place(&mut tensors, data_start, alignment, file_bytes)?;
        Ok(Self { version, metadata, tensors, alignment, data_start })
    }

    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    pub fn string(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).and_then(Value::as_str)
    }

    /// Any integer type that holds a value in the range.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.metadata.get(key).and_then(Value::as_u64)
    }

    pub fn u32(&self, key: &str) -> Option<u32> {
        self.u64(key).and_then(|value| u32::try_from(value).ok())
    }

    pub fn f32(&self, key: &str) -> Option<f32> {
        self.metadata.get(key).and_then(Value::as_f32)
    }

    pub fn bool(&self, key: &str) -> Option<bool> {
        self.metadata.get(key).and_then(Value::as_bool)
    }

    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.metadata.get(key) {
            Some(Value::Array(Array::String(items))) => Some(items),
            _ => None,
        }
    }
}

fn preamble(reader: &mut Reader<'_>) -> Result<u32, HeaderError> {
    let magic = reader.array::<4>()?;
    if &magic != b"GGUF" {
        let shown: String = magic.iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(
            Refusal::malformed(format!("a GGUF file starts with 47475546 ('GGUF'), this one with {shown}")).into()
        );
    }
    match reader.u32()? {
        version @ (2 | 3) => Ok(version),
        1 => Err(Refusal::unsupported("GGUF version 1 is not supported, only 2 and 3").into()),
        version if matches!(version.swap_bytes(), 1..=3) => {
            Err(Refusal::unsupported("big-endian GGUF is not supported, only little-endian").into())
        }
        version => {
            Err(Refusal::malformed(format!("GGUF version {version} does not exist, only 2 and 3 are known")).into())
        }
    }
}

fn metadata(reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, Value>, HeaderError> {
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = reader.name("metadata key")?;
        let value = value::read(reader, &key)?;
        if let Some(key) = insert_new(&mut metadata, key, value) {
            return Err(Refusal::malformed(format!("metadata key '{key}' stands twice in the header")).into());
        }
    }
    Ok(metadata)
}

/// The key again if the map already holds it.
fn insert_new(map: &mut BTreeMap<String, Value>, key: String, value: Value) -> Option<String> {
    if map.contains_key(&key) {
        return Some(excerpt(&key, 200));
    }
    map.insert(key, value);
    None
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, Refusal> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(32) };
    match value.as_u64() {
        Some(bytes) if bytes.is_power_of_two() && (8..=1 << 20).contains(&bytes) => Ok(bytes),
        _ => {
            Err(Refusal::malformed(format!("general.alignment is {value}, expected a power of two from 8 to 1048576")))
        }
    }
}

/// Tensor infos with the offsets as stored: relative to the data section.
fn inventory(reader: &mut Reader<'_>, count: u64) -> Result<Vec<GgufTensor>, HeaderError> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let name = reader.name("tensor name")?;
        if !names.insert(name.clone()) {
            return Err(
                Refusal::malformed(format!("tensor '{}' stands twice in the header", excerpt(&name, 200))).into()
            );
        }
        tensors.push(tensor_info(reader, name)?);
    }
    Ok(tensors)
}

fn tensor_info(reader: &mut Reader<'_>, name: String) -> Result<GgufTensor, HeaderError> {
    let shown = excerpt(&name, 200);
    let dimensions = reader.u32()?;
    if !(1..=4).contains(&dimensions) {
        return Err(Refusal::malformed(format!("tensor '{shown}' has {dimensions} dimensions, expected 1 to 4")).into());
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(reader.u64()?);
    }
    shape.reverse();
    let number = reader.u32()?;
    let kind = GgmlType::from_number(number).ok_or_else(|| {
        Refusal::unsupported(format!(
            "tensor '{shown}' has the ggml type {number}, which is not one of those known here"
        ))
    })?;
    let offset = reader.u64()?;
    let row = shape.last().copied().unwrap_or(0);
    if row % kind.block_elements() != 0 {
        let block = kind.block_elements();
        return Err(Refusal::malformed(format!(
            "tensor '{shown}' has rows of {row} elements, which is no multiple of the {kind} block of {block}"
        ))
        .into());
    }
    let elements = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size)).filter(|count| *count > 0);
    let bytes = elements.and_then(|count| (count / kind.block_elements()).checked_mul(kind.block_bytes()));
    let Some(bytes) = bytes else {
        return Err(Refusal::malformed(format!("tensor '{shown}' has the impossible shape {shape:?}")).into());
    };
    Ok(GgufTensor { name, shape, kind, offset, bytes })
}

/// Turns offsets into file offsets and checks them: aligned, inside the file, apart from each other.
fn place(tensors: &mut [GgufTensor], data_start: u64, alignment: u64, file_bytes: u64) -> Result<(), Refusal> {
    for tensor in &mut *tensors {
        let GgufTensor { name, offset, bytes, .. } = &*tensor;
        let name = excerpt(name, 200);
        if offset % alignment != 0 {
            return Err(Refusal::malformed(format!(
                "tensor '{name}' starts at data offset {offset}, which is not aligned to {alignment}"
            )));
        }
        let start = data_start.checked_add(*offset);
        let end = start.and_then(|start| start.checked_add(*bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => tensor.offset = start,
            _ => {
                return Err(Refusal::malformed(format!(
                    "tensor '{name}' needs {bytes} bytes at data offset {offset} (data starts at {data_start}), the file has {file_bytes} bytes"
                )));
            }
        }
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if let [left, right] = pair
            && left.offset + left.bytes > right.offset
        {
            let (left, right) = (excerpt(&left.name, 200), excerpt(&right.name, 200));
            return Err(Refusal::malformed(format!("tensors '{left}' and '{right}' overlap")));
        }
    }
    Ok(())
}
