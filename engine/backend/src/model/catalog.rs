//! From named tensors of a file to the weights of a decoder: everything is checked here, by name.

use std::collections::{BTreeMap, BTreeSet};

use lorafleet_artifact::ModuleKind;

use super::map::MappedFile;
use super::shape::Shape;
use super::tensor::{MatrixView, RowOrder, StoredType};
use super::{ModelError, unsupported_type};

/// One tensor as a file announces it; its bytes lie in the file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub file: usize,
    pub offset: usize,
    pub bytes: usize,
    /// Or the name of a type that we do not read.
    pub stored: Result<StoredType, String>,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
}

/// All tensors of a model, and how this kind of file calls them.
pub(super) struct Catalog {
    pub files: Vec<MappedFile>,
    pub entries: BTreeMap<String, Entry>,
    pub names: Names,
}

/// The two naming schemes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    HuggingFace,
    Gguf,
}

impl Names {
    fn embedding(self) -> &'static str {
        match self {
            Self::HuggingFace => "model.embed_tokens.weight",
            Self::Gguf => "token_embd.weight",
        }
    }

    fn head(self) -> &'static str {
        match self {
            Self::HuggingFace => "lm_head.weight",
            Self::Gguf => "output.weight",
        }
    }

    fn final_norm(self) -> &'static str {
        match self {
            Self::HuggingFace => "model.norm.weight",
            Self::Gguf => "output_norm.weight",
        }
    }

    fn attention_norm(self, layer: usize) -> String {
        match self {
            Self::HuggingFace => format!("model.layers.{layer}.input_layernorm.weight"),
            Self::Gguf => format!("blk.{layer}.attn_norm.weight"),
        }
    }

    fn ffn_norm(self, layer: usize) -> String {
        match self {
            Self::HuggingFace => format!("model.layers.{layer}.post_attention_layernorm.weight"),
            Self::Gguf => format!("blk.{layer}.ffn_norm.weight"),
        }
    }

    fn projection(self, layer: usize, projection: ModuleKind) -> String {
        let (folder, gguf) = match projection {
            ModuleKind::Q => ("self_attn.q_proj", "attn_q"),
            ModuleKind::K => ("self_attn.k_proj", "attn_k"),
            ModuleKind::V => ("self_attn.v_proj", "attn_v"),
            ModuleKind::O => ("self_attn.o_proj", "attn_output"),
            ModuleKind::Gate => ("mlp.gate_proj", "ffn_gate"),
            ModuleKind::Up => ("mlp.up_proj", "ffn_up"),
            ModuleKind::Down => ("mlp.down_proj", "ffn_down"),
            ModuleKind::LmHead => return self.head().to_owned(),
        };
        match self {
            Self::HuggingFace => format!("model.layers.{layer}.{folder}.weight"),
            Self::Gguf => format!("blk.{layer}.{gguf}.weight"),
        }
    }

    fn order(self, projection: ModuleKind, head_dim: usize) -> RowOrder {
        match (self, projection) {
            (Self::Gguf, ModuleKind::Q | ModuleKind::K) => RowOrder::PairsTogether { head_dim },
            _ => RowOrder::Natural,
        }
    }

    /// Tensors that some files carry and nobody needs.
    fn may_stand_unused(self, name: &str) -> bool {
        match self {
            Self::HuggingFace => name.ends_with(".rotary_emb.inv_freq"),
            // Read with the shape.
            Self::Gguf => name == "rope_freqs.weight",
        }
    }
}

/// A checked matrix: the file holds exactly these bytes for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixRef {
    file: usize,
    offset: usize,
    bytes: usize,
    stored: StoredType,
    rows: usize,
    columns: usize,
    order: RowOrder,
}

/// All weights of the decoder: matrices where they lie, vectors read.
pub(super) struct Weights {
    pub files: Vec<MappedFile>,
    pub embedding: MatrixRef,
    /// `None` where the embedding is the head.
    pub head: Option<MatrixRef>,
    pub final_norm: Vec<f32>,
    pub layers: Vec<LayerWeights>,
}

pub(super) struct LayerWeights {
    pub attention_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    /// In the order of [`ModuleKind::LAYER`].
    pub projections: [MatrixRef; 7],
}

impl Weights {
    pub fn view(&self, matrix: MatrixRef) -> MatrixView<'_> {
        let bytes = self.files.get(matrix.file).map_or(&[][..], MappedFile::bytes);
        MatrixView {
            stored: matrix.stored,
            rows: matrix.rows,
            columns: matrix.columns,
            order: matrix.order,
            bytes: bytes.get(matrix.offset..matrix.offset + matrix.bytes).unwrap_or(&[]),
        }
    }

    pub fn forget(&self, matrix: MatrixRef) {
        if let Some(file) = self.files.get(matrix.file) {
            file.forget(matrix.offset, matrix.bytes);
        }
    }
}

impl Catalog {
    /// Every weight of the decoder, with its shape and type checked; no tensor may be left over.
    pub fn weights(self, shape: &Shape) -> Result<Weights, ModelError> {
        let mut used = BTreeSet::new();
        let names = self.names;
        let embedding =
            self.matrix(names.embedding().into(), (shape.vocabulary, shape.hidden), RowOrder::Natural, &mut used)?;
        let head = if shape.tied {
            // Some writers store the tied head too.
            used.insert(names.head().to_owned());
            None
        } else {
            Some(self.matrix(names.head().into(), (shape.vocabulary, shape.hidden), RowOrder::Natural, &mut used)?)
        };
        let final_norm = self.vector(names.final_norm().into(), shape.hidden, &mut used)?;
        let mut layers = Vec::with_capacity(shape.layers);
        for layer in 0..shape.layers {
            layers.push(self.layer(shape, layer, &mut used)?);
        }
        let left_over = self.entries.keys().find(|name| !used.contains(*name) && !names.may_stand_unused(name));
        if let Some(tensor) = left_over {
            return Err(ModelError::Unexpected { tensor: tensor.clone() });
        }
        Ok(Weights { files: self.files, embedding, head, final_norm, layers })
    }

    fn layer(&self, shape: &Shape, layer: usize, used: &mut BTreeSet<String>) -> Result<LayerWeights, ModelError> {
        let names = self.names;
        let mut one = |projection: ModuleKind| {
            let order = names.order(projection, shape.head_dim);
            self.matrix(names.projection(layer, projection), shape.width(projection), order, used)
        };
        let projections = [
            one(ModuleKind::Q)?,
            one(ModuleKind::K)?,
            one(ModuleKind::V)?,
            one(ModuleKind::O)?,
            one(ModuleKind::Gate)?,
            one(ModuleKind::Up)?,
            one(ModuleKind::Down)?,
        ];
        let attention_norm = self.vector(names.attention_norm(layer), shape.hidden, used)?;
        let ffn_norm = self.vector(names.ffn_norm(layer), shape.hidden, used)?;
        Ok(LayerWeights { attention_norm, ffn_norm, projections })
    }

    fn entry(&self, name: &str, shape: &[usize], used: &mut BTreeSet<String>) -> Result<&Entry, ModelError> {
        let entry = self.entries.get(name).ok_or_else(|| ModelError::Missing { tensor: name.to_owned() })?;
        used.insert(name.to_owned());
        let expected: Vec<u64> = shape.iter().map(|dimension| *dimension as u64).collect();
        if entry.shape != expected {
            return Err(ModelError::Shape { tensor: name.to_owned(), found: entry.shape.clone(), expected });
        }
        Ok(entry)
    }

    fn matrix(
        &self,
        name: String,
        (rows, columns): (usize, usize),
        order: RowOrder,
        used: &mut BTreeSet<String>,
    ) -> Result<MatrixRef, ModelError> {
        let entry = self.entry(&name, &[rows, columns], used)?;
        let stored = entry.stored.clone().map_err(|found| unsupported_type(&name, &found, &StoredType::ALL))?;
        let block = stored.block_values();
        if !columns.is_multiple_of(block) {
            let what =
                format!("tensor '{name}': {columns} columns are no whole number of {block} for {}", stored.name());
            return Err(ModelError::Malformed(what));
        }
        let bytes = self.sized(&name, entry, rows * stored.row_bytes(columns))?;
        Ok(MatrixRef { file: entry.file, offset: entry.offset, bytes, stored, rows, columns, order })
    }

    pub fn vector(&self, name: String, length: usize, used: &mut BTreeSet<String>) -> Result<Vec<f32>, ModelError> {
        const PLAIN: [StoredType; 3] = [StoredType::F32, StoredType::F16, StoredType::Bf16];
        let entry = self.entry(&name, &[length], used)?;
        let stored = entry.stored.clone().map_err(|found| unsupported_type(&name, &found, &PLAIN))?;
        let len = self.sized(&name, entry, stored.row_bytes(length / stored.block_values() * stored.block_values()))?;
        let file = self.files.get(entry.file).map_or(&[][..], MappedFile::bytes);
        let bytes = file.get(entry.offset..entry.offset + len).unwrap_or(&[]);
        match stored {
            StoredType::F32 => {
                Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            }
            StoredType::F16 => {
                Ok(bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
            }
            StoredType::Bf16 => {
                Ok(bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect())
            }
            StoredType::Q8_0 | StoredType::Q4_1 => Err(unsupported_type(&name, stored.name(), &PLAIN)),
        }
    }

    /// The tensor's bytes must be as many as its shape and type say, and lie in the file.
    fn sized(&self, name: &str, entry: &Entry, expected: usize) -> Result<usize, ModelError> {
        let file_bytes = self.files.get(entry.file).map_or(0, |file| file.bytes().len());
        let end = entry.offset.checked_add(entry.bytes);
        if entry.bytes != expected || end.is_none_or(|end| end > file_bytes) {
            let what = format!(
                "tensor '{name}' has {} bytes at {} of a file of {file_bytes}, its shape and type need {expected}",
                entry.bytes, entry.offset
            );
            return Err(ModelError::Malformed(what));
        }
        Ok(expected)
    }
}
