//! Text to token ids and back.

use std::fmt;
use std::sync::Arc;

use super::error::TextError;
use super::vocabulary::Vocabulary;

/// Longest text that is tokenized, in bytes: above what the longest context can hold.
pub const TEXT_BYTES_MAX: usize = 8 << 20;

/// A model's tokenizer: the merges of the crate `tokenizers`, and our own table of what each token writes.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: Arc<Vocabulary>,
    /// Put before a plain prompt, if the rules of the model's file ask for it and `inner` does not do it.
    begin: Option<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocabulary", &self.vocabulary).field("begin", &self.begin).finish()
    }
}

impl Tokenizer {
    pub(super) fn new(inner: tokenizers::Tokenizer, vocabulary: Vocabulary, begin: Option<u32>) -> Self {
        Self { inner, vocabulary: Arc::new(vocabulary), begin }
    }

    /// `add_special` puts the begin token (or what the file's post-processor says) around the text. Text that spells
    /// a special token becomes that token in either case.
    ///
    /// # Errors
    /// `TooLong` above [`TEXT_BYTES_MAX`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(TextError::TooLong { bytes: text.len(), limit: TEXT_BYTES_MAX });
        }
        let encoding = self.inner.encode_fast(text, add_special);
        let encoding = encoding.map_err(|error| TextError::Tokenizer { why: error.to_string() })?;
        let begin = self.begin.filter(|_| add_special);
        Ok(begin.into_iter().chain(encoding.get_ids().iter().copied()).collect())
    }

    /// The text of a whole sequence, special tokens left out, bytes that are no UTF-8 as U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            if !self.vocabulary.is_special(*token) {
                bytes.extend_from_slice(self.vocabulary.bytes(*token));
            }
        }
        let text = bytes.strip_prefix(self.vocabulary.lead()).unwrap_or(&bytes);
        String::from_utf8_lossy(text).into_owned()
    }

    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }
}
