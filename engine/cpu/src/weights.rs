//! The base, packed once into panels.

use std::sync::atomic::{AtomicBool, Ordering};

use lorafleet_artifact::ModuleKind;
use lorafleet_backend::model::{Matrix, Model};

use super::kernels::simd::LANES;
use super::memory::{Memory, Shared};
use super::panel::{Packing, pack_panel, panel_bytes, unpack_row};
use super::pool::Pool;

/// A matrix in panels of sixteen outputs.
#[derive(Clone, Copy, Debug)]
pub struct PackedMatrix {
    pub packing: Packing,
    pub outputs: usize,
    pub columns: usize,
    pub panel_bytes: usize,
    pub panels: usize,
    offset: usize,
}

pub struct LayerWeights {
    pub attention_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    projections: [PackedMatrix; 7],
}

impl LayerWeights {
    pub fn projection(&self, projection: ModuleKind) -> PackedMatrix {
        self.projections[projection as usize]
    }
}

pub struct PackedWeights {
    memory: Memory,
    pub embedding: PackedMatrix,
    pub head: PackedMatrix,
    pub layers: Vec<LayerWeights>,
    pub final_norm: Vec<f32>,
}

impl PackedWeights {
    /// Copies every matrix of the model into panels and gives the mapped file's memory back as it goes.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub fn pack(model: &Model, pool: &mut Pool) -> Result<Self, String> {
        let shape = model.shape();
        let mut bytes = 0;
        let mut matrices = Vec::new();
        let mut reserve = |matrix: Matrix| {
            let view = model.matrix(matrix).ok_or_else(|| format!("the model has no {matrix:?}"))?;
            let panel_bytes = panel_bytes(view.stored, view.columns);
            let packed = PackedMatrix {
                packing: view.stored,
                outputs: view.rows,
                columns: view.columns,
                panel_bytes,
                panels: view.rows.div_ceil(LANES),
                offset: bytes,
            };
            bytes += (packed.panels * panel_bytes).next_multiple_of(64);
            matrices.push((matrix, packed));
            Ok::<_, String>(packed)
        };
        let embedding = reserve(Matrix::Embedding)?;
        let head = if shape.tied { embedding } else { reserve(Matrix::Head)? };
        let mut layers = Vec::with_capacity(shape.layers);
        for layer in 0..shape.layers {
            let mut projections = [embedding; 7];
            for projection in ModuleKind::LAYER {
                projections[projection as usize] = reserve(Matrix::Layer(layer, projection))?;
            }
            let (attention_norm, ffn_norm) = model.layer_norms(layer).ok_or_else(|| format!("no layer {layer}"))?;
            let (attention_norm, ffn_norm) = (attention_norm.to_vec(), ffn_norm.to_vec());
            layers.push(LayerWeights { attention_norm, ffn_norm, projections });
        }
        let mut memory = Memory::zeroed(bytes).map_err(|error| format!("{bytes} bytes for the weights: {error}"))?;
        for (matrix, packed) in matrices {
            pack_matrix(model, matrix, packed, &mut memory, pool)?;
            model.forget(matrix);
        }
        Ok(Self { memory, embedding, head, layers, final_norm: model.final_norm().to_vec() })
    }

    /// First panel of a matrix.
    pub fn panels(&self, matrix: PackedMatrix) -> *const u8 {
        self.memory.bytes()[matrix.offset..].as_ptr()
    }

    /// The weights of one output: for the embedding, a token's vector.
    pub fn row(&self, matrix: PackedMatrix, output: usize, out: &mut [f32]) {
        let at = matrix.offset + output / LANES * matrix.panel_bytes;
        unpack_row(matrix.packing, &self.memory.bytes()[at..at + matrix.panel_bytes], output % LANES, out);
    }

    pub fn bytes(&self) -> usize {
        self.memory.bytes().len()
    }
}

fn pack_matrix(
    model: &Model,
    matrix: Matrix,
    packed: PackedMatrix,
    memory: &mut Memory,
    pool: &mut Pool,
) -> Result<(), String> {
    let view = model.matrix(matrix).ok_or_else(|| format!("the model has no {matrix:?}"))?;
    let to = Shared::of(&mut memory.bytes_mut()[packed.offset..packed.offset + packed.panels * packed.panel_bytes]);
    let short = AtomicBool::new(false);
    pool.run(packed.panels, 4, &|panel, _| {
        // SAFETY: each item has its own panel of the range that was cut out above.
        let to =
            unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * packed.panel_bytes), packed.panel_bytes) };
        if view.row((panel * LANES).min(view.rows.saturating_sub(1))).is_none() {
            short.store(true, Ordering::Relaxed);
            return;
        }
        pack_panel(&view, panel, to);
    });
    if short.load(Ordering::Relaxed) { Err(format!("{matrix:?} is shorter than its shape says")) } else { Ok(()) }
}
