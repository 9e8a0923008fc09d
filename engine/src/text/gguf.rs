//! Tokenizer and chat template out of a GGUF file's metadata.
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. The rules that the format leaves to its readers
//! (what a pre-tokenizer name means, which tokens end an answer) are llama.cpp's.

use std::collections::{BTreeMap, HashSet};

use lorafleet_artifact::gguf::{Array, Gguf, Value};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::Text;
use super::error::TextError;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::vocabulary::{Piece, PieceKind, Spelling, Vocabulary};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const KINDS: &str = "tokenizer.ggml.token_type";

/// Control tokens that end a turn in some family of models: an answer must not run past them even where a file names
/// only one end token.
const TURN_ENDS: [&str; 8] =
    ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"];

pub(super) fn load(header: &Gguf) -> Result<Text, TextError> {
    let model = header.string(MODEL).ok_or_else(|| TextError::malformed(MODEL, "it is missing"))?;
    if model != "gpt2" {
        let what = format!("tokenizer model '{}'", excerpt(model));
        return Err(TextError::unsupported(what, "only 'gpt2' (byte-level BPE) is known"));
    }
    let rules = rules(header.string(PRE))?;
    let tokens = header.strings(TOKENS).ok_or_else(|| TextError::malformed(TOKENS, "it is no array of strings"))?;
    let kinds = token_kinds(header, tokens.len())?;
    let begin = special(header, "bos", tokens)?;
    let add_begin = header.bool("tokenizer.ggml.add_bos_token").unwrap_or(rules.add_begin);
    let inner = merges(header, tokens, &kinds, &rules)?;
    let pieces = tokens.iter().zip(&kinds).map(|(text, kind)| Piece { text: text.clone(), kind: *kind });
    let vocabulary = Vocabulary::new(pieces, Spelling::ByteLevel);
    let tokenizer = Tokenizer::new(inner, vocabulary, begin.filter(|_| add_begin));
    let end_tokens = end_tokens(header, tokens, &kinds)?;
    Ok(Text::new(tokenizer, template(header, tokens)?, end_tokens))
}

/// What the name of a pre-tokenizer stands for.
struct Rules {
    /// Each cuts the pieces of the one before at its matches.
    patterns: &'static [&'static str],
    /// A word that is a token by itself is taken whole, whatever the merges say.
    ignore_merges: bool,
    add_begin: bool,
}

const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const WORDS_3_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const WORDS_1_DIGIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn rules(pre: Option<&str>) -> Result<Rules, TextError> {
    let plain = |patterns| Rules { patterns, ignore_merges: false, add_begin: false };
    match pre {
        Some("smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone") => Ok(plain(&[r"\p{N}", WORDS])),
        Some("gpt-2" | "mpt" | "olmo" | "phi-2") => Ok(plain(&[WORDS])),
        Some("qwen2" | "stablelm2") => Ok(plain(&[WORDS_1_DIGIT])),
        Some("llama-bpe" | "llama3" | "llama-v3") => {
            Ok(Rules { patterns: &[WORDS_3_DIGITS], ignore_merges: true, add_begin: true })
        }
        Some("default") => Ok(plain(&[r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"])),
        Some(other) => Err(TextError::unsupported(
            format!("pre-tokenizer '{}'", excerpt(other)),
            "known are smollm, gpt-2, llama-bpe, qwen2 and their equals, and default",
        )),
        None => Err(TextError::unsupported(
            format!("a file without {PRE}"),
            "its tokens cannot be told for sure: convert the model again with a newer converter",
        )),
    }
}

fn token_kinds(header: &Gguf, count: usize) -> Result<Vec<PieceKind>, TextError> {
    let numbers = match header.metadata.get(KINDS) {
        None => return Ok(vec![PieceKind::Normal; count]),
        Some(Value::Array(Array::I32(numbers))) => numbers,
        Some(_) => return Err(TextError::malformed(KINDS, "it is no array of 32-bit integers")),
    };
    if numbers.len() != count {
        let why = format!("it has {} entries, {TOKENS} has {count}", numbers.len());
        return Err(TextError::malformed(KINDS, why));
    }
    // The numbers of llama_token_type: 2 unknown, 3 control, 4 user defined; the others are spelled in the vocabulary.
    let kind = |number: &i32| match number {
        2 | 3 => PieceKind::Special,
        4 => PieceKind::Added,
        _ => PieceKind::Normal,
    };
    Ok(numbers.iter().map(kind).collect())
}

fn merges(
    header: &Gguf,
    tokens: &[String],
    kinds: &[PieceKind],
    rules: &Rules,
) -> Result<tokenizers::Tokenizer, TextError> {
    let mut vocabulary = Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        let id = u32::try_from(id).map_err(|_| TextError::malformed(TOKENS, "more than 2^32 tokens"))?;
        if let Some(before) = vocabulary.insert(token.clone(), id) {
            let why = format!("tokens {before} and {id} are both '{}'", excerpt(token));
            return Err(TextError::malformed(TOKENS, why));
        }
    }
    let pairs = pairs(header, tokens)?;
    let model = BPE::builder().vocab_and_merges(vocabulary, pairs).ignore_merges(rules.ignore_merges).build();
    let model = model.map_err(|error| TextError::malformed(MERGES, error.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer(rules)?));
    let added = tokens.iter().zip(kinds).filter(|(_, kind)| **kind != PieceKind::Normal);
    let added: Vec<AddedToken> = added
        .map(|(token, kind)| AddedToken::from(token.as_str(), *kind == PieceKind::Special).normalized(false))
        .collect();
    let done = tokenizer.add_tokens(added);
    done.map_err(|error| TextError::malformed(TOKENS, error.to_string()))?;
    Ok(tokenizer)
}

/// Merges as pairs. Each result must be a token: the builder of the crate would panic on some that are not.
fn pairs(header: &Gguf, tokens: &[String]) -> Result<Merges, TextError> {
    let lines = header.strings(MERGES).ok_or_else(|| TextError::malformed(MERGES, "it is no array of strings"))?;
    let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    let mut pairs = Merges::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        let halves = line.split_once(' ').filter(|(left, right)| known.contains(format!("{left}{right}").as_str()));
        let Some((left, right)) = halves else {
            let why = format!("entry {index} '{}' does not join two tokens into a third", excerpt(line));
            return Err(TextError::malformed(MERGES, why));
        };
        pairs.push((left.to_owned(), right.to_owned()));
    }
    Ok(pairs)
}

fn pre_tokenizer(rules: &Rules) -> Result<PreTokenizerWrapper, TextError> {
    let mut stages = Vec::new();
    for pattern in rules.patterns {
        let split = Split::new(SplitPattern::Regex((*pattern).to_owned()), SplitDelimiterBehavior::Isolated, false);
        let split = split.map_err(|error| TextError::malformed("pre-tokenizer", error.to_string()))?;
        stages.push(PreTokenizerWrapper::Split(split));
    }
    stages.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
    Ok(PreTokenizerWrapper::Sequence(Sequence::new(stages)))
}

/// The token that `tokenizer.ggml.<name>_token_id` names.
fn special(header: &Gguf, name: &str, tokens: &[String]) -> Result<Option<u32>, TextError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(value) = header.metadata.get(&key) else { return Ok(None) };
    match header.u32(&key) {
        Some(id) if (id as usize) < tokens.len() => Ok(Some(id)),
        _ => Err(TextError::malformed(key, format!("it is {value}, the vocabulary has {} tokens", tokens.len()))),
    }
}

fn end_tokens(header: &Gguf, tokens: &[String], kinds: &[PieceKind]) -> Result<Vec<u32>, TextError> {
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(special(header, name, tokens)?);
    }
    for (id, (token, kind)) in (0..).zip(tokens.iter().zip(kinds)) {
        if *kind == PieceKind::Special && TURN_ENDS.contains(&token.as_str()) {
            ends.push(id);
        }
    }
    Ok(ends)
}

fn template(header: &Gguf, tokens: &[String]) -> Result<Option<ChatTemplate>, TextError> {
    let Some(source) = header.string("tokenizer.chat_template") else { return Ok(None) };
    let mut names = BTreeMap::new();
    for (variable, name) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(token) = special(header, name, tokens)?.and_then(|id| tokens.get(id as usize)) {
            names.insert(format!("{variable}_token"), token.clone());
        }
    }
    ChatTemplate::new(source, header.string("tokenizer.chat_template.tool_use"), names).map(Some)
}

fn excerpt(text: &str) -> String {
    text.chars().take(60).collect()
}
