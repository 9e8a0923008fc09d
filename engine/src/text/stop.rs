//! Stop strings over a stream: text goes out as soon as it cannot be part of a stop string, and not before.

use super::error::TextError;

pub const STOPS_MAX: usize = 16;
pub const STOP_BYTES_MAX: usize = 1024;

/// Watches one answer for its stop strings.
///
/// The answer ends at the first character with which any stop string is complete; if several are complete there, the
/// one that started first counts. So the result does not depend on how the text was cut into pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Held back: a proper prefix of at least one stop string.
    held: String,
    stopped: Option<usize>,
}

/// What one piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopStep {
    /// Certain now, to be sent.
    pub text: String,
    /// Index of the stop string that ended the answer. It and what follows are not in any `text`.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// # Errors
    /// `TooManyStops` above [`STOPS_MAX`]; `StopLength` for an empty string or one longer than [`STOP_BYTES_MAX`].
    pub fn new(stops: Vec<String>) -> Result<Self, TextError> {
        if stops.len() > STOPS_MAX {
            return Err(TextError::TooManyStops { count: stops.len(), limit: STOPS_MAX });
        }
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() || stop.len() > STOP_BYTES_MAX {
                return Err(TextError::StopLength { index, bytes: stop.len(), limit: STOP_BYTES_MAX });
            }
        }
        Ok(Self { stops, held: String::new(), stopped: None })
    }

    /// Takes the next piece of the answer. After a stop everything is swallowed.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.stopped.is_some() {
            return StopStep { text: String::new(), stopped: self.stopped };
        }
        let fresh = self.held.len();
        let mut text = std::mem::take(&mut self.held) + piece;
        if let Some((start, index)) = self.first_match(&text, fresh) {
            text.truncate(start);
            self.stopped = Some(index);
            return StopStep { text, stopped: self.stopped };
        }
        self.held = text.split_off(text.len() - self.held_bytes(&text));
        StopStep { text, stopped: None }
    }

    /// Ends the answer: what was held back was no stop string after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start and index of the stop string that is complete first; none can end before `fresh`.
    fn first_match(&self, text: &str, fresh: usize) -> Option<(usize, usize)> {
        let ends = text.char_indices().map(|(at, letter)| at + letter.len_utf8()).filter(|end| *end > fresh);
        ends.filter_map(|end| self.match_ending(text.get(..end)?)).next()
    }

    fn match_ending(&self, text: &str) -> Option<(usize, usize)> {
        let matches = self.stops.iter().enumerate().filter(|(_, stop)| text.ends_with(stop.as_str()));
        matches.map(|(index, stop)| (text.len() - stop.len(), index)).min()
    }

    /// Length of the longest end of `text` with which a stop string starts.
    fn held_bytes(&self, text: &str) -> usize {
        self.stops.iter().map(|stop| overlap(text, stop)).max().unwrap_or(0)
    }
}

/// Length of the longest end of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let prefixes = stop.char_indices().map(|(at, _)| at).rev();
    prefixes.filter(|length| stop.get(..*length).is_some_and(|prefix| text.ends_with(prefix))).max().unwrap_or(0)
}
