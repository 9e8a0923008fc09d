//! Base models whose files were changed at random, or by somebody who knows the format: each is loaded, or refused with
//! words, in little time and memory, and never ends the process.
//!
//! `LORAFLEET_FUZZ_ROUNDS` sets the mutations of each file; with `LORAFLEET_TEST_GGUF` and `--ignored` the header of a real
//! model is changed too.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

#[path = "support/random.rs"]
mod random;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lorafleet_artifact::gguf::{Gguf, GgufLimits};
use lorafleet_backend::Backend;
use lorafleet_backend::batch::{Batch, PageId, SampleSpec, Segment, SequenceId};
use lorafleet_backend::model::Model;
use lorafleet_cpu::{CpuBackend, CpuOptions};
use lorafleet_engine::text::{Chat, Message, Text};
use random::Random;

/// One load, on a machine that is busy with other tests.
const TIME_MAX: Duration = Duration::from_secs(120);
const MEMORY_MIB_MAX: u64 = 1024;

fn rounds() -> u64 {
    std::env::var("LORAFLEET_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(60)
}

/// Numbers at which arithmetic breaks.
const EDGES: [u64; 12] =
    [0, 1, 2, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 40, u64::MAX >> 1, u64::MAX];

/// One to four changes: bits, bytes, numbers, pieces taken away, doubled or moved.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.index(bytes.len());
        let end = (at + 1 + random.index(16)).min(bytes.len());
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 | 3 => {
                let edge = random.pick(&EDGES).to_le_bytes();
                let width = random.pick(&[1, 2, 4, 8]);
                let end = (at + width).min(bytes.len());
                let width = end - at;
                bytes[at..end].copy_from_slice(&edge[..width]);
            }
            4 => drop(bytes.drain(at..end)),
            5 => {
                let piece = bytes[at..end].to_vec();
                let to = random.index(bytes.len());
                bytes.splice(to..to, piece);
            }
            6 => bytes.truncate(at),
            _ => {
                let other = random.index(bytes.len());
                bytes.swap(at, other);
            }
        }
    }
}

/// Changes of text: numbers, words and whole values of JSON.
fn mutate_json(bytes: &mut Vec<u8>, random: &mut Random) {
    const VALUES: [&str; 14] = [
        "null",
        "true",
        "[]",
        "{}",
        "\"\"",
        "0",
        "-1",
        "1e400",
        "4294967296",
        "18446744073709551616",
        "0.5",
        "[[[[[[[[]]]]]]]]",
        "\"\\ud800\"",
        "\"llama3\"",
    ];
    let ends: Vec<usize> = (0..bytes.len()).filter(|at| matches!(bytes[*at], b',' | b'}' | b']' | b'\n')).collect();
    let starts: Vec<usize> = (1..bytes.len()).filter(|at| matches!(bytes[at - 1], b':' | b'[' | b',')).collect();
    if random.below(3) == 0 || starts.is_empty() {
        return mutate(bytes, random);
    }
    let start = random.pick(&starts);
    let Some(end) = ends.iter().copied().find(|end| *end >= start) else { return };
    let value = random.pick(&VALUES);
    bytes.splice(start..end, value.bytes());
}

/// What a load comes to: loaded and used, or the words of its refusal.
fn load(path: &Path) -> Result<(), String> {
    let model = Model::open(path).map_err(|error| error.to_string())?;
    let text = if path.is_dir() {
        Text::from_hf(path).map_err(|error| error.to_string())?
    } else {
        Text::from_gguf(&header(path)?).map_err(|error| error.to_string())?
    };
    let chat = Chat { messages: vec![Message::new("user", "Hello, wörld 123")], ..Chat::default() };
    let ids = text.encode("Hello, wörld 123").map_err(|error| error.to_string())?;
    let _ = text.encode_chat(&chat).map_err(|error| error.to_string());
    text.decode(&ids);
    let options = CpuOptions { page_bytes_total: 1 << 20, threads: NonZeroUsize::MIN };
    let mut backend = CpuBackend::new(&model, options).map_err(|error| error.to_string())?;
    let vocabulary = model.shape().vocabulary as u32;
    let tokens: Vec<u32> = ids.into_iter().map(|id| id % vocabulary).chain([0]).take(8).collect();
    let pages = (0..backend.page_budget().pages).map(PageId).collect();
    let sample = Some(SampleSpec { logprobs: Some(2), ..SampleSpec::greedy() });
    let segment = Segment { sequence: SequenceId(1), adapter: None, tokens, position: 0, pages, sample };
    let batch = Batch { step: 1, segments: vec![segment], ..Batch::default() };
    let sampled = backend.submit(&batch).and_then(|ticket| backend.wait(ticket)).map_err(|error| error.to_string())?;
    assert!(sampled.rows[0].token < vocabulary);
    model.digest().map(drop).map_err(|error| error.to_string())
}

fn header(path: &Path) -> Result<Gguf, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    Gguf::parse(&bytes, bytes.len() as u64, &GgufLimits::default()).map_err(|error| error.to_string())
}

#[derive(Debug, Default)]
struct Tally {
    loaded: u64,
    refused: u64,
}

impl Tally {
    fn check(&mut self, what: &str, load: impl FnOnce() -> Result<(), String>) {
        let begun = Instant::now();
        match catch_unwind(AssertUnwindSafe(load)) {
            Ok(Ok(())) => self.loaded += 1,
            Ok(Err(words)) => {
                assert!(!words.is_empty() && words.len() < 4096, "{what}: {words}");
                self.refused += 1;
            }
            Err(_) => panic!("{what}: it panicked"),
        }
        assert!(begun.elapsed() < TIME_MAX, "{what}: it took {:?}", begun.elapsed());
    }

    fn judge(&self, what: &str) {
        let peak = peak_mib();
        println!("{what}: {} loaded, {} refused, peak {peak} MiB", self.loaded, self.refused);
        assert!(self.refused > 0, "{what}: nothing was refused: the test tests nothing");
        assert!(peak < MEMORY_MIB_MAX, "{what}: it took {peak} MiB");
    }
}

fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() >> 10
}

fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/artifact/tests/cases/base")
}

#[test]
fn a_changed_folder_is_loaded_or_refused_with_words() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"];
    let read = |name: &str| std::fs::read(base().join(name)).unwrap();
    for name in files.into_iter().chain(["generation_config.json"]) {
        std::fs::write(folder.path().join(name), read(name)).unwrap();
    }
    load(folder.path()).unwrap();
    for name in files {
        let (path, good) = (folder.path().join(name), read(name));
        let mut tally = Tally::default();
        for seed in 1..=rounds() {
            let mut random = Random::new(seed);
            let mut bytes = good.clone();
            if name == "model.safetensors" {
                // The header; what follows is numbers.
                let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
                let mut head: Vec<u8> = bytes.drain(..length).collect();
                if random.below(2) == 0 {
                    mutate(&mut head, &mut random)
                } else {
                    mutate_json(&mut head, &mut random)
                }
                head.append(&mut bytes);
                bytes = head;
            } else {
                mutate_json(&mut bytes, &mut random);
            }
            std::fs::write(&path, &bytes).unwrap();
            tally.check(&format!("{name}, seed {seed}"), || load(folder.path()));
        }
        std::fs::write(&path, &good).unwrap();
        tally.judge(name);
    }
}

/// What GGUF calls a tensor of a Hugging Face model.
fn gguf_name(name: &str) -> String {
    let name = name.strip_suffix(".weight").unwrap().replace("model.layers.", "blk.");
    let parts = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ];
    parts.iter().fold(name, |name, (from, to)| name.replace(from, to)) + ".weight"
}

/// The base as a GGUF file, with a tokenizer of the 256 bytes.
fn small_gguf() -> Vec<u8> {
    let file = std::fs::read(base().join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let data = &file[8 + length..];
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut entries: Vec<Vec<u8>> = Vec::new();
    let mut entry = |key: &str, kind: u32, value: Vec<u8>| {
        entries.push([string(key), kind.to_le_bytes().to_vec(), value].concat());
    };
    let array = |kind: u32, count: usize, items: Vec<u8>| {
        [kind.to_le_bytes().to_vec(), (count as u64).to_le_bytes().to_vec(), items].concat()
    };
    entry("general.architecture", 8, string("llama"));
    for (key, number) in [
        ("block_count", 2_u32),
        ("embedding_length", 64),
        ("feed_forward_length", 128),
        ("context_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        entry(&format!("llama.{key}"), 4, number.to_le_bytes().to_vec());
    }
    entry("llama.attention.layer_norm_rms_epsilon", 6, 1e-5_f32.to_le_bytes().to_vec());
    entry("tokenizer.ggml.model", 8, string("gpt2"));
    entry("tokenizer.ggml.pre", 8, string("smollm"));
    let tokens: Vec<String> = (0..256_u32).map(|code| char::from_u32(0x100 + code).unwrap().to_string()).collect();
    let tokens: Vec<String> = tokens.into_iter().chain(["<s>".into(), "</s>".into()]).collect();
    let items = tokens.iter().flat_map(|token| string(token)).collect();
    entry("tokenizer.ggml.tokens", 9, array(8, tokens.len(), items));
    entry("tokenizer.ggml.merges", 9, array(8, 0, Vec::new()));
    let kind = |id: i32| -> i32 { if id < 256 { 1 } else { 3 } };
    let kinds = (0..258_i32).flat_map(|id| kind(id).to_le_bytes()).collect();
    entry("tokenizer.ggml.token_type", 9, array(5, 258, kinds));
    entry("tokenizer.ggml.bos_token_id", 4, 256_u32.to_le_bytes().to_vec());
    entry("tokenizer.ggml.eos_token_id", 4, 257_u32.to_le_bytes().to_vec());
    let template = "{% for message in messages %}{{ bos_token + message.content }}{% endfor %}";
    entry("tokenizer.chat_template", 8, string(template));
    let (mut infos, mut body) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let at = |end: usize| tensor["data_offsets"][end].as_u64().unwrap() as usize;
        let shape: Vec<u64> =
            tensor["shape"].as_array().unwrap().iter().rev().map(|size| size.as_u64().unwrap()).collect();
        body.resize(usize::next_multiple_of(body.len(), 32), 0);
        infos.push(string(&gguf_name(name)));
        infos.push((shape.len() as u32).to_le_bytes().to_vec());
        infos.extend(shape.iter().map(|size| size.to_le_bytes().to_vec()));
        infos.push(0_u32.to_le_bytes().to_vec());
        infos.push((body.len() as u64).to_le_bytes().to_vec());
        body.extend_from_slice(&data[at(0)..at(1)]);
    }
    let count = tensors.as_object().unwrap().keys().filter(|name| *name != "__metadata__").count() as u64;
    let preamble = [&b"GGUF"[..], &3_u32.to_le_bytes(), &count.to_le_bytes(), &(entries.len() as u64).to_le_bytes()];
    let mut file = [preamble.concat(), entries.concat(), infos.concat()].concat();
    file.resize(file.len().next_multiple_of(32), 0);
    file.append(&mut body);
    file
}

#[test]
fn a_changed_gguf_file_is_loaded_or_refused_with_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let good = small_gguf();
    std::fs::write(&path, &good).unwrap();
    load(&path).unwrap();
    let header_bytes = header(&path).unwrap().data_start as usize;
    let mut tally = Tally::default();
    for seed in 1..=rounds() * 5 {
        let mut random = Random::new(seed);
        let mut bytes = good.clone();
        // Mostly without a change of length, behind which all else would be refused.
        if random.below(2) == 0 {
            let at = random.index(header_bytes - 8);
            let width = random.pick(&[1, 2, 4, 8]);
            let edge = random.pick(&EDGES).to_le_bytes();
            bytes[at..at + width].copy_from_slice(&edge[..width]);
        } else {
            let mut head: Vec<u8> = bytes.drain(..header_bytes).collect();
            mutate(&mut head, &mut random);
            head.append(&mut bytes);
            bytes = head;
        }
        std::fs::write(&path, &bytes).unwrap();
        tally.check(&format!("seed {seed}"), || load(&path));
    }
    tally.judge("small GGUF");
    assert!(tally.loaded > 0, "nothing was loaded: the test tests nothing");
}

#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF, and takes a second or so for each change"]
fn the_changed_header_of_a_real_model_is_read_or_refused_with_words() {
    let real = std::env::var_os("LORAFLEET_TEST_GGUF").map(PathBuf::from).expect("LORAFLEET_TEST_GGUF");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::copy(&real, &path).unwrap();
    let mut file = File::options().read(true).write(true).open(&path).unwrap();
    let header_bytes = header(&path).unwrap().data_start as usize;
    let mut good = vec![0; header_bytes];
    file.read_exact(&mut good).unwrap();
    let mut tally = Tally::default();
    for seed in 1..=rounds() {
        let mut random = Random::new(seed);
        let mut head = good.clone();
        for _ in 0..=random.below(3) {
            // The tables of tokens and merges are nearly all of it: half of the changes go to the rest.
            let near = if random.below(2) == 0 { random.index(4096) } else { random.index(header_bytes) };
            let at = if random.below(2) == 0 { near } else { header_bytes - 1 - near }.min(header_bytes - 8);
            let edge = if random.below(2) == 0 { random.pick(&EDGES) } else { random.next() };
            let width = random.pick(&[1, 2, 4, 8]);
            head[at..at + width].copy_from_slice(&edge.to_le_bytes()[..width]);
        }
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&head).unwrap();
        tally.check(&format!("seed {seed}"), || {
            let model = Model::open(&path).map_err(|error| error.to_string())?;
            let header = Gguf::parse(&head, 1 << 40, &GgufLimits::default()).map_err(|error| error.to_string())?;
            let text = Text::from_gguf(&header).map_err(|error| error.to_string())?;
            text.encode("Hello, wörld 123").map_err(|error| error.to_string())?;
            model.shape().base();
            Ok(())
        });
    }
    tally.judge("real GGUF");
}
