//! A Hugging Face folder: `config.json` and safetensors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ModelError;
use super::catalog::{Catalog, Entry, Names};
use super::map::MappedFile;
use super::shape::{Rope, RopeScaling, Shape};
use super::tensor::StoredType;

/// A config or an index is text of some kilobytes to a few megabytes.
const JSON_BYTES_MAX: u64 = 64 << 20;
const HEADER_BYTES_MAX: usize = 128 << 20;

#[derive(Deserialize)]
struct Config {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    #[serde(default = "default_epsilon")]
    rms_norm_eps: f32,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    quantization_config: Option<serde_json::Value>,
    /// transformers 5 has one object, older files a number and an optional object.
    rope_parameters: Option<RopeConfig>,
    rope_theta: Option<f32>,
    rope_scaling: Option<RopeConfig>,
}

#[derive(Deserialize)]
struct RopeConfig {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    partial_rotary_factor: Option<f32>,
}

fn default_context() -> usize {
    2048
}

fn default_epsilon() -> f32 {
    1e-6
}

fn default_activation() -> String {
    "silu".into()
}

/// Shape, tensors, and the files that make the model's identity.
pub(super) fn read(folder: &Path) -> Result<(Shape, Catalog, Vec<PathBuf>), ModelError> {
    let config_path = folder.join("config.json");
    let config: Config = json(&config_path)?;
    let shape = shape(&config).map_err(|what| ModelError::Unsupported(format!("{}: {what}", config_path.display())))?;
    let weights = weight_files(folder)?;
    let mut catalog = Catalog { files: Vec::new(), entries: BTreeMap::new(), names: Names::HuggingFace };
    for path in &weights {
        add_file(&mut catalog, path)?;
    }
    Ok((shape, catalog, identity_files(folder)?))
}

/// The files of the folder that the digest rule takes.
fn identity_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io(folder))? {
        names.extend(entry.map_err(io(folder))?.file_name().into_string());
    }
    let (_, files) = lorafleet_artifact::base_files(names.iter().map(String::as_str))
        .map_err(|refusal| ModelError::Malformed(format!("{}: {refusal}", folder.display())))?;
    Ok(files.iter().map(|name| folder.join(name)).collect())
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> ModelError {
    move |source| ModelError::Io { path: path.to_owned(), cause: source }
}

fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let bytes = std::fs::metadata(path).map_err(io(path))?.len();
    if bytes > JSON_BYTES_MAX {
        let what = format!("{} has {bytes} bytes, the limit is {JSON_BYTES_MAX}", path.display());
        return Err(ModelError::Malformed(what));
    }
    let text = std::fs::read(path).map_err(io(path))?;
    serde_json::from_slice(&text).map_err(|error| ModelError::Malformed(format!("{}: {error}", path.display())))
}

fn shape(config: &Config) -> Result<Shape, String> {
    let wrong = |what: &str, found: &str, supported: &str| Err(format!("{what} is {found}, supported: {supported}"));
    if config.model_type != "llama" {
        return wrong("model_type", &config.model_type, "llama");
    }
    if config.hidden_act != "silu" {
        return wrong("hidden_act", &config.hidden_act, "silu");
    }
    if config.attention_bias || config.mlp_bias {
        return wrong("attention_bias or mlp_bias", "true", "false");
    }
    if config.quantization_config.is_some() {
        return wrong("quantization_config", "given", "none (quantised weights are read from GGUF)");
    }
    if config.num_attention_heads == 0 {
        return wrong("num_attention_heads", "0", "at least 1");
    }
    Ok(Shape {
        vocabulary: config.vocab_size,
        hidden: config.hidden_size,
        layers: config.num_hidden_layers,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
        head_dim: config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads),
        ffn: config.intermediate_size,
        context: config.max_position_embeddings,
        norm_epsilon: config.rms_norm_eps,
        rope: rope(config)?,
        tied: config.tie_word_embeddings,
    })
}

fn rope(config: &Config) -> Result<Rope, String> {
    let object = config.rope_parameters.as_ref().or(config.rope_scaling.as_ref());
    let theta = object.and_then(|object| object.rope_theta).or(config.rope_theta).unwrap_or(10_000.0);
    let Some(object) = object else { return Ok(Rope { theta, scaling: RopeScaling::None }) };
    if object.partial_rotary_factor.is_some_and(|part| part != 1.0) {
        return Err("partial_rotary_factor is not 1: a rotation of part of the head is not supported".into());
    }
    let kind = object.rope_type.as_deref().unwrap_or("default");
    let need = |name: &str, value: Option<f32>| value.ok_or_else(|| format!("rope type {kind} needs {name}"));
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: need("factor", object.factor)? },
        "llama3" => RopeScaling::Llama3 {
            factor: need("factor", object.factor)?,
            low: need("low_freq_factor", object.low_freq_factor)?,
            high: need("high_freq_factor", object.high_freq_factor)?,
            original_context: need("original_max_position_embeddings", object.original_max_position_embeddings)?,
        },
        other => return Err(format!("rope type is {other}, supported: default, linear, llama3")),
    };
    Ok(Rope { theta, scaling })
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The folder's weight files in byte order of their names.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let single = folder.join("model.safetensors");
    let index_path = folder.join("model.safetensors.index.json");
    if !index_path.is_file() {
        return Ok(vec![single]);
    }
    let index: Index = json(&index_path)?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let plain = |name: &str| !name.contains(['/', '\\', '\0']) && name.ends_with(".safetensors");
    if let Some(name) = names.iter().find(|name| !plain(name)) {
        let what = format!("{}: '{name}' is no safetensors file of the folder", index_path.display());
        return Err(ModelError::Malformed(what));
    }
    if names.is_empty() {
        return Err(ModelError::Malformed(format!("{}: names no file", index_path.display())));
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

#[derive(Deserialize)]
struct Header {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [usize; 2],
}

/// Format: <https://huggingface.co/docs/safetensors>: eight bytes of length, a JSON header, the data.
fn add_file(catalog: &mut Catalog, path: &Path) -> Result<(), ModelError> {
    let mapped = MappedFile::open(path).map_err(io(path))?;
    let malformed = |what: String| ModelError::Malformed(format!("{}: {what}", path.display()));
    let bytes = mapped.bytes();
    let length = bytes.first_chunk::<8>().map(|length| u64::from_le_bytes(*length));
    let length = length.ok_or_else(|| malformed("is shorter than a safetensors header".into()))?;
    let start = usize::try_from(length).ok().filter(|length| *length <= HEADER_BYTES_MAX).map(|length| length + 8);
    let header = start.and_then(|start| bytes.get(8..start));
    let (Some(start), Some(header)) = (start, header) else {
        return Err(malformed(format!("claims a header of {length} bytes, the file has {}", bytes.len())));
    };
    let tensors: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|error| malformed(error.to_string()))?;
    for (name, value) in tensors {
        if name == "__metadata__" {
            continue;
        }
        let header: Header = serde_json::from_value(value).map_err(|error| malformed(format!("'{name}': {error}")))?;
        let [begin, end] = header.data_offsets;
        let range = begin
            .checked_add(start)
            .zip(end.checked_sub(begin))
            .filter(|(offset, length)| offset.checked_add(*length).is_some_and(|end| end <= bytes.len()));
        let Some((offset, length)) = range else {
            let what = format!("'{name}' lies at {begin}..{end}, the file has {} bytes of data", bytes.len() - start);
            return Err(malformed(what));
        };
        let stored = match header.dtype.as_str() {
            "F32" => Ok(StoredType::F32),
            "F16" => Ok(StoredType::F16),
            "BF16" => Ok(StoredType::Bf16),
            other => Err(other.to_owned()),
        };
        let entry = Entry { file: catalog.files.len(), offset, bytes: length, stored, shape: header.shape };
        if catalog.entries.insert(name.clone(), entry).is_some() {
            return Err(malformed(format!("tensor '{name}' stands in two files")));
        }
    }
    catalog.files.push(mapped);
    Ok(())
}
