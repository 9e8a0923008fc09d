//! What a Llama-architecture decoder is made of. Pure.

use lorafleet_artifact::{Architecture, BaseShape, ModuleKind};

/// Sizes of the decoder. Every matrix dimension that is summed over is a multiple of sixteen.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub vocabulary: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// The head is the embedding.
    pub tied: bool,
}

/// Rotary position embedding over the whole head.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f32,
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Low frequencies divided by `factor`, high ones kept, those between interpolated
    /// (`_compute_llama3_parameters` of transformers).
    Llama3 {
        factor: f32,
        low: f32,
        high: f32,
        original_context: f32,
    },
    /// The divisor of each frequency, as a GGUF file gives them in `rope_freqs.weight`.
    Divisors(Vec<f32>),
}

/// Upper bounds on what a file may claim, so that a wrong number is an error and not an allocation.
const BOUNDS: [(&str, usize); 8] = [
    ("vocabulary size", 4 << 20),
    ("hidden size", 1 << 17),
    ("number of layers", 1 << 12),
    ("number of heads", 1 << 12),
    ("number of KV heads", 1 << 12),
    ("head size", 1 << 12),
    ("feed-forward size", 1 << 20),
    ("context length", 1 << 26),
];

impl Shape {
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// `(outputs, inputs)` of a linear module.
    pub fn width(&self, kind: ModuleKind) -> (usize, usize) {
        let (hidden, query, kv) = (self.hidden, self.query_width(), self.kv_width());
        match kind {
            ModuleKind::Q => (query, hidden),
            ModuleKind::K | ModuleKind::V => (kv, hidden),
            ModuleKind::O => (hidden, query),
            ModuleKind::Gate | ModuleKind::Up => (self.ffn, hidden),
            ModuleKind::Down => (hidden, self.ffn),
            ModuleKind::LmHead => (self.vocabulary, hidden),
        }
    }

    /// What adapters are checked against.
    pub fn base(&self) -> BaseShape {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        BaseShape {
            architecture: Architecture::Llama,
            layers: number(self.layers),
            hidden: number(self.hidden),
            heads: number(self.heads),
            kv_heads: number(self.kv_heads),
            head_dim: number(self.head_dim),
            ffn: number(self.ffn),
            vocab: number(self.vocabulary),
            tied: self.tied,
            parameters: self.parameters(),
        }
    }

    /// Keys and values of one token in all layers, in f32.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.layers * self.kv_width() * size_of::<f32>()) as u64
    }

    /// Weights in all, a tied head counted once.
    pub fn parameters(&self) -> u64 {
        let attention = 2 * self.hidden * (self.query_width() + self.kv_width());
        let layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden;
        let embeddings = self.vocabulary * self.hidden * if self.tied { 1 } else { 2 };
        (self.layers * layer + embeddings + self.hidden) as u64
    }

    /// The first thing that this engine cannot compute with, in words.
    ///
    /// # Errors
    /// Which number is wrong, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let numbers = [
            self.vocabulary,
            self.hidden,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.ffn,
            self.context,
        ];
        for ((name, bound), number) in BOUNDS.iter().zip(numbers) {
            if number == 0 || number > *bound {
                return Err(format!("{name} is {number}, it must be in 1..={bound}"));
            }
        }
        for (name, number) in
            [("hidden size", self.hidden), ("head size", self.head_dim), ("feed-forward size", self.ffn)]
        {
            if !number.is_multiple_of(16) {
                return Err(format!("{name} is {number}, it must be a multiple of 16"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads evenly", self.heads, self.kv_heads));
        }
        let epsilon = self.norm_epsilon;
        if !(epsilon.is_finite() && epsilon > 0.0) {
            return Err(format!("the norm's epsilon is {epsilon}, it must be finite and above 0"));
        }
        self.rope.check(self.head_dim)
    }
}

impl Rope {
    fn check(&self, head_dim: usize) -> Result<(), String> {
        let positive = |name: &str, value: f32| {
            let fine = value.is_finite() && value > 0.0;
            if fine { Ok(()) } else { Err(format!("rope {name} is {value}, it must be finite and above 0")) }
        };
        positive("theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Llama3 { factor, low, high, original_context } => {
                positive("factor", *factor)?;
                positive("low_freq_factor", *low)?;
                positive("original context", *original_context)?;
                if high > low {
                    Ok(())
                } else {
                    Err(format!("rope high_freq_factor is {high}, it must be above low_freq_factor {low}"))
                }
            }
            RopeScaling::Divisors(divisors) if divisors.len() == head_dim / 2 => {
                divisors.iter().try_for_each(|divisor| positive("divisor", *divisor))
            }
            RopeScaling::Divisors(divisors) => {
                Err(format!("{} rope divisors for {} frequencies", divisors.len(), head_dim / 2))
            }
        }
    }

    /// Angle per position of each of the `head_dim / 2` pairs, computed in single precision as transformers does.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let plain = (0..head_dim / 2).map(|i| 1.0 / self.theta.powf((2 * i) as f32 / head_dim as f32));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Divisors(divisors) => plain.zip(divisors).map(|(frequency, by)| frequency / by).collect(),
            RopeScaling::Llama3 { factor, low, high, original_context } => plain
                .map(|frequency| {
                    let wavelength = 2.0 * std::f32::consts::PI / frequency;
                    if wavelength < original_context / high {
                        frequency
                    } else if wavelength > original_context / low {
                        frequency / factor
                    } else {
                        let smooth = (original_context / wavelength - low) / (high - low);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                })
                .collect(),
        }
    }
}
