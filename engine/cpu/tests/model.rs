//! Opening base models: one model in every form gives the same bits, and what is wrong with a file is said by name.

// Helpers of tests may say what they expect plainly.
#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lorafleet_backend::model::Model;
use serde_json::{Value, json};
use support::{Job, Runner, cases_folder};

/// Name, type, shape and bytes of each tensor of a safetensors file.
type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

fn tensors(path: &Path) -> Tensors {
    let file = std::fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&file[8..start]).unwrap();
    let tensor = |(name, value): (String, Value)| {
        let shape = value.get("shape")?.as_array()?.iter().map(|size| size.as_u64().unwrap()).collect();
        let at = |index: usize| start + value["data_offsets"][index].as_u64().unwrap() as usize;
        Some((name, (value["dtype"].as_str()?.to_owned(), shape, file[at(0)..at(1)].to_vec())))
    };
    header.into_iter().filter_map(tensor).collect()
}

fn write_safetensors(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(path, file).unwrap();
}

/// A copy of the tiny base that a test may spoil.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(base: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(cases_folder().join(base).join(name), folder.path().join(name)).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn edit_config(&self, edit: impl FnOnce(&mut Value)) {
        let mut config: Value = support::json(&self.file("config.json"));
        edit(&mut config);
        std::fs::write(self.file("config.json"), config.to_string()).unwrap();
    }

    fn edit_tensors(&self, edit: impl FnOnce(&mut Tensors)) {
        let path = self.file("model.safetensors");
        let mut all = tensors(&path);
        edit(&mut all);
        write_safetensors(&path, &all);
    }

    fn error(&self) -> String {
        Model::open(self.0.path()).err().expect("refused").to_string()
    }
}

fn answers(path: &Path) -> Vec<support::Generated> {
    let prompts = [vec![99], (0..40).collect(), vec![7; 17]];
    let jobs = prompts.map(|prompt| Job { adapter: None, prompt, new_tokens: 6 });
    Runner::new(path, 4 << 20, 2).generate(&jobs, usize::MAX)
}

#[test]
fn shards_answer_as_the_single_file() {
    let folder = Folder::new("base");
    let all = tensors(&folder.file("model.safetensors"));
    std::fs::remove_file(folder.file("model.safetensors")).unwrap();
    let (mut map, mut shards) = (serde_json::Map::new(), [Tensors::new(), Tensors::new()]);
    for (index, (name, tensor)) in all.into_iter().enumerate() {
        map.insert(name.clone(), format!("model-0000{}-of-00002.safetensors", index % 2 + 1).into());
        shards[index % 2].insert(name, tensor);
    }
    for (index, shard) in shards.iter().enumerate() {
        write_safetensors(&folder.file(&format!("model-0000{}-of-00002.safetensors", index + 1)), shard);
    }
    std::fs::write(folder.file("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    assert_eq!(answers(folder.0.path()), answers(&cases_folder().join("base")));
}

#[test]
fn a_gguf_of_the_model_answers_as_the_folder() {
    for base in ["base", "base-tied"] {
        let folder = Folder::new(base);
        let path = folder.file("tiny.gguf");
        write_gguf(&path, &tensors(&folder.file("model.safetensors")), base == "base-tied", "llama");
        assert_eq!(answers(&path), answers(&cases_folder().join(base)), "{base}");
    }
}

/// The tiny base as GGUF, with the names and the row order of q and k that such files have.
fn write_gguf(path: &Path, tensors: &Tensors, tied: bool, architecture: &str) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |key: &str, value: u32| [&string(key)[..], &4u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let float = |key: &str, value: f32| [&string(key)[..], &6u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let metadata = [
        [&string("general.architecture")[..], &8u32.to_le_bytes(), &string(architecture)].concat(),
        number("llama.block_count", 2),
        number("llama.context_length", 512),
        number("llama.embedding_length", 64),
        number("llama.feed_forward_length", 128),
        number("llama.attention.head_count", 4),
        number("llama.attention.head_count_kv", 2),
        float("llama.attention.layer_norm_rms_epsilon", 1e-5),
        float("llama.rope.freq_base", 10_000.0),
    ];
    let (mut inventory, mut data) = (Vec::new(), Vec::new());
    let kept = tensors.iter().filter(|(name, _)| !(tied && *name == "lm_head.weight"));
    let kept: Vec<_> = kept.collect();
    for (name, (_, shape, bytes)) in &kept {
        let (name, permuted) = gguf_name(name);
        inventory.extend(string(&name));
        inventory.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| inventory.extend(size.to_le_bytes()));
        inventory.extend(0u32.to_le_bytes());
        inventory.extend((data.len() as u64).to_le_bytes());
        data.extend(if permuted { pairs_together(bytes, 64 * 4, 16) } else { bytes.clone() });
        data.resize(data.len().next_multiple_of(32), 0);
    }
    let mut file = [&b"GGUF"[..], &3u32.to_le_bytes(), &(kept.len() as u64).to_le_bytes()].concat();
    file.extend((metadata.len() as u64).to_le_bytes());
    file.extend(metadata.concat());
    file.extend(inventory);
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

fn gguf_name(name: &str) -> (String, bool) {
    let fixed = match name {
        "model.embed_tokens.weight" => "token_embd.weight",
        "model.norm.weight" => "output_norm.weight",
        "lm_head.weight" => "output.weight",
        _ => "",
    };
    if !fixed.is_empty() {
        return (fixed.to_owned(), false);
    }
    let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let tail = match rest {
        "input_layernorm.weight" => "attn_norm",
        "post_attention_layernorm.weight" => "ffn_norm",
        "self_attn.q_proj.weight" => "attn_q",
        "self_attn.k_proj.weight" => "attn_k",
        "self_attn.v_proj.weight" => "attn_v",
        "self_attn.o_proj.weight" => "attn_output",
        "mlp.gate_proj.weight" => "ffn_gate",
        "mlp.up_proj.weight" => "ffn_up",
        "mlp.down_proj.weight" => "ffn_down",
        other => panic!("{other}"),
    };
    (format!("blk.{layer}.{tail}.weight"), tail == "attn_q" || tail == "attn_k")
}

/// Rows of each head from halves to pairs, as converters to GGUF write q and k of Llama models.
fn pairs_together(bytes: &[u8], row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let rows: Vec<&[u8]> = bytes.chunks_exact(row_bytes).collect();
    let heads = rows.chunks_exact(head_dim);
    let pairs = heads.flat_map(|head| (0..head_dim).map(|i| head[i / 2 + i % 2 * head_dim / 2]));
    pairs.flatten().copied().collect()
}

#[test]
fn what_is_wrong_with_a_configuration_is_named_with_its_value() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &str); 12] = [
        (|c| c["model_type"] = json!("mamba"), "model_type is mamba, supported: llama"),
        (|c| c["hidden_act"] = json!("gelu"), "hidden_act is gelu, supported: silu"),
        (|c| c["attention_bias"] = json!(true), "attention_bias or mlp_bias is true"),
        (|c| c["quantization_config"] = json!({"bits": 4}), "quantization_config is given"),
        (|c| c["rope_parameters"] = json!({"rope_type": "yarn", "factor": 2.0}), "rope type is yarn"),
        (|c| c["rope_parameters"] = json!({"rope_type": "linear"}), "rope type linear needs factor"),
        (|c| c["rope_parameters"]["rope_theta"] = json!(-1.0), "rope theta is -1"),
        (|c| c["num_attention_heads"] = json!(0), "num_attention_heads is 0"),
        (|c| c["num_key_value_heads"] = json!(3), "4 heads cannot share 3 KV heads evenly"),
        (|c| c["head_dim"] = json!(24), "head size is 24, it must be a multiple of 16"),
        (
            |c| c["num_hidden_layers"] = json!(4_000_000_000u64),
            "number of layers is 4000000000, it must be in 1..=4096",
        ),
        (|c| c["rms_norm_eps"] = json!(0.0), "the norm's epsilon is 0"),
    ];
    for (edit, expected) in cases {
        let folder = Folder::new("base");
        folder.edit_config(edit);
        let error = folder.error();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_tensor_is_said_by_its_name() {
    type Edit = fn(&mut Tensors);
    const UP: &str = "model.layers.1.mlp.up_proj.weight";
    let cases: [(Edit, &str); 6] = [
        (|t| drop(t.remove(UP)), "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        (
            |t| t.get_mut(UP).unwrap().1 = vec![64, 128],
            "tensor 'model.layers.1.mlp.up_proj.weight' has shape [64, 128], the configuration needs [128, 64]",
        ),
        (
            |t| t.get_mut(UP).unwrap().0 = "I8".into(),
            "tensor 'model.layers.1.mlp.up_proj.weight' is stored as I8; supported here: F32, F16, BF16",
        ),
        (|t| t.get_mut(UP).unwrap().0 = "F16".into(), "has 32768 bytes"),
        (
            |t| {
                let bias = ("F32".into(), vec![64], vec![0; 256]);
                t.insert("model.layers.0.self_attn.q_proj.bias".into(), bias);
            },
            "tensor 'model.layers.0.self_attn.q_proj.bias' is no part",
        ),
        (|t| drop(t.remove("model.norm.weight")), "tensor 'model.norm.weight' is missing"),
    ];
    for (edit, expected) in cases {
        let folder = Folder::new("base");
        folder.edit_tensors(edit);
        let error = folder.error();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn broken_files_are_errors_and_not_crashes() {
    let folder = Folder::new("base");
    let path = folder.file("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let huge = [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat();
    for (bytes, expected) in [
        (&whole[..whole.len() - 100], "lies at"),
        (&whole[..5], "shorter than a safetensors header"),
        (&huge[..], "claims a header of 18446744073709551615 bytes"),
        (&[][..], "model.safetensors"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = folder.error();
        assert!(error.contains(expected), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(folder.error().contains("model.safetensors"));

    let gguf = folder.file("tiny.gguf");
    let all = tensors(&cases_folder().join("base/model.safetensors"));
    write_gguf(&gguf, &all, false, "qwen2");
    let open = |path: &Path| Model::open(path).err().expect("refused").to_string();
    assert!(open(&gguf).contains("general.architecture is qwen2, supported: llama"));
    write_gguf(&gguf, &all, false, "llama");
    let whole = std::fs::read(&gguf).unwrap();
    std::fs::write(&gguf, &whole[..whole.len() / 2]).unwrap();
    assert!(open(&gguf).contains("tiny.gguf"));
    assert!(open(&folder.file("nothing")).contains("nothing"));
}

#[test]
fn the_digest_is_the_one_that_a_shell_computes() {
    let folder = Folder::new("base-tied");
    // What `sha256sum config.json model.safetensors | sha256sum` prints.
    let sums: BTreeMap<String, [u8; 32]> = ["config.json", "model.safetensors"]
        .map(|name| {
            use sha2::Digest as _;
            (name.to_owned(), sha2::Sha256::digest(std::fs::read(folder.file(name)).unwrap()).into())
        })
        .into();
    let expected = lorafleet_artifact::digest_of_files(&sums);
    let model = Model::open(folder.0.path()).unwrap();
    assert_eq!(model.digest().unwrap(), expected);
    assert_eq!(model.digest().unwrap(), expected);
}
