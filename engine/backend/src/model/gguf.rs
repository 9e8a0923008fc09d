//! One GGUF file of the Llama architecture.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lorafleet_artifact::gguf::{GgmlType, Gguf, GgufLimits};

use super::ModelError;
use super::catalog::{Catalog, Entry, Names};
use super::map::MappedFile;
use super::shape::{Rope, RopeScaling, Shape};
use super::tensor::StoredType;

/// Shape, tensors, and the one file that makes the model's identity.
pub(super) fn read(path: &Path) -> Result<(Shape, Catalog, Vec<PathBuf>), ModelError> {
    let mapped = MappedFile::open(path).map_err(|source| ModelError::Io { path: path.to_owned(), cause: source })?;
    let bytes = mapped.bytes();
    let gguf = Gguf::parse(bytes, bytes.len() as u64, &GgufLimits::default())
        .map_err(|error| ModelError::Malformed(format!("{}: {error}", path.display())))?;
    let entries = gguf.tensors.iter().map(|tensor| {
        let entry = Entry {
            file: 0,
            // The parser has checked that the range lies in the file.
            offset: usize::try_from(tensor.offset).unwrap_or(usize::MAX),
            bytes: usize::try_from(tensor.bytes).unwrap_or(usize::MAX),
            stored: stored_type(tensor.kind),
            shape: tensor.shape.clone(),
        };
        (tensor.name.clone(), entry)
    });
    let entries: BTreeMap<String, Entry> = entries.collect();
    let catalog = Catalog { files: vec![mapped], entries, names: Names::Gguf };
    let shape = shape(&gguf, &catalog).map_err(|error| in_file(path, error))?;
    Ok((shape, catalog, vec![path.to_owned()]))
}

fn in_file(path: &Path, error: ModelError) -> ModelError {
    match error {
        ModelError::Unsupported(what) => ModelError::Unsupported(format!("{}: {what}", path.display())),
        ModelError::Malformed(what) => ModelError::Malformed(format!("{}: {what}", path.display())),
        other => other,
    }
}

fn stored_type(kind: GgmlType) -> Result<StoredType, String> {
    match kind {
        GgmlType::F32 => Ok(StoredType::F32),
        GgmlType::F16 => Ok(StoredType::F16),
        GgmlType::Bf16 => Ok(StoredType::Bf16),
        GgmlType::Q8_0 => Ok(StoredType::Q8_0),
        GgmlType::Q4_1 => Ok(StoredType::Q4_1),
        other => Err(other.as_str().to_owned()),
    }
}

fn shape(gguf: &Gguf, catalog: &Catalog) -> Result<Shape, ModelError> {
    let architecture = gguf.string("general.architecture").unwrap_or("not given");
    if architecture != "llama" {
        let what = format!("general.architecture is {architecture}, supported: llama");
        return Err(ModelError::Unsupported(what));
    }
    let number = |key: &str| gguf.u64(key).and_then(|value| usize::try_from(value).ok());
    let need = |key: &str| number(key).ok_or_else(|| ModelError::Malformed(format!("'{key}' is missing or no count")));
    let embedding = catalog
        .entries
        .get("token_embd.weight")
        .ok_or_else(|| ModelError::Missing { tensor: "token_embd.weight".into() })?;
    let vocabulary = embedding.shape.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(0);
    let hidden = need("llama.embedding_length")?;
    let heads = need("llama.attention.head_count")?;
    let head_dim = number("llama.attention.key_length").unwrap_or(hidden.checked_div(heads).unwrap_or(0));
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if number(key).is_some_and(|found| found != head_dim) {
            let found = number(key).unwrap_or(0);
            return Err(ModelError::Unsupported(format!("'{key}' is {found}, supported: the head size {head_dim}")));
        }
    }
    if number("llama.expert_count").is_some_and(|experts| experts > 0) {
        return Err(ModelError::Unsupported(
            "'llama.expert_count' is not 0: mixtures of experts are not supported".into(),
        ));
    }
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    Ok(Shape {
        vocabulary,
        hidden,
        layers: need("llama.block_count")?,
        heads,
        kv_heads: number("llama.attention.head_count_kv").unwrap_or(heads),
        head_dim,
        ffn: need("llama.feed_forward_length")?,
        context: need("llama.context_length")?,
        norm_epsilon: gguf
            .f32(epsilon)
            .ok_or_else(|| ModelError::Malformed(format!("'{epsilon}' is missing or no float")))?,
        rope: rope(gguf, catalog, head_dim)?,
        tied: !catalog.entries.contains_key("output.weight"),
    })
}

fn rope(gguf: &Gguf, catalog: &Catalog, head_dim: usize) -> Result<Rope, ModelError> {
    let theta = gguf.f32("llama.rope.freq_base").unwrap_or(10_000.0);
    let kind = gguf.string("llama.rope.scaling.type").unwrap_or("none");
    let scaling = match kind {
        "none" if catalog.entries.contains_key("rope_freqs.weight") => {
            let divisors = catalog.vector("rope_freqs.weight".into(), head_dim / 2, &mut BTreeSet::new())?;
            RopeScaling::Divisors(divisors)
        }
        "none" => RopeScaling::None,
        "linear" => {
            let key = "llama.rope.scaling.factor";
            let factor =
                gguf.f32(key).ok_or_else(|| ModelError::Malformed(format!("'{key}' is missing or no float")))?;
            RopeScaling::Linear { factor }
        }
        other => {
            let what = format!("'llama.rope.scaling.type' is {other}, supported: none, linear");
            return Err(ModelError::Unsupported(what));
        }
    };
    Ok(Rope { theta, scaling })
}
