//! Tokenizer and chat template out of a Hugging Face model folder.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::Text;
use super::error::TextError;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::vocabulary::{Piece, PieceKind, Spelling, Vocabulary};

/// Longest file that is read, in bytes: four times the largest vocabularies in use.
const FILE_BYTES_MAX: u64 = 128 << 20;
/// Largest token id: above it a file would ask for memory that its size does not show.
const TOKEN_ID_MAX: u32 = 1 << 22;

const TOKENIZER: &str = "tokenizer.json";

pub(super) fn load(folder: &Path) -> Result<Text, TextError> {
    let bytes = read(&folder.join(TOKENIZER))?;
    let bytes = bytes.ok_or_else(|| TextError::malformed(TOKENIZER, format!("{} has none", folder.display())))?;
    let file: Value = parse(TOKENIZER, &bytes)?;
    let spelling = spelling(&file)?;
    check_merges(&file)?;
    let inner = tokenizers::Tokenizer::from_bytes(&bytes);
    let mut inner = inner.map_err(|error| TextError::malformed(TOKENIZER, error.to_string()))?;
    // A file may ask to cut or fill every text to some length, for training: a server takes texts as they are.
    inner.with_truncation(None).map_err(|error| TextError::malformed(TOKENIZER, error.to_string()))?;
    inner.with_padding(None);
    let vocabulary = Vocabulary::new(pieces(&inner)?.into_iter(), spelling);
    let config = read_json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
    let names = special_names(&config);
    let end_tokens = end_tokens(folder, &inner, &names)?;
    let template = template(folder, &config, names)?;
    Ok(Text::new(Tokenizer::new(inner, vocabulary, None), template, end_tokens))
}

/// The bytes of a file of the folder; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    let failed = |source| TextError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TextError::malformed(
            path.display().to_string(),
            format!("it is longer than {FILE_BYTES_MAX} bytes"),
        ));
    }
    Ok(Some(bytes))
}

fn parse(name: &str, bytes: &[u8]) -> Result<Value, TextError> {
    serde_json::from_slice(bytes).map_err(|error| TextError::malformed(name, error.to_string()))
}

fn read_json(folder: &Path, name: &str) -> Result<Option<Value>, TextError> {
    read(&folder.join(name))?.map(|bytes| parse(name, &bytes)).transpose()
}

/// Each merge must give a token: the builder of the crate would panic on some that do not.
fn check_merges(file: &Value) -> Result<(), TextError> {
    let Some(merges) = file.pointer("/model/merges").and_then(Value::as_array) else { return Ok(()) };
    let vocabulary = file.pointer("/model/vocab").and_then(Value::as_object);
    let known: HashSet<&str> = vocabulary.into_iter().flatten().map(|(token, _)| token.as_str()).collect();
    let prefix = file.pointer("/model/continuing_subword_prefix").and_then(Value::as_str).unwrap_or_default();
    for (index, merge) in merges.iter().enumerate() {
        let halves = match merge {
            Value::String(line) => line.split_once(' '),
            other => other.get(0).and_then(Value::as_str).zip(other.get(1).and_then(Value::as_str)),
        };
        let joined = halves.and_then(|(left, right)| Some(format!("{left}{}", right.strip_prefix(prefix)?)));
        if !joined.is_some_and(|token| known.contains(token.as_str())) {
            let why = format!("merge {index} does not join two tokens into a third");
            return Err(TextError::malformed(TOKENIZER, why));
        }
    }
    Ok(())
}

fn pieces(inner: &tokenizers::Tokenizer) -> Result<Vec<Piece>, TextError> {
    let added = inner.get_added_tokens_decoder();
    let mut pieces = BTreeMap::new();
    for (text, id) in inner.get_vocab(true) {
        if id > TOKEN_ID_MAX {
            let why = format!("token id {id} is above the limit of {TOKEN_ID_MAX}");
            return Err(TextError::malformed(TOKENIZER, why));
        }
        let kind = match added.get(&id) {
            Some(token) if token.special => PieceKind::Special,
            Some(_) => PieceKind::Added,
            None => PieceKind::Normal,
        };
        pieces.insert(id, Piece { text, kind });
    }
    let last = pieces.last_key_value().map_or(0, |(id, _)| id + 1);
    let hole = || Piece { text: String::new(), kind: PieceKind::Special };
    Ok((0..last).map(|id| pieces.remove(&id).unwrap_or_else(hole)).collect())
}

/// How the file's decoder turns tokens into text. Only decoders that work token by token can be streamed exactly.
fn spelling(file: &Value) -> Result<Spelling, TextError> {
    let decoder = file.get("decoder").unwrap_or(&Value::Null);
    let kind = |decoder: &Value| decoder.get("type").and_then(Value::as_str).unwrap_or("none").to_owned();
    let refuse = |kind: &str| {
        let what = format!("tokenizer decoder '{kind}'");
        Err(TextError::unsupported(
            what,
            "known are ByteLevel, Metaspace and Sequence of Replace, ByteFallback, Fuse, Strip",
        ))
    };
    match kind(decoder).as_str() {
        "ByteLevel" => Ok(Spelling::ByteLevel),
        "Metaspace" => {
            let lead = decoder.get("prepend_scheme").and_then(Value::as_str) != Some("never");
            Ok(Spelling::Pieces { lead: lead && decoder.get("add_prefix_space") != Some(&Value::Bool(false)) })
        }
        "Sequence" => {
            let stages = decoder.get("decoders").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let kinds: Vec<String> = stages.iter().map(kind).collect();
            let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
            match kinds.as_slice() {
                ["ByteLevel"] => Ok(Spelling::ByteLevel),
                ["Replace", "ByteFallback", "Fuse"] if spaces(stages) => Ok(Spelling::Pieces { lead: false }),
                ["Replace", "ByteFallback", "Fuse", "Strip"] if spaces(stages) => Ok(Spelling::Pieces { lead: true }),
                other => refuse(&format!("Sequence of {}", other.join(", "))),
            }
        }
        other => refuse(other),
    }
}

/// Whether the first stage writes spaces for U+2581.
fn spaces(stages: &[Value]) -> bool {
    let replace = stages.first();
    let text = |pointer| replace.and_then(|stage| stage.pointer(pointer)).and_then(Value::as_str);
    text("/pattern/String") == Some("\u{2581}") && text("/content") == Some(" ")
}

/// `bos_token`, `eos_token` and the like, which stand as text or as an object with `content`.
fn special_names(config: &Value) -> BTreeMap<String, String> {
    let keys = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
    let text = |key: &&str| {
        let value = config.get(*key)?;
        value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
    };
    keys.iter().filter_map(|key| Some(((*key).to_owned(), text(key)?))).collect()
}

/// The tokenizer's end token, and those of generation_config.json, or of config.json where that names none.
fn end_tokens(
    folder: &Path,
    inner: &tokenizers::Tokenizer,
    names: &BTreeMap<String, String>,
) -> Result<Vec<u32>, TextError> {
    let mut ends = Vec::new();
    ends.extend(names.get("eos_token").and_then(|token| inner.token_to_id(token)));
    for name in ["generation_config.json", "config.json"] {
        let config = read_json(folder, name)?.unwrap_or(Value::Null);
        let value = config.get("eos_token_id").or_else(|| config.pointer("/text_config/eos_token_id"));
        let Some(value) = value.filter(|value| !value.is_null()) else { continue };
        let listed = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for id in listed {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id <= TOKEN_ID_MAX);
            ends.push(id.ok_or_else(|| TextError::malformed(name, format!("eos_token_id is {value}")))?);
        }
        break;
    }
    Ok(ends)
}

/// `chat_template.jinja` where it is there, else the entry of tokenizer_config.json: one text, or a list by name.
fn template(folder: &Path, config: &Value, names: BTreeMap<String, String>) -> Result<Option<ChatTemplate>, TextError> {
    if let Some(bytes) = read(&folder.join("chat_template.jinja"))? {
        let source = String::from_utf8(bytes);
        let source = source.map_err(|_| TextError::malformed("chat_template.jinja", "it is not UTF-8"))?;
        return ChatTemplate::new(&source, None, names).map(Some);
    }
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => ChatTemplate::new(source, None, names).map(Some),
        Some(Value::Array(entries)) => {
            let named = |name: &str| {
                let entry = entries.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
                entry.get("template")?.as_str()
            };
            let Some(source) = named("default") else { return Ok(None) };
            ChatTemplate::new(source, named("tool_use"), names).map(Some)
        }
        Some(_) => Err(TextError::malformed("tokenizer_config.json", "chat_template is neither text nor a list")),
    }
}
