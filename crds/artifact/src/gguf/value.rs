//! Metadata values.

use std::fmt;

use super::HeaderError;
use super::read::Reader;
use crate::reason::{Refusal, excerpt};

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Typed, so that a vocabulary of 128,000 scores costs four bytes each.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// A double is rounded to single precision, in which models compute.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(value) => Some(value),
            Self::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Self::U8(items) => items.len(),
            Self::I8(items) => items.len(),
            Self::U16(items) => items.len(),
            Self::I16(items) => items.len(),
            Self::U32(items) => items.len(),
            Self::I32(items) => items.len(),
            Self::F32(items) => items.len(),
            Self::Bool(items) => items.len(),
            Self::String(items) => items.len(),
            Self::U64(items) => items.len(),
            Self::I64(items) => items.len(),
            Self::F64(items) => items.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Short: for messages.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(value) => value.fmt(f),
            Self::I8(value) => value.fmt(f),
            Self::U16(value) => value.fmt(f),
            Self::I16(value) => value.fmt(f),
            Self::U32(value) => value.fmt(f),
            Self::I32(value) => value.fmt(f),
            Self::F32(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::String(text) => write!(f, "'{}'", excerpt(text, 80)),
            Self::Array(array) => write!(f, "an array of {} elements", array.len()),
            Self::U64(value) => value.fmt(f),
            Self::I64(value) => value.fmt(f),
            Self::F64(value) => value.fmt(f),
        }
    }
}

pub(super) fn read(reader: &mut Reader<'_>, key: &str) -> Result<Value, HeaderError> {
    Ok(match reader.u32()? {
        0 => Value::U8(u8::from_le_bytes(reader.array()?)),
        1 => Value::I8(i8::from_le_bytes(reader.array()?)),
        2 => Value::U16(u16::from_le_bytes(reader.array()?)),
        3 => Value::I16(i16::from_le_bytes(reader.array()?)),
        4 => Value::U32(reader.u32()?),
        5 => Value::I32(i32::from_le_bytes(reader.array()?)),
        6 => Value::F32(f32::from_le_bytes(reader.array()?)),
        7 => Value::Bool(boolean(reader.array()?, key)?),
        8 => Value::String(reader.text("metadata string", reader.limits().string_bytes)?),
        9 => Value::Array(array(reader, key)?),
        10 => Value::U64(reader.u64()?),
        11 => Value::I64(i64::from_le_bytes(reader.array()?)),
        12 => Value::F64(f64::from_le_bytes(reader.array()?)),
        number => return Err(unknown(key, number)),
    })
}

fn array(reader: &mut Reader<'_>, key: &str) -> Result<Array, HeaderError> {
    let element = reader.u32()?;
    let count = reader.count("array elements", reader.limits().array_elements)?;
    Ok(match element {
        0 => Array::U8(reader.take(count)?.to_vec()),
        1 => Array::I8(fixed(reader, count, i8::from_le_bytes)?),
        2 => Array::U16(fixed(reader, count, u16::from_le_bytes)?),
        3 => Array::I16(fixed(reader, count, i16::from_le_bytes)?),
        4 => Array::U32(fixed(reader, count, u32::from_le_bytes)?),
        5 => Array::I32(fixed(reader, count, i32::from_le_bytes)?),
        6 => Array::F32(fixed(reader, count, f32::from_le_bytes)?),
        7 => Array::Bool(reader.take(count)?.iter().map(|byte| boolean([*byte], key)).collect::<Result<_, _>>()?),
        8 => {
            let mut items = Vec::new();
            for _ in 0..count {
                items.push(reader.text("metadata string", reader.limits().string_bytes)?);
            }
            Array::String(items)
        }
        9 => return Err(Refusal::unsupported(format!("metadata key '{key}' is an array of arrays")).into()),
        10 => Array::U64(fixed(reader, count, u64::from_le_bytes)?),
        11 => Array::I64(fixed(reader, count, i64::from_le_bytes)?),
        12 => Array::F64(fixed(reader, count, f64::from_le_bytes)?),
        number => return Err(unknown(key, number)),
    })
}

fn fixed<T, const N: usize>(
    reader: &mut Reader<'_>,
    count: u64,
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, HeaderError> {
    // The count is below the limit on elements, so the product stays far below 2^64.
    let bytes = reader.take(count * N as u64)?;
    let (items, _) = bytes.as_chunks::<N>();
    Ok(items.iter().map(|item| decode(*item)).collect())
}

fn boolean(byte: [u8; 1], key: &str) -> Result<bool, HeaderError> {
    match byte {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => {
            Err(Refusal::malformed(format!("metadata key '{key}' holds the boolean {other}, expected 0 or 1")).into())
        }
    }
}

fn unknown(key: &str, number: u32) -> HeaderError {
    Refusal::malformed(format!("metadata key '{}' has the value type {number}, expected 0 to 12", excerpt(key, 200)))
        .into()
}
