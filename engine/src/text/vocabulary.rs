//! What each token writes, as bytes: the one table that decoding, stop strings and log-probabilities read.

use std::collections::BTreeMap;
use std::fmt;

/// How the pieces of a vocabulary spell bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's: each byte is one printable character.
    /// Source: <https://github.com/openai/gpt-2/blob/master/src/encoder.py>, `bytes_to_unicode`.
    ByteLevel,
    /// SentencePiece's: U+2581 is a space, `<0x0A>` a byte; where `lead` is set, the first space of a text is not its own.
    Pieces { lead: bool },
}

/// Bytes of every token. A token beyond the table (rows that pad an embedding) writes nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// End of each token's bytes; the start is the end of the one before.
    ends: Vec<u32>,
    special: Vec<bool>,
    lead: &'static [u8],
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("tokens", &self.ends.len()).field("bytes", &self.bytes.len()).finish()
    }
}

/// A token as the model's file names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub text: String,
    pub kind: PieceKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    /// Spelled as the vocabulary spells.
    Normal,
    /// Spelled as it is.
    Added,
    /// Spelled as it is, and left out of answers.
    Special,
}

impl Vocabulary {
    pub(super) fn new(pieces: impl Iterator<Item = Piece>, spelling: Spelling) -> Self {
        let byte_of = byte_level_alphabet();
        let lead: &[u8] = if spelling == (Spelling::Pieces { lead: true }) { b" " } else { b"" };
        let mut table = Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), lead };
        for piece in pieces {
            match (piece.kind, spelling) {
                (PieceKind::Normal, Spelling::ByteLevel) => byte_level(&piece.text, &byte_of, &mut table.bytes),
                (PieceKind::Normal, Spelling::Pieces { .. }) => sentence_piece(&piece.text, &mut table.bytes),
                (PieceKind::Added | PieceKind::Special, _) => table.bytes.extend_from_slice(piece.text.as_bytes()),
            }
            table.ends.push(u32::try_from(table.bytes.len()).unwrap_or(u32::MAX));
            table.special.push(piece.kind == PieceKind::Special);
        }
        table
    }

    /// Bytes of the longest token; at least 1.
    pub fn longest_bytes(&self) -> usize {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        let longest = starts.zip(&self.ends).map(|(start, end)| end.saturating_sub(start)).max();
        longest.map_or(1, |bytes| bytes.max(1) as usize)
    }

    /// Number of tokens with an entry.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// What the token writes; a part of a character is possible. Special tokens give their name.
    pub fn bytes(&self, token: u32) -> &[u8] {
        let index = token as usize;
        let before = index.checked_sub(1).and_then(|index| self.ends.get(index)).copied().unwrap_or(0);
        let end = self.ends.get(index).copied().unwrap_or(0);
        self.bytes.get(before as usize..end as usize).unwrap_or_default()
    }

    /// The token's bytes as text, with U+FFFD where they are no whole character.
    pub fn text(&self, token: u32) -> String {
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }

    /// Whether the token is control, not text: left out of answers.
    pub fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    /// What a tokenizer puts before a text by itself, and decoding takes away again.
    pub(super) fn lead(&self) -> &'static [u8] {
        self.lead
    }
}

/// Character to byte. Printable characters of Latin-1 stand for themselves, the other bytes for U+0100 and on, in order.
fn byte_level_alphabet() -> BTreeMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100_u32;
    let mut alphabet = BTreeMap::new();
    for byte in 0..=u8::MAX {
        let letter = if printable(byte) {
            char::from(byte)
        } else {
            let letter = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
            next += 1;
            letter
        };
        alphabet.insert(letter, byte);
    }
    alphabet
}

/// A piece with a character outside the alphabet is taken as it is, as Hugging Face does.
fn byte_level(text: &str, byte_of: &BTreeMap<char, u8>, out: &mut Vec<u8>) {
    let start = out.len();
    for letter in text.chars() {
        if let Some(byte) = byte_of.get(&letter) {
            out.push(*byte);
        } else {
            out.truncate(start);
            out.extend_from_slice(text.as_bytes());
            return;
        }
    }
}

fn sentence_piece(text: &str, out: &mut Vec<u8>) {
    let hex = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|digits| digits.len() == 2);
    match hex.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => out.push(byte),
        None => out.extend_from_slice(text.replace('\u{2581}', " ").as_bytes()),
    }
}
