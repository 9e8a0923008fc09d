//! Weights as they lie in a file.

/// How a weight is stored. The block types are ggml's: thirty-two values of a row share a scale (and a minimum).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredType {
    F32,
    F16,
    Bf16,
    /// `w = d * q`: `d` f16, 32 signed bytes.
    Q8_0,
    /// `w = d * q + m`: `d`, `m` f16, 32 unsigned half bytes; byte j holds k = j low and k = 16 + j high.
    Q4_1,
}

impl StoredType {
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_1];

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_1 => "Q4_1",
        }
    }

    /// Values that share one block; a row is a whole number of blocks.
    pub fn block_values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_1 => 32,
        }
    }

    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_1 => 20,
        }
    }

    /// Bytes of a row; `columns` is a multiple of [`Self::block_values`].
    pub fn row_bytes(self, columns: usize) -> usize {
        columns / self.block_values() * self.block_bytes()
    }
}

/// In which order a file holds the rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As Hugging Face has them: the rotated pairs of a head are `(i, i + head_dim / 2)`.
    Natural,
    /// As GGUF files of Llama models hold q and k: the pairs of a head stand side by side.
    PairsTogether { head_dim: usize },
}

/// A checked matrix `[rows][columns]` of the file: `bytes` is exactly as long as that says.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    pub stored: StoredType,
    pub rows: usize,
    pub columns: usize,
    pub order: RowOrder,
    pub bytes: &'a [u8],
}

impl<'a> MatrixView<'a> {
    /// The stored row of an output, outputs counted in natural order; `None` behind the last one.
    pub fn row(&self, output: usize) -> Option<&'a [u8]> {
        if output >= self.rows {
            return None;
        }
        let at = match self.order {
            RowOrder::Natural => output,
            RowOrder::PairsTogether { head_dim } => {
                let (head, within) = (output / head_dim, output % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (within % half) + within / half
            }
        };
        let bytes = self.stored.row_bytes(self.columns);
        self.bytes.get(at * bytes..(at + 1) * bytes)
    }
}
