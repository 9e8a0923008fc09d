//! A model wide enough for adapters of some tens of megabytes, made up on the spot: values do not matter here, sizes do.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::server::cases;

const LAYERS: usize = 4;
const HIDDEN: usize = 512;
const FFN: usize = 1536;
const KV: usize = 128;
const VOCABULARY: usize = 258;

/// Rows and columns of each projection of a layer.
const PROJECTIONS: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", KV, HIDDEN),
    ("self_attn.v_proj", KV, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", FFN, HIDDEN),
    ("mlp.up_proj", FFN, HIDDEN),
    ("mlp.down_proj", HIDDEN, FFN),
];

/// Tensors of small random values, or of ones, in f32.
#[derive(Default)]
struct Tensors {
    header: Map<String, Value>,
    data: Vec<u8>,
    random: u32,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: &[usize], ones: bool) {
        let begin = self.data.len();
        for _ in 0..shape.iter().product::<usize>() {
            self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = if ones { 1.0 } else { (self.random >> 8) as f32 / (1 << 24) as f32 * 0.04 - 0.02 };
            self.data.extend(value.to_le_bytes());
        }
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, self.data.len()] });
        self.header.insert(name.to_owned(), entry);
    }

    fn write(self, path: &Path) {
        let header = Value::Object(self.header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(self.data);
        std::fs::write(path, file).unwrap();
    }
}

pub fn write_base(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(cases().join("base/config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", HIDDEN),
        ("intermediate_size", FFN),
        ("num_hidden_layers", LAYERS),
        ("num_attention_heads", HIDDEN / 64),
        ("num_key_value_heads", KV / 64),
        ("head_dim", 64),
    ] {
        config[key] = json!(value);
    }
    config["tie_word_embeddings"] = json!(true);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(cases().join("base").join(name), folder.join(name)).unwrap();
    }
    let mut tensors = Tensors::default();
    tensors.add("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], false);
    tensors.add("model.norm.weight", &[HIDDEN], true);
    for layer in 0..LAYERS {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.add(&format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN], true);
        }
        for (name, rows, columns) in PROJECTIONS {
            tensors.add(&format!("model.layers.{layer}.{name}.weight"), &[rows, columns], false);
        }
    }
    tensors.write(&folder.join("model.safetensors"));
}

/// All projections: 9.7 MB for each layer at rank 256.
pub fn write_adapter(folder: &Path, rank: usize) {
    std::fs::create_dir_all(folder).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(cases().join("all-linear/adapter_config.json")).unwrap()).unwrap();
    (config["r"], config["lora_alpha"]) = (json!(rank), json!(rank));
    config["target_modules"] = json!(PROJECTIONS.map(|(name, ..)| name.split_once('.').unwrap().1));
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = Tensors { random: rank as u32, ..Tensors::default() };
    for layer in 0..LAYERS {
        for (name, rows, columns) in PROJECTIONS {
            let name = format!("base_model.model.model.layers.{layer}.{name}");
            tensors.add(&format!("{name}.lora_A.weight"), &[rank, columns], false);
            tensors.add(&format!("{name}.lora_B.weight"), &[rows, rank], false);
        }
    }
    tensors.write(&folder.join("adapter_model.safetensors"));
}
