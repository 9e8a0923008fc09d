//! Text in, text out: tokenizer, chat template, incremental decoding and stop strings of one base model.
//!
//! Pure but for [`Text::from_hf`], which reads a model folder. Everything here is immutable after loading and shared
//! between requests; what a request changes ([`Decoder`], [`StopMatcher`]) belongs to that request.

mod chat;
mod clock;
mod decoder;
mod error;
mod gguf;
mod huggingface;
mod stop;
mod template;
mod tokenizer;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

use lorafleet_artifact::gguf::Gguf;

pub use chat::{Chat, Message, ROLES};
pub use decoder::Decoder;
pub use error::TextError;
pub use minijinja::Value as TemplateValue;
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopMatcher, StopStep};
pub use template::{ChatTemplate, RENDERED_BYTES_MAX, TEMPLATE_BYTES_MAX};
pub use tokenizer::{TEXT_BYTES_MAX, Tokenizer};
pub use vocabulary::Vocabulary;

/// How one base model reads and writes text.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// Sorted, without repetitions.
    end_tokens: Vec<u32>,
}

impl Text {
    /// From the metadata of a GGUF file (`tokenizer.ggml.*`, `tokenizer.chat_template`).
    ///
    /// # Errors
    /// `Unsupported` for a tokenizer model or pre-tokenizer that is not known here (it would give other tokens),
    /// `Malformed` for metadata that contradicts itself.
    pub fn from_gguf(header: &Gguf) -> Result<Self, TextError> {
        gguf::load(header)
    }

    /// From a Hugging Face folder: `tokenizer.json`, and where they are there `tokenizer_config.json`,
    /// `chat_template.jinja`, `generation_config.json` and `config.json`.
    ///
    /// # Errors
    /// `Read` if a file cannot be read, `Malformed` and `Unsupported` as for [`Text::from_gguf`].
    pub fn from_hf(folder: &Path) -> Result<Self, TextError> {
        huggingface::load(folder)
    }

    fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, mut end_tokens: Vec<u32>) -> Self {
        end_tokens.sort_unstable();
        end_tokens.dedup();
        Self { tokenizer, template, end_tokens }
    }

    /// Token ids of a plain prompt, with the begin token where the model's tokenizer adds one. Text that spells a
    /// special token becomes that token, as in Hugging Face.
    ///
    /// # Errors
    /// `TooLong` if the text is longer than [`TEXT_BYTES_MAX`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode(text, true)
    }

    /// Token ids of a conversation: rendered by the template, which brings its own begin token.
    ///
    /// # Errors
    /// As [`Text::render_chat`] and [`Text::encode`].
    pub fn encode_chat(&self, chat: &Chat) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode(&self.render_chat(chat)?, false)
    }

    /// Token ids of a conversation that is rendered already.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_rendered(&self, rendered: &str) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode(rendered, false)
    }

    /// A conversation as the one text that the model was trained on.
    ///
    /// # Errors
    /// `NoTemplate` if the model has none; `Template` if the template refuses these messages or spends more than its
    /// limits; `UnknownRole` for a role that is not among [`ROLES`].
    pub fn render_chat(&self, chat: &Chat) -> Result<String, TextError> {
        self.template.as_ref().ok_or(TextError::NoTemplate)?.render(chat)
    }

    /// All of the text of `tokens`, special tokens left out.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// Decodes one sequence token by token, special tokens left out.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(Arc::clone(self.tokenizer.vocabulary()))
    }

    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        self.tokenizer.vocabulary()
    }

    /// Tokens that end an answer: sorted.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    pub fn is_end(&self, token: u32) -> bool {
        self.end_tokens.binary_search(&token).is_ok()
    }

    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }
}
