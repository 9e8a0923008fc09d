//! The model's weights by their Hugging Face names, for comparing an adapter's copies with them.

use half::{bf16, f16};
use lorafleet_artifact::{FloatType, ModuleKind};

use lorafleet_backend::model::{Matrix, Model, StoredType};

use super::{BaseTensors, Exactness};

impl BaseTensors for Model {
    fn row(&self, name: &str, row: usize, out: &mut [f32]) -> Option<Exactness> {
        if let Some(norm) = norm(self, name) {
            (row == 0 && norm.len() == out.len()).then(|| out.copy_from_slice(norm))?;
            return Some(Exactness::Stored(FloatType::F32));
        }
        let module = name.strip_suffix(".weight")?;
        let matrix = match module {
            "model.embed_tokens" => Matrix::Embedding,
            _ => match self.shape().base().module(module)? {
                module if module.kind == ModuleKind::LmHead => Matrix::Head,
                module => Matrix::Layer(module.layer? as usize, module.kind),
            },
        };
        let view = self.matrix(matrix)?;
        (view.columns == out.len()).then_some(())?;
        dequantise(view.stored, view.row(row)?, out)
    }
}

fn norm<'a>(model: &'a Model, name: &str) -> Option<&'a [f32]> {
    if name == "model.norm.weight" {
        return Some(model.final_norm());
    }
    let (layer, norm) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (attention, ffn) = model.layer_norms(layer.parse().ok()?)?;
    match norm {
        "input_layernorm.weight" => Some(attention),
        "post_attention_layernorm.weight" => Some(ffn),
        _ => None,
    }
}

/// Formulas: [`StoredType`].
fn dequantise(stored: StoredType, row: &[u8], out: &mut [f32]) -> Option<Exactness> {
    let half_at = |bytes: &[u8]| <[u8; 2]>::try_from(bytes).ok().map(|bytes| f16::from_le_bytes(bytes).to_f32());
    let mut step_max = 0.0_f32;
    let blocks = row.chunks_exact(stored.block_bytes()).zip(out.chunks_exact_mut(stored.block_values()));
    for (block, values) in blocks {
        match stored {
            StoredType::F32 => *values.first_mut()? = f32::from_le_bytes(block.try_into().ok()?),
            StoredType::F16 => *values.first_mut()? = half_at(block)?,
            StoredType::Bf16 => *values.first_mut()? = bf16::from_le_bytes(block.try_into().ok()?).to_f32(),
            StoredType::Q8_0 => {
                let (scale, codes) = block.split_at_checked(2)?;
                let scale = half_at(scale)?;
                step_max = step_max.max(scale.abs());
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = scale * f32::from(code.cast_signed());
                }
            }
            StoredType::Q4_1 => {
                let (scale, rest) = block.split_at_checked(2)?;
                let (minimum, codes) = rest.split_at_checked(2)?;
                let (scale, minimum) = (half_at(scale)?, half_at(minimum)?);
                step_max = step_max.max(scale.abs());
                let (low, high) = values.split_at_mut_checked(16)?;
                for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                    *low = scale * f32::from(code & 15) + minimum;
                    *high = scale * f32::from(code >> 4) + minimum;
                }
            }
        }
    }
    Some(match stored {
        StoredType::F32 => Exactness::Stored(FloatType::F32),
        StoredType::F16 => Exactness::Stored(FloatType::F16),
        StoredType::Bf16 => Exactness::Stored(FloatType::Bf16),
        // Rounding to a step is off by half a step. The scale is rounded to f16 itself, which moves the largest of
        // 127 steps by another 127 / 2048 of one.
        StoredType::Q8_0 | StoredType::Q4_1 => Exactness::Within(step_max * 0.57),
    })
}
