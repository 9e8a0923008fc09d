//! How ggml stores tensor elements: blocks of some elements in some bytes.

use std::fmt;

use serde::Serialize;

macro_rules! ggml_types {
    ($($name:ident = $number:literal, $elements:literal, $bytes:literal, $text:literal;)+) => {
        /// Element type of a GGUF tensor. Knowing its size does not mean that an engine computes with it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub enum GgmlType { $($name,)+ }

        impl GgmlType {
            /// The number that stands in the file; `None` if it is not known here.
            pub const fn from_number(number: u32) -> Option<Self> {
                match number { $($number => Some(Self::$name),)+ _ => None }
            }

            /// Elements in a block; 1 for plain types. Rows are whole blocks.
            pub const fn block_elements(self) -> u64 {
                match self { $(Self::$name => $elements,)+ }
            }

            pub const fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes,)+ }
            }

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

ggml_types! {
    F32 = 0, 1, 4, "F32";
    F16 = 1, 1, 2, "F16";
    Q4_0 = 2, 32, 18, "Q4_0";
    Q4_1 = 3, 32, 20, "Q4_1";
    Q5_0 = 6, 32, 22, "Q5_0";
    Q5_1 = 7, 32, 24, "Q5_1";
    Q8_0 = 8, 32, 34, "Q8_0";
    Q8_1 = 9, 32, 36, "Q8_1";
    Q2K = 10, 256, 84, "Q2_K";
    Q3K = 11, 256, 110, "Q3_K";
    Q4K = 12, 256, 144, "Q4_K";
    Q5K = 13, 256, 176, "Q5_K";
    Q6K = 14, 256, 210, "Q6_K";
    Q8K = 15, 256, 292, "Q8_K";
    I8 = 24, 1, 1, "I8";
    I16 = 25, 1, 2, "I16";
    I32 = 26, 1, 4, "I32";
    I64 = 27, 1, 8, "I64";
    F64 = 28, 1, 8, "F64";
    Bf16 = 30, 1, 2, "BF16";
}

impl GgmlType {
    /// Neither blocks nor integers: values as they are.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::F64)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
