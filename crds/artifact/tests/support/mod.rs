//! The conformance cases, and a writer of safetensors files that can write wrong ones.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::path::PathBuf;

use lorafleet_artifact::{BaseShape, Claims, HuggingFaceConfig, Policy, Refusal, Verification, Verified, check_folder};

pub fn cases() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases")
}

pub fn base(name: &str) -> BaseShape {
    let config = std::fs::read(cases().join(name).join("config.json")).unwrap();
    BaseShape::from_config(&HuggingFaceConfig::parse(&config).unwrap()).unwrap()
}

/// The files of an adapter in memory.
#[derive(Clone)]
pub struct Files {
    pub config: serde_json::Value,
    pub weights: Vec<u8>,
}

impl Files {
    pub fn of_case(name: &str) -> Self {
        let folder = cases().join(name);
        Self {
            config: serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap(),
            weights: std::fs::read(folder.join("adapter_model.safetensors")).unwrap(),
        }
    }

    pub fn verify(&self, base: &BaseShape, policy: &Policy) -> Result<Verified, Refusal> {
        verify(&serde_json::to_vec(&self.config).unwrap(), &self.weights, Claims::default(), base, policy, 1000)
    }
}

/// No limits, and nothing that must be declared.
pub fn open_policy() -> Policy {
    Policy { require_base_digest: false, ..Policy::default() }
}

pub fn verify(
    config: &[u8],
    weights: &[u8],
    claims: Claims,
    base: &BaseShape,
    policy: &Policy,
    piece_bytes: usize,
) -> Result<Verified, Refusal> {
    let mut verification = Verification::begin(config, weights.len() as u64, claims, base, policy)?;
    for piece in weights.chunks(piece_bytes) {
        verification.push(piece)?;
    }
    verification.finish()
}

/// Verifies the folder of a case as a reader of stores does.
pub fn verify_case(name: &str, base: &BaseShape, policy: &Policy) -> Result<Verified, Refusal> {
    let folder = cases().join(name);
    let names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "case.json")
        .collect();
    check_folder(names.iter().map(String::as_str))?;
    let config = std::fs::read(folder.join("adapter_config.json")).unwrap();
    let weights = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    verify(&config, &weights, Claims::default(), base, policy, 4093)
}

/// A tensor to write: name, element type, shape, bytes.
pub type Tensor = (String, &'static str, Vec<u64>, Vec<u8>);

/// Tensors of a well-formed F32 file.
pub fn tensors_of(weights: &[u8]) -> Vec<Tensor> {
    let header = lorafleet_artifact::Safetensors::parse(weights, weights.len() as u64, &Default::default()).unwrap();
    let data = &weights[header.data_start as usize..];
    let tensor = |tensor: &lorafleet_artifact::safetensors::StoredTensor| {
        let range = tensor.range.start as usize..tensor.range.end as usize;
        (tensor.name.clone(), tensor.dtype.as_str(), tensor.shape.clone(), data[range].to_vec())
    };
    header.tensors.iter().map(tensor).collect()
}

pub fn write(tensors: &[Tensor]) -> Vec<u8> {
    write_with(tensors, serde_json::json!({"format": "pt"}))
}

pub fn write_with(tensors: &[Tensor], metadata: serde_json::Value) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), metadata);
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    with_header(&serde_json::to_vec(&header).unwrap(), &data)
}

pub fn with_header(json: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json);
    out.extend(data);
    out
}

pub fn floats(count: usize, value: f32) -> Vec<u8> {
    std::iter::repeat_n(value.to_le_bytes(), count).flatten().collect()
}
