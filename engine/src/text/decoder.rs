//! Token by token, without ever splitting a character.

use std::sync::Arc;

use super::vocabulary::Vocabulary;

/// Turns the tokens of one answer into text as they come. What all pushes and the finish return, put together, is the
/// text of all tokens: nothing is lost, doubled or taken back.
#[derive(Clone, Debug)]
pub struct Decoder {
    vocabulary: Arc<Vocabulary>,
    /// The start of a character whose other bytes have not come yet: at most three bytes between pushes.
    pending: Vec<u8>,
}

impl Decoder {
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, pending: Vec::new() }
    }

    /// The text that is certain after this token; empty for a special token or an unfinished character. Bytes that can
    /// never become a character give U+FFFD, one for each run, as `String::from_utf8_lossy` does.
    pub fn push(&mut self, token: u32) -> String {
        if self.vocabulary.is_special(token) {
            return String::new();
        }
        self.pending.extend_from_slice(self.vocabulary.bytes(token));
        let mut text = String::new();
        let mut unfinished = Vec::new();
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            if chunks.peek().is_none() && is_start_of_character(chunk.invalid()) {
                unfinished.extend_from_slice(chunk.invalid());
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending = unfinished;
        text
    }

    /// Ends the answer: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// Bytes of the unfinished character.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}

/// Whether more bytes could make this a character.
fn is_start_of_character(bytes: &[u8]) -> bool {
    // `error_len` is `None` exactly for input that ends too early.
    std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}
