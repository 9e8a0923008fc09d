//! Base models: opened, checked and mapped. What a backend makes of the bytes is its own business.
//!
//! A model is a Hugging Face folder (`config.json`, one `model.safetensors` or several named by
//! `model.safetensors.index.json`) or one GGUF file, both of the Llama architecture.

mod catalog;
mod folder;
mod gguf;
mod identity;
mod map;
mod shape;
mod tensor;

use std::path::{Path, PathBuf};

use lorafleet_artifact::{Digest, ModuleKind};

pub use shape::{Rope, RopeScaling, Shape};
pub use tensor::{MatrixView, RowOrder, StoredType};

use catalog::{MatrixRef, Weights};
use identity::Identity;

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("{0}")]
    Malformed(String),
    #[error("{0}")]
    Unsupported(String),
    #[error("tensor '{tensor}' is missing")]
    Missing { tensor: String },
    #[error("tensor '{tensor}' is no part of a Llama decoder without biases")]
    Unexpected { tensor: String },
    #[error("tensor '{tensor}' has shape {found:?}, the configuration needs {expected:?}")]
    Shape { tensor: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor '{tensor}' is stored as {found}; supported here: {supported}")]
    Type { tensor: String, found: String, supported: String },
}

fn unsupported_type(tensor: &str, found: &str, supported: &[StoredType]) -> ModelError {
    let supported: Vec<&str> = supported.iter().map(|stored| stored.name()).collect();
    ModelError::Type { tensor: tensor.to_owned(), found: found.to_owned(), supported: supported.join(", ") }
}

/// A base model whose every tensor has been checked for presence, shape and type.
pub struct Model {
    shape: Shape,
    weights: Weights,
    identity: Identity,
}

/// Which matrix of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matrix {
    Embedding,
    /// The embedding where the two are tied.
    Head,
    Layer(usize, ModuleKind),
}

impl Model {
    /// Opens a folder or a GGUF file. Reads headers and norms; matrices stay in the file until a backend takes them.
    /// The digest is computed beside, on a thread of its own.
    ///
    /// # Errors
    /// What is missing, unreadable or not supported, by the name of the file, key or tensor.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let meta = std::fs::metadata(path).map_err(|source| ModelError::Io { path: path.to_owned(), cause: source })?;
        let (shape, catalog, files) = if meta.is_dir() { folder::read(path)? } else { gguf::read(path)? };
        shape.check().map_err(|what| ModelError::Unsupported(format!("{}: {what}", path.display())))?;
        let weights = catalog.weights(&shape)?;
        let identity = Identity::of(files)?;
        Ok(Self { shape, weights, identity })
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Identity of the model: the SHA-256 rule over its sorted config, tokenizer and weight files. Waits for the thread
    /// that reads them.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn digest(&self) -> Result<Digest, ModelError> {
        self.identity.digest()
    }

    /// A matrix where it lies in the file.
    pub fn matrix(&self, matrix: Matrix) -> Option<MatrixView<'_>> {
        self.reference(matrix).map(|reference| self.weights.view(reference))
    }

    /// Says that a matrix has been copied: the memory of the mapped file is given back.
    pub fn forget(&self, matrix: Matrix) {
        if let Some(reference) = self.reference(matrix) {
            self.weights.forget(reference);
        }
    }

    fn reference(&self, matrix: Matrix) -> Option<MatrixRef> {
        match matrix {
            Matrix::Embedding => Some(self.weights.embedding),
            Matrix::Head => Some(self.weights.head.unwrap_or(self.weights.embedding)),
            Matrix::Layer(layer, projection) => {
                self.weights.layers.get(layer)?.projections.get(projection as usize).copied()
            }
        }
    }

    /// Norm weights before the attention and before the feed-forward part of a layer.
    pub fn layer_norms(&self, layer: usize) -> Option<(&[f32], &[f32])> {
        self.weights.layers.get(layer).map(|layer| (&layer.attention_norm[..], &layer.ffn_norm[..]))
    }

    pub fn final_norm(&self) -> &[f32] {
        &self.weights.final_norm
    }
}
