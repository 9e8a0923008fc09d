//! Tokenizer, chat template, decoding and stop strings against golden cases of Hugging Face and llama.cpp.
//! `tests/oracle/text.py` makes the cases.

#![allow(clippy::panic, clippy::unwrap_used)] // Helpers of tests may say what they expect plainly.

mod text_cases {
    mod chat;
    mod stream;
    mod tokenizer;
}

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lorafleet_artifact::gguf::{Array, Gguf, GgufLimits, Value};
use lorafleet_engine::text::Text;

fn golden_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/text").join(name)
}

fn golden(name: &str) -> serde_json::Value {
    let path = golden_folder(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

/// The header of the real model.
fn real_header() -> Gguf {
    let path = std::env::var_os("LORAFLEET_TEST_GGUF").map(PathBuf::from);
    let path = path.expect("LORAFLEET_TEST_GGUF is the path of SmolLM2-135M-Instruct.Q4_1.gguf");
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Gguf::parse(&bytes, bytes.len() as u64, &GgufLimits::default()).unwrap()
}

/// A header with a vocabulary of the 256 bytes, a few merges and two special tokens.
fn small_header() -> Gguf {
    let mut tokens: Vec<String> = (0..=255_u8).map(|byte| byte_letter(byte).to_string()).collect();
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "Ã ¤"].map(str::to_owned).to_vec();
    tokens.extend(merges.iter().map(|pair| pair.replace(' ', "")));
    tokens.extend(["<s>", "</s>", "<mark>"].map(str::to_owned));
    let mut kinds = vec![1; tokens.len()];
    let count = kinds.len();
    kinds[count - 3..].copy_from_slice(&[3, 3, 4]);
    let id = |back: usize| Value::U32(u32::try_from(count - back).unwrap());
    let metadata = BTreeMap::from([
        ("tokenizer.ggml.model".to_owned(), Value::String("gpt2".to_owned())),
        ("tokenizer.ggml.pre".to_owned(), Value::String("smollm".to_owned())),
        ("tokenizer.ggml.tokens".to_owned(), Value::Array(Array::String(tokens))),
        ("tokenizer.ggml.merges".to_owned(), Value::Array(Array::String(merges))),
        ("tokenizer.ggml.token_type".to_owned(), Value::Array(Array::I32(kinds))),
        ("tokenizer.ggml.bos_token_id".to_owned(), id(3)),
        ("tokenizer.ggml.eos_token_id".to_owned(), id(2)),
        ("tokenizer.chat_template".to_owned(), Value::String("{{ messages[0].content }}{{ eos_token }}".to_owned())),
    ]);
    Gguf { version: 3, metadata, tensors: Vec::new(), alignment: 32, data_start: 0 }
}

/// GPT-2's letter for a byte.
fn byte_letter(byte: u8) -> char {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(&byte) {
        return char::from(byte);
    }
    let index = (0..byte).filter(|before| !printable(before)).count();
    char::from_u32(256 + u32::try_from(index).unwrap()).unwrap()
}

fn small_text() -> Text {
    Text::from_gguf(&small_header()).unwrap()
}
