//! The header of a safetensors file.
//!
//! Format: eight bytes of header length (little-endian), a JSON object, then the data section, which the tensors fill
//! without gaps. <https://github.com/huggingface/safetensors>

use std::fmt;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::gguf::HeaderError;
use crate::json::Pairs;
use crate::reason::{Reason, Refusal, excerpt};

/// Key of the file's metadata that holds the digest of the base an adapter was made for.
pub const BASE_DIGEST_KEY: &str = "lorafleet.base_digest";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafetensorsLimits {
    /// Of the JSON header.
    pub header_bytes: u64,
    pub tensors: usize,
    pub name_bytes: usize,
    pub dimensions: usize,
}

impl Default for SafetensorsLimits {
    fn default() -> Self {
        Self { header_bytes: 32 << 20, tensors: 200_000, name_bytes: 1024, dimensions: 8 }
    }
}

impl SafetensorsLimits {
    /// For adapters, which have two tensors per module: far more than the largest model needs, and little enough that
    /// a hostile header costs megabytes of memory at most.
    pub fn adapter() -> Self {
        Self { header_bytes: 4 << 20, tensors: 32_768, ..Self::default() }
    }
}

/// A parsed header: names are unique, and the byte ranges fill the data section without gap or overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Safetensors {
    /// The `__metadata__` object.
    pub metadata: Vec<(String, String)>,
    /// In the order of their data.
    pub tensors: Vec<StoredTensor>,
    /// Offset in the file of the data section.
    pub data_start: u64,
    pub data_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    pub name: String,
    pub dtype: Dtype,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
    /// In the data section.
    pub range: Range<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Dtype {
    F64,
    F32,
    F16,
    #[serde(rename = "BF16")]
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    #[serde(rename = "BOOL")]
    Bool,
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    #[serde(rename = "F8_E5M2")]
    F8E5m2,
}

impl Dtype {
    const ALL: [(Self, &'static str, u64); 15] = [
        (Self::F64, "F64", 8),
        (Self::F32, "F32", 4),
        (Self::F16, "F16", 2),
        (Self::Bf16, "BF16", 2),
        (Self::I64, "I64", 8),
        (Self::I32, "I32", 4),
        (Self::I16, "I16", 2),
        (Self::I8, "I8", 1),
        (Self::U64, "U64", 8),
        (Self::U32, "U32", 4),
        (Self::U16, "U16", 2),
        (Self::U8, "U8", 1),
        (Self::Bool, "BOOL", 1),
        (Self::F8E4m3, "F8_E4M3", 1),
        (Self::F8E5m2, "F8_E5M2", 1),
    ];

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name, _)| *name == text).map(|(dtype, ..)| *dtype)
    }

    pub fn bytes(self) -> u64 {
        Self::ALL.iter().find(|(dtype, ..)| *dtype == self).map_or(1, |(.., bytes)| *bytes)
    }

    pub fn as_str(self) -> &'static str {
        Self::ALL.iter().find(|(dtype, ..)| *dtype == self).map_or("", |(_, name, _)| name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The fields of one tensor, or of `__metadata__`.
type Fields = Pairs<serde_json::Value>;

impl Safetensors {
    /// Reads the header from the first bytes of a file that is `file_bytes` long. `bytes` may be the whole file.
    ///
    /// # Errors
    /// `Incomplete` if a longer prefix is needed; `Refused` (Malformed, TooLarge, UnsupportedFeature) otherwise.
    pub fn parse(bytes: &[u8], file_bytes: u64, limits: &SafetensorsLimits) -> Result<Self, HeaderError> {
        let header_bytes = header_length(bytes, file_bytes, limits)?;
        let data_start = 8 + header_bytes;
        let json = usize::try_from(data_start).ok().and_then(|end| bytes.get(8..end));
        let json = json.ok_or(HeaderError::Incomplete { bytes: data_start })?;
        if json.first() != Some(&b'{') {
            return Err(Refusal::malformed("the safetensors header does not start with '{'").into());
        }
        let Pairs(pairs) = serde_json::from_slice::<Pairs<Fields>>(json)
            .map_err(|error| Refusal::malformed(format!("the safetensors header is not valid JSON: {error}")))?;
        let mut metadata = Vec::new();
        let mut tensors = Vec::new();
        for (name, value) in pairs {
            if name == "__metadata__" {
                metadata = metadata_of(value)?;
            } else {
                tensors.push(tensor_of(name, value, limits)?);
            }
        }
        if tensors.len() > limits.tensors {
            let (count, limit) = (tensors.len(), limits.tensors);
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("the safetensors header names {count} tensors, the limit is {limit}"),
            )
            .into());
        }
        let data_bytes = file_bytes - data_start;
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        check_layout(&tensors, data_bytes)?;
        Ok(Self { metadata, tensors, data_start, data_bytes })
    }

    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

impl Safetensors {
    /// The same header with one metadata entry set: the first bytes of a file whose data section stays as it is.
    ///
    /// # Errors
    /// Malformed if a name cannot be written as JSON, which does not happen for parsed headers.
    pub fn head_with_metadata(&self, key: &str, value: &str) -> Result<Vec<u8>, Refusal> {
        let mut metadata: Vec<(&str, &str)> = self
            .metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .filter(|(name, _)| *name != key)
            .collect();
        metadata.push((key, value));
        let text = |text: &str| {
            serde_json::to_string(text)
                .map_err(|error| Refusal::malformed(format!("a name cannot be written: {error}")))
        };
        let mut entries = Vec::new();
        for (key, value) in metadata {
            entries.push(format!("{}:{}", text(key)?, text(value)?));
        }
        let mut json = format!("{{\"__metadata__\":{{{}}}", entries.join(","));
        for StoredTensor { name, dtype, shape, range } in &self.tensors {
            let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
            let (name, shape) = (text(name)?, shape.join(","));
            let (start, end) = (range.start, range.end);
            json.push_str(&format!(
                ",{name}:{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{start},{end}]}}"
            ));
        }
        json.push('}');
        // Readers that map the file want the data aligned; the format pads with spaces.
        let padded = json.len().next_multiple_of(8);
        let mut out = (padded as u64).to_le_bytes().to_vec();
        out.extend_from_slice(json.as_bytes());
        out.resize(8 + padded, b' ');
        Ok(out)
    }
}

fn header_length(bytes: &[u8], file_bytes: u64, limits: &SafetensorsLimits) -> Result<u64, HeaderError> {
    if file_bytes < 8 {
        return Err(
            Refusal::malformed(format!("a safetensors file has at least 8 bytes, this one has {file_bytes}")).into()
        );
    }
    let length = bytes.first_chunk::<8>().ok_or(HeaderError::Incomplete { bytes: 8 })?;
    let length = u64::from_le_bytes(*length);
    // A length that the file itself refutes is a broken file; one that is merely large is a matter of limits.
    if length > file_bytes - 8 {
        return Err(Refusal::malformed(format!(
            "the safetensors header claims {length} bytes, the file has {} after the length",
            file_bytes - 8
        ))
        .into());
    }
    if length > limits.header_bytes {
        let limit = limits.header_bytes;
        return Err(Refusal::new(
            Reason::TooLarge,
            format!("the safetensors header has {length} bytes, the limit is {limit}"),
        )
        .into());
    }
    Ok(length)
}

fn metadata_of(Pairs(fields): Fields) -> Result<Vec<(String, String)>, Refusal> {
    fields
        .into_iter()
        .map(|(key, value)| match value {
            serde_json::Value::String(text) => Ok((key, text)),
            other => {
                let key = excerpt(&key, 200);
                let other = excerpt(&other.to_string(), 80);
                Err(Refusal::malformed(format!("__metadata__ key '{key}' is {other}, expected a string")))
            }
        })
        .collect()
}

fn tensor_of(name: String, fields: Fields, limits: &SafetensorsLimits) -> Result<StoredTensor, Refusal> {
    let shown = excerpt(&name, 200);
    if name.len() > limits.name_bytes {
        let (length, limit) = (name.len(), limits.name_bytes);
        return Err(Refusal::malformed(format!("the tensor name '{shown}' has {length} bytes, the limit is {limit}")));
    }
    let dtype: String = field(&fields, &shown, "dtype")?;
    let shape: Vec<u64> = field(&fields, &shown, "shape")?;
    let (start, end): (u64, u64) = field(&fields, &shown, "data_offsets")?;
    let dtype = Dtype::parse(&dtype).ok_or_else(|| {
        let dtype = excerpt(&dtype, 40);
        Refusal::unsupported(format!("tensor '{shown}' has the element type '{dtype}', which is not known here"))
    })?;
    if shape.len() > limits.dimensions {
        let (count, limit) = (shape.len(), limits.dimensions);
        return Err(Refusal::malformed(format!("tensor '{shown}' has {count} dimensions, the limit is {limit}")));
    }
    let elements = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
    let bytes = elements.and_then(|count| count.checked_mul(dtype.bytes()));
    if bytes.is_none() || end.checked_sub(start) != bytes {
        let needs = bytes.map_or_else(|| "more than 2^64".to_owned(), |bytes| bytes.to_string());
        return Err(Refusal::malformed(format!(
            "tensor '{shown}' of shape {shape:?} in {dtype} needs {needs} bytes, its data offsets are [{start}, {end}]"
        )));
    }
    Ok(StoredTensor { name, dtype, shape, range: start..end })
}

fn field<T: DeserializeOwned>(Pairs(fields): &Fields, tensor: &str, key: &str) -> Result<T, Refusal> {
    let value = fields.iter().find(|(name, _)| name == key).map(|(_, value)| value);
    let value = value
        .ok_or_else(|| Refusal::malformed(format!("tensor '{tensor}' of the safetensors header has no '{key}'")))?;
    T::deserialize(value).map_err(|error| {
        let value = excerpt(&value.to_string(), 80);
        Refusal::malformed(format!("tensor '{tensor}' of the safetensors header has {key} = {value}: {error}"))
    })
}

/// Tensors, sorted by their start, fill `0..data_bytes` exactly.
fn check_layout(tensors: &[StoredTensor], data_bytes: u64) -> Result<(), Refusal> {
    let mut filled = 0;
    for tensor in tensors {
        let Range { start, end } = tensor.range;
        let name = excerpt(&tensor.name, 200);
        if start < filled {
            return Err(Refusal::malformed(format!(
                "tensor '{name}' starts at {start} of the data section, which is taken up to {filled}: tensors overlap"
            )));
        }
        if start > filled {
            return Err(Refusal::malformed(format!(
                "tensor '{name}' starts at {start} of the data section, expected {filled}: bytes between belong to no tensor"
            )));
        }
        if end > data_bytes {
            return Err(Refusal::malformed(format!(
                "tensor '{name}' ends at {end} of the data section, which has {data_bytes} bytes: the file ends early"
            )));
        }
        filled = end;
    }
    if filled != data_bytes {
        return Err(Refusal::malformed(format!(
            "the tensors end at {filled} of the data section, which has {data_bytes} bytes"
        )));
    }
    Ok(())
}
