use lorafleet_artifact::gguf::{Array, Value};
use lorafleet_engine::text::{Chat, Message, TEXT_BYTES_MAX, Text, TextError};

use super::super::{golden, golden_folder, real_header, small_header, small_text};

fn check(text: &Text, cases: &serde_json::Value) {
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 150, "only {} cases", cases.len());
    for case in cases {
        let source = case["text"].as_str().unwrap();
        let wanted: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(text.encode(source).unwrap(), wanted, "{source:?}");
        if let Some(decoded) = case["decoded"].as_str() {
            assert_eq!(text.decode(&wanted), decoded, "{source:?}");
        }
    }
}

#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF"]
fn real_model_gives_the_ids_of_hugging_face() {
    let text = Text::from_gguf(&real_header()).unwrap();
    check(&text, &golden("tokenizer.json"));
    assert_eq!(text.vocabulary().len(), 49_152);
    assert_eq!(text.end_tokens(), [0, 2]);
}

#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF"]
fn other_pre_tokenizers_give_the_ids_of_llama_cpp() {
    for name in ["gpt-2", "llama-bpe", "qwen2", "default"] {
        let mut header = real_header();
        header.metadata.insert("tokenizer.ggml.pre".to_owned(), Value::String(name.to_owned()));
        check(&Text::from_gguf(&header).unwrap(), &golden(&format!("pre-{name}.json")));
    }
}

#[test]
fn folder_with_bytes_as_letters() {
    let text = Text::from_hf(&golden_folder("bytes")).unwrap();
    assert_eq!(text.encode("a b<s>").unwrap(), [64, 220, 65, 256]);
    assert_eq!(text.decode(&[64, 220, 65, 256]), "a b");
    assert_eq!(text.end_tokens(), [257]);
    let chat = Chat { messages: vec![Message::new("user", "hi")], add_generation_prompt: true, ..Chat::default() };
    assert_eq!(text.render_chat(&chat).unwrap(), "user: hi\nassistant: ");
}

#[test]
fn folder_with_sentence_pieces_gives_the_ids_of_hugging_face() {
    let text = Text::from_hf(&golden_folder("pieces")).unwrap();
    check(&text, &golden("pieces/cases.json"));
    assert!(!text.has_chat_template());
    // In the middle of an answer a piece's space is its own.
    let mut decoder = text.decoder();
    let ids = text.encode("word word").unwrap();
    let pieces: String = ids.iter().map(|token| decoder.push(*token)).collect();
    assert_eq!(pieces, " word word");
}

#[test]
fn folder_files_override_each_other_as_in_hugging_face() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::copy(golden_folder("bytes").join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let load = || Text::from_hf(folder.path());
    let render =
        |text: &Text| text.render_chat(&Chat { messages: vec![Message::new("user", "hi")], ..Chat::default() });
    let text = load().unwrap();
    assert!(text.end_tokens().is_empty());
    assert!(matches!(render(&text), Err(TextError::NoTemplate)));
    write("config.json", r#"{"eos_token_id": 7}"#);
    assert_eq!(load().unwrap().end_tokens(), [7]);
    write("generation_config.json", r#"{"eos_token_id": [9, 8]}"#);
    write("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}, "chat_template": "one {{ eos_token }}"}"#);
    assert_eq!(load().unwrap().end_tokens(), [8, 9, 257]);
    assert_eq!(render(&load().unwrap()).unwrap(), "one </s>");
    write("chat_template.jinja", "two");
    assert_eq!(render(&load().unwrap()).unwrap(), "two");
    write("generation_config.json", r#"{"eos_token_id": "x"}"#);
    assert_eq!(load().unwrap_err().code(), "Malformed");
}

#[test]
fn wrong_tokenizer_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sound = std::fs::read_to_string(golden_folder("pieces").join("tokenizer.json")).unwrap();
    let refused = |text: &str, code: &str, part: &str| {
        std::fs::write(folder.path().join("tokenizer.json"), text).unwrap();
        let error = Text::from_hf(folder.path()).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    let changed = |pointer: &str, value: serde_json::Value| {
        let mut file: serde_json::Value = serde_json::from_str(&sound).unwrap();
        *file.pointer_mut(pointer).unwrap() = value;
        file.to_string()
    };
    refused("{", "Malformed", "tokenizer.json");
    refused(&changed("/decoder", serde_json::json!({"type": "WordPiece"})), "UnsupportedFeature", "WordPiece");
    refused(&changed("/decoder/decoders/0/content", serde_json::json!("_")), "UnsupportedFeature", "Replace");
    refused(&changed("/model/merges/0", serde_json::json!(["<unk>", "</s>"])), "Malformed", "merge 0");
    refused(&changed("/model/vocab/<unk>", serde_json::json!(4_000_000_000_u32)), "Malformed", "4000000000");
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert_eq!(Text::from_hf(folder.path()).unwrap_err().code(), "Malformed");
}

#[test]
fn begin_token_follows_the_file() {
    let mut header = small_header();
    assert_eq!(small_text().encode("!").unwrap(), [u32::from(b'!')]);
    header.metadata.insert("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(true));
    assert_eq!(Text::from_gguf(&header).unwrap().encode("!").unwrap(), [263, u32::from(b'!')]);
}

#[test]
fn special_tokens_are_found_in_text_and_left_out_of_answers() {
    let text = small_text();
    let ids = text.encode("hello w<mark> <s>x</s>").unwrap();
    assert_eq!(ids, [259, 260, 265, 32, 263, u32::from(b'x'), 264]);
    assert_eq!(text.decode(&ids), "hello w<mark> x");
    assert_eq!(text.vocabulary().text(263), "<s>");
    assert_eq!(text.end_tokens(), [264]);
    assert!(text.is_end(264) && !text.is_end(263));
}

#[test]
fn tokens_beyond_the_vocabulary_write_nothing() {
    assert_eq!(small_text().decode(&[259, 1_000_000, u32::MAX]), "hello");
}

#[test]
fn long_text_is_refused_and_long_runs_are_tokenized() {
    let text = small_text();
    let error = text.encode(&"a".repeat(TEXT_BYTES_MAX + 1)).unwrap_err();
    assert!(matches!(error, TextError::TooLong { .. }), "{error}");
    for run in [" ", "\n", "a", "1", "!", "ä", "'s"] {
        let source = run.repeat(100_000);
        assert_eq!(text.decode(&text.encode(&source).unwrap()), source, "{run:?}");
    }
}

fn check_refused(key: &str, value: Option<Value>, code: &str, part: &str) {
    let mut header = small_header();
    match value {
        Some(value) => header.metadata.insert(key.to_owned(), value),
        None => header.metadata.remove(key),
    };
    let error = Text::from_gguf(&header).unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn wrong_metadata_is_refused_by_name() {
    let strings =
        |items: &[&str]| Some(Value::Array(Array::String(items.iter().map(|item| (*item).to_owned()).collect())));
    let text = |text: &str| Some(Value::String(text.to_owned()));
    check_refused("tokenizer.ggml.model", None, "Malformed", "tokenizer.ggml.model");
    check_refused("tokenizer.ggml.model", text("llama"), "UnsupportedFeature", "'llama'");
    check_refused("tokenizer.ggml.pre", None, "UnsupportedFeature", "tokenizer.ggml.pre");
    check_refused("tokenizer.ggml.pre", text("tekken"), "UnsupportedFeature", "'tekken'");
    check_refused("tokenizer.ggml.tokens", None, "Malformed", "tokenizer.ggml.tokens");
    check_refused("tokenizer.ggml.tokens", strings(&["a", "b", "a"]), "Malformed", "3");
    check_refused("tokenizer.ggml.merges", None, "Malformed", "tokenizer.ggml.merges");
    check_refused("tokenizer.ggml.merges", strings(&["h e", "q"]), "Malformed", "entry 1 'q'");
    check_refused("tokenizer.ggml.merges", strings(&["h hello"]), "Malformed", "'h hello'");
    check_refused("tokenizer.ggml.token_type", Some(Value::Array(Array::I32(vec![1]))), "Malformed", "1 entries");
    check_refused("tokenizer.ggml.bos_token_id", Some(Value::U32(266)), "Malformed", "266");
    check_refused("tokenizer.ggml.eos_token_id", Some(Value::I32(-1)), "Malformed", "-1");
    check_refused("tokenizer.chat_template", text("{% if %}"), "Malformed", "chat template");
}
