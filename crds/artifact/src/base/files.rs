//! Which files of a folder are a base model.

use crate::reason::{Reason, Refusal, excerpt};

/// Most files of one base: a checkpoint of hundreds of shards is a mistake.
const FILES_MAX: usize = 512;

/// Beside the weights, the files that decide what a base says.
const BESIDE_WEIGHTS: [&str; 12] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseFormat {
    /// `config.json`, tokenizer and `*.safetensors`.
    Safetensors,
    /// One `*.gguf`, which holds everything.
    Gguf,
}

/// The files whose SHA-256 sums make the digest of a base, sorted by name.
///
/// # Errors
/// NotFound for an empty folder; Malformed or UnsupportedFeature if it holds no single model.
pub fn base_files<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(BaseFormat, Vec<String>), Refusal> {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    if names.is_empty() {
        return Err(Refusal::new(Reason::NotFound, "the base's source does not exist or holds no files"));
    }
    let safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
    if safetensors && names.contains(&"config.json") {
        let chosen = |name: &&&str| name.ends_with(".safetensors") || BESIDE_WEIGHTS.contains(name);
        let files: Vec<String> = names.iter().filter(chosen).map(|name| (*name).to_owned()).collect();
        if files.len() > FILES_MAX {
            let count = files.len();
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("the base has {count} files, the limit is {FILES_MAX}"),
            ));
        }
        return Ok((BaseFormat::Safetensors, files));
    }
    let gguf: Vec<&str> = names.iter().copied().filter(|name| name.ends_with(".gguf")).collect();
    match gguf.as_slice() {
        [one] => Ok((BaseFormat::Gguf, vec![(*one).to_owned()])),
        [first, second, ..] => Err(Refusal::malformed(format!(
            "the base's folder holds several GGUF files ('{}', '{}'): name one of them as the source",
            excerpt(first, 100),
            excerpt(second, 100)
        ))),
        [] if safetensors => Err(Refusal::malformed("the base's folder holds safetensors, but no config.json")),
        [] => Err(Refusal::unsupported(
            "the base's folder holds neither config.json with *.safetensors nor one *.gguf file",
        )),
    }
}
