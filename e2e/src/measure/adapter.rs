//! Adapters of random numbers with the shapes of the demo's base, one different from the other.
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::shell::Shell;

/// SmolLM2-135M: layers, and inputs and outputs of the projections that adapters change.
const LAYERS: u32 = 30;
const PROJECTIONS: [(&str, u64, u64); 3] = [("q_proj", 576, 576), ("v_proj", 576, 192), ("o_proj", 576, 576)];
/// f16.
const NUMBER_BYTES: u64 = 2;

/// How large an adapter is.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub rank: u64,
    /// The first so many of [`PROJECTIONS`].
    pub projections: usize,
}

impl Shape {
    /// Of 2.2 MB.
    pub const USUAL: Self = Self { rank: 12, projections: 3 };

    fn projections(self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        PROJECTIONS.into_iter().take(self.projections)
    }
}

/// Writes an adapter for the base with this digest into `folder`; its own digest.
///
/// # Errors
/// When a file cannot be written.
pub fn write(folder: &Path, base_digest: &str, shape: Shape, seed: u64) -> Result<String> {
    files(folder, base_digest, shape, seed)?;
    digest(folder)
}

/// The same without the digest, which two more programs compute.
///
/// # Errors
/// As [`write`].
pub fn files(folder: &Path, base_digest: &str, shape: Shape, seed: u64) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let targets: Vec<&str> = shape.projections().map(|(name, ..)| name).collect();
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": shape.rank, "lora_alpha": shape.rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
        "target_modules": targets,
    });
    put(&folder.join("adapter_config.json"), &serde_json::to_vec_pretty(&config)?)?;
    put(&folder.join("adapter_model.safetensors"), &weights(base_digest, shape, seed)?)
}

/// As everyone can compute it: SHA-256 of what sha256sum prints for the two files.
fn digest(folder: &Path) -> Result<String> {
    let listed =
        Shell::new("sha256sum").args(["adapter_config.json", "adapter_model.safetensors"]).folder(folder).output()?;
    let printed = Shell::new("sha256sum").input(listed).output()?;
    Ok(format!("sha256:{}", printed.split(' ').next().unwrap_or_default()))
}

/// A safetensors file: length of the header, header, numbers.
fn weights(base_digest: &str, size: Shape, seed: u64) -> Result<Vec<u8>> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt", "lorafleet.base_digest": base_digest}));
    let mut end = 0;
    let mut add = |name: String, shape: [u64; 2]| {
        let begin = end;
        end += shape[0] * shape[1] * NUMBER_BYTES;
        header.insert(name, json!({"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}));
    };
    for layer in 0..LAYERS {
        for (name, inputs, outputs) in size.projections() {
            let module = format!("base_model.model.model.layers.{layer}.self_attn.{name}");
            add(format!("{module}.lora_A.weight"), [size.rank, inputs]);
            add(format!("{module}.lora_B.weight"), [outputs, size.rank]);
        }
    }
    let header = serde_json::to_vec(&Value::Object(header))?;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..end / NUMBER_BYTES {
        bytes.extend(small(next(&mut state)).to_le_bytes());
    }
    Ok(bytes)
}

/// xorshift64.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Bits of an f16 with a random sign, exponent 5 to 8 (of bias 15) and fraction: between 2^-10 and 2^-6.
fn small(random: u64) -> u16 {
    let (sign, exponent, fraction) = ((random >> 12) & 1, 5 + ((random >> 10) & 3), random & 0x3ff);
    ((sign << 15) | (exponent << 10) | fraction) as u16
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_make_different_files_of_two_megabytes() {
        let made = |seed| weights("sha256:0", Shape::USUAL, seed).unwrap();
        let (one, again, other) = (made(1), made(1), made(2));
        assert!(one == again && one != other && one.len() == other.len());
        assert!((2_000_000..2_300_000).contains(&one.len()), "{}", one.len());
    }
}
