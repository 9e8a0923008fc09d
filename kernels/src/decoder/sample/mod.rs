//! Drawing a token from each row of logits on the device. `cuda/sample.cu` has the definition in words, [`twin`] in code.

use crate::launch::{DevicePtr, Launch};
use crate::plain::{Plain, plain};

pub mod twin;

/// Tokens that a CTA of the scan takes.
pub const SLICE: u32 = 8192;
/// CTAs to a row, at most.
pub const PARTS: u32 = 32;
pub const VOCABULARY_MAX: u32 = SLICE * PARTS;
/// Best tokens that a row can ask for.
pub const LEADERS_MAX: u32 = 32;
/// Rows of one call.
pub const ROWS_MAX: u32 = 65_535;
/// In `Ask::mask`: every token is allowed. As a token: nothing was allowed.
pub const NONE: u32 = u32::MAX;
const LIST: u64 = 512;

plain! {
    /// What one row asks for.
    pub struct Ask {
        pub seed: u64,
        /// Number of tokens that the sequence has drawn: with `seed` it fixes the noise.
        pub draw: u64,
        /// 1 / temperature; 0: greedy.
        pub inverse_temperature: f32,
        /// 1: off.
        pub top_p: f32,
        /// 0: off.
        pub min_p: f32,
        /// 1: off.
        pub repetition: f32,
        pub presence: f32,
        pub frequency: f32,
        /// 0: off.
        pub top_k: u32,
        /// First of the row's edits, and how many.
        pub edit: u32,
        pub edits: u32,
        /// Row of the masks, or `NONE`.
        pub mask: u32,
        /// Above 0: no draw, but so many best tokens before any edit.
        pub leaders: u32,
        /// 1: the log-probability of the token before any edit is asked for.
        pub logprob: u32,
    }
}

plain! {
    /// What is to be done to one token's logit. The tokens of a row's edits differ.
    pub struct Edit {
        pub token: u32,
        /// How often the token is in the output.
        pub outputs: u32,
        /// Minus infinity bans it.
        pub bias: f32,
        /// 1: it is in the prompt or the output.
        pub seen: u32,
    }
}

plain! {
    /// One of a row's best tokens; `NONE` behind the last that there is.
    pub struct Leader {
        pub token: u32,
        pub logprob: f32,
    }
}

plain! {
    /// The argument of `sample_*`. 0 stands for a table that no row refers to.
    pub struct SampleArgs {
        /// Rows of `stride` elements.
        pub logits: DevicePtr,
        /// `Ask`, one to a row.
        pub asks: DevicePtr,
        pub edits: DevicePtr,
        /// u32, rows of `mask_words`: bit t of word w allows token 32 w + t.
        pub masks: DevicePtr,
        /// u32: the answers; `NONE` where nothing is allowed.
        pub tokens: DevicePtr,
        /// f32: natural logarithms.
        pub logprobs: DevicePtr,
        /// `Leader`, `leaders_stride` to a row.
        pub leaders: DevicePtr,
        /// Scratch of `parts_bytes` and `candidates_bytes`.
        pub parts: DevicePtr,
        pub candidates: DevicePtr,
        pub rows: u32,
        pub vocabulary: u32,
        pub stride: u32,
        pub slices: u32,
        pub mask_words: u32,
        pub leaders_stride: u32,
        /// The model's cap of its final logits: they become soft_cap * tanh(logit / soft_cap) before all else. 0: none.
        pub soft_cap: f32,
        pub unused: u32,
    }
}

/// Element type of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    F32,
    Bf16,
    F16,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    #[error("{found} rows of logits; a call can have 1 to {ROWS_MAX}")]
    Rows { found: u32 },
    #[error("a vocabulary of {found} tokens; it can have 1 to {VOCABULARY_MAX}")]
    Vocabulary { found: u32 },
    #[error(
        "rows of logits lie {stride} elements apart; that must be a multiple of {step}, and at least the vocabulary of {vocabulary}"
    )]
    Stride { stride: u32, step: u32, vocabulary: u32 },
    #[error("mask rows have {found} words; {vocabulary} tokens take {expected}")]
    Mask { found: u32, expected: u32, vocabulary: u32 },
    #[error("the soft cap of logits is {found}; it must be 0, for none, or a number above")]
    SoftCap { found: f32 },
    #[error("{what} is {found}; it must be {must}")]
    Ask { what: &'static str, found: f32, must: &'static str },
    #[error("{found} best tokens are asked for; there is room for {room}")]
    Leaders { found: u32, room: u32 },
}

impl Ask {
    /// The first token of the order, and nothing else.
    pub fn greedy() -> Self {
        Self { top_p: 1.0, repetition: 1.0, mask: NONE, ..Self::default() }
    }

    /// Whether the kernels can answer. The caller checks before it puts an ask where they read it.
    pub fn check(&self, leaders_stride: u32) -> Result<(), SampleError> {
        let range = |what, found: f32, good: bool, must| {
            if good { Ok(()) } else { Err(SampleError::Ask { what, found, must }) }
        };
        let heat = self.inverse_temperature;
        range("1 / temperature", heat, heat >= 0.0 && heat.is_finite(), "a number from 0 up")?;
        range("top-p", self.top_p, (0.0..=1.0).contains(&self.top_p), "from 0 to 1")?;
        range("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1")?;
        range(
            "the repetition penalty",
            self.repetition,
            self.repetition > 0.0 && self.repetition.is_finite(),
            "above 0",
        )?;
        range("the presence penalty", self.presence, self.presence.is_finite(), "a number")?;
        range("the frequency penalty", self.frequency, self.frequency.is_finite(), "a number")?;
        let room = leaders_stride.min(LEADERS_MAX);
        if self.leaders > room { Err(SampleError::Leaders { found: self.leaders, room }) } else { Ok(()) }
    }
}

/// Scratch of a call of so many rows.
pub fn parts_bytes(rows: u32) -> u64 {
    u64::from(rows) * u64::from(PARTS) * 48
}

/// Scratch of a call of so many rows.
pub fn candidates_bytes(rows: u32) -> u64 {
    u64::from(rows) * u64::from(PARTS) * LIST * 8
}

/// Two launches. Nothing of them depends on what rows ask for, so one graph replays any mix.
pub fn sample_launches(args: &SampleArgs, logits: Logits) -> Result<[Launch; 2], SampleError> {
    let (rows, vocabulary, stride) = (args.rows, args.vocabulary, args.stride);
    if rows == 0 || rows > ROWS_MAX {
        return Err(SampleError::Rows { found: rows });
    }
    if vocabulary == 0 || vocabulary > VOCABULARY_MAX {
        return Err(SampleError::Vocabulary { found: vocabulary });
    }
    let (step, names) = match logits {
        Logits::F32 => (4, ["sample_scan_f32", "sample_finish_f32"]),
        Logits::Bf16 => (8, ["sample_scan_bf16", "sample_finish_bf16"]),
        Logits::F16 => (8, ["sample_scan_f16", "sample_finish_f16"]),
    };
    if !stride.is_multiple_of(step) || stride < vocabulary {
        return Err(SampleError::Stride { stride, step, vocabulary });
    }
    if !args.soft_cap.is_finite() || args.soft_cap < 0.0 {
        return Err(SampleError::SoftCap { found: args.soft_cap });
    }
    let expected = vocabulary.div_ceil(32);
    if args.masks != 0 && args.mask_words < expected {
        return Err(SampleError::Mask { found: args.mask_words, expected, vocabulary });
    }
    let args = SampleArgs { slices: vocabulary.div_ceil(SLICE), ..*args };
    let launch = |function, ctas, threads| Launch {
        module: "sample",
        function,
        grid: [ctas, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        argument: args.to_bytes(),
        overlaps_previous: true,
    };
    Ok([launch(names[0], rows * args.slices, 256), launch(names[1], rows, 512)])
}

// The kernels declare the same sizes.
const _: () = assert!(Ask::SIZE == 64 && Edit::SIZE == 16 && SampleArgs::SIZE == 104);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_to_a_cta() {
        let args = SampleArgs { rows: 3, vocabulary: 128_256, stride: 128_256, ..SampleArgs::default() };
        let [scan, finish] = sample_launches(&args, Logits::Bf16).unwrap();
        assert_eq!((scan.grid[0], finish.grid[0], finish.function), (48, 3, "sample_finish_bf16"));
    }

    #[test]
    fn refusals_name_both_values() {
        let text = |rows, vocabulary, stride, masks, mask_words| {
            let args = SampleArgs { rows, vocabulary, stride, masks, mask_words, ..SampleArgs::default() };
            sample_launches(&args, Logits::F32).unwrap_err().to_string()
        };
        assert!(text(0, 8, 8, 0, 0).contains("0 rows"));
        assert!(text(1, 300_000, 300_000, 0, 0).contains("300000 tokens"));
        assert!(text(1, 10, 8, 0, 0).contains("8 elements apart"));
        assert!(text(1, 10, 10, 0, 0).contains("multiple of 4"));
        assert!(text(1, 100, 100, 1, 3).contains("3 words; 100 tokens take 4"));
        let capped = SampleArgs { rows: 1, vocabulary: 8, stride: 8, soft_cap: -1.0, ..SampleArgs::default() };
        assert!(sample_launches(&capped, Logits::F32).unwrap_err().to_string().contains("is -1"));
        let check = |ask: Ask| ask.check(20).unwrap_err().to_string();
        assert_eq!(Ask::greedy().check(0), Ok(()));
        assert!(check(Ask { inverse_temperature: f32::INFINITY, ..Ask::greedy() }).contains("1 / temperature is inf"));
        assert!(check(Ask { top_p: f32::NAN, ..Ask::greedy() }).contains("top-p is NaN"));
        assert!(check(Ask { min_p: 1.5, ..Ask::greedy() }).contains("min-p is 1.5"));
        assert!(check(Ask { repetition: 0.0, ..Ask::greedy() }).contains("above 0"));
        assert!(check(Ask { leaders: 21, ..Ask::greedy() }).contains("room for 20"));
    }
}
