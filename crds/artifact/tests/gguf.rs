//! The GGUF header parser over hand-made files and over damaged ones.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

use lorafleet_artifact::Reason;
use lorafleet_artifact::gguf::{GgmlType, Gguf, GgufLimits, HeaderError, Value};
use proptest::prelude::*;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Name, dimensions as the file stores them, type number, offset.
type Info<'a> = (&'a str, &'a [u64], u32, u64);

struct File {
    version: u32,
    entries: Vec<(&'static str, u32, Vec<u8>)>,
    infos: Vec<Info<'static>>,
    data_bytes: usize,
}

impl File {
    fn plain() -> Self {
        let mut tokens = 8_u32.to_le_bytes().to_vec();
        tokens.extend(2_u64.to_le_bytes());
        text(&mut tokens, "a");
        text(&mut tokens, "b");
        let mut architecture = Vec::new();
        text(&mut architecture, "llama");
        Self {
            version: 3,
            entries: vec![
                ("general.architecture", 8, architecture),
                ("llama.block_count", 4, 2_u32.to_le_bytes().to_vec()),
                ("llama.rope.freq_base", 6, 1e5_f32.to_le_bytes().to_vec()),
                ("tokenizer.ggml.tokens", 9, tokens),
            ],
            infos: vec![("x", &[64, 2], 3, 0), ("norm", &[8], 0, 96)],
            data_bytes: 128,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.infos.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, number, value) in &self.entries {
            text(&mut out, key);
            out.extend(number.to_le_bytes());
            out.extend(value);
        }
        for (name, shape, number, offset) in &self.infos {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(number.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32) + self.data_bytes, 0);
        out
    }
}

fn parse(bytes: &[u8]) -> Result<Gguf, HeaderError> {
    Gguf::parse(bytes, bytes.len() as u64, &GgufLimits::default())
}

#[test]
fn a_whole_header() {
    let bytes = File::plain().bytes();
    let header = parse(&bytes).unwrap();
    assert_eq!(header.string("general.architecture"), Some("llama"));
    assert_eq!(header.u32("llama.block_count"), Some(2));
    assert_eq!(header.f32("llama.rope.freq_base"), Some(1e5));
    assert_eq!(header.strings("tokenizer.ggml.tokens").unwrap(), ["a", "b"]);
    assert_eq!(header.metadata["llama.block_count"], Value::U32(2));
    let x = header.tensor("x").unwrap();
    assert_eq!((x.shape.as_slice(), x.kind, x.bytes), ([2, 64].as_slice(), GgmlType::Q4_1, 80));
    assert_eq!((x.offset, x.offset % 32), (header.data_start, 0));
    assert_eq!(header.tensor("norm").unwrap().offset, header.data_start + 96);
}

#[test]
fn a_prefix_says_how_much_it_needs() {
    let bytes = File::plain().bytes();
    let (mut have, mut rounds) = (0, 0);
    let header = loop {
        match Gguf::parse(&bytes[..have], bytes.len() as u64, &GgufLimits::default()) {
            Ok(header) => break header,
            Err(HeaderError::Incomplete { bytes: needed }) => {
                assert!(needed > have as u64);
                have = needed as usize;
            }
            Err(error) => panic!("{error}"),
        }
        rounds += 1;
        assert!(rounds < 100);
    };
    assert_eq!(header, parse(&bytes).unwrap());
}

#[test]
fn refusals() {
    fn check(change: impl FnOnce(&mut File), reason: Reason, message: &str) {
        let mut file = File::plain();
        change(&mut file);
        match parse(&file.bytes()) {
            Err(HeaderError::Refused(refusal)) => {
                assert_eq!(refusal.reason, reason, "{}", refusal.message);
                assert!(refusal.message.contains(message), "{}", refusal.message);
            }
            other => panic!("expected {reason} '{message}', got {other:?}"),
        }
    }
    use Reason::{Malformed, TooLarge, UnsupportedFeature};
    check(|file| file.version = 1, UnsupportedFeature, "version 1");
    check(|file| file.version = 3_u32.swap_bytes(), UnsupportedFeature, "big-endian");
    check(|file| file.version = 9, Malformed, "version 9");
    check(|file| file.entries.push(file.entries[1].clone()), Malformed, "'llama.block_count' stands twice");
    check(|file| file.entries[1].1 = 13, Malformed, "value type 13");
    check(|file| file.entries[1] = ("flag", 7, vec![2]), Malformed, "boolean 2");
    check(|file| file.entries[1] = ("general.alignment", 4, 24_u32.to_le_bytes().to_vec()), Malformed, "24");
    check(|file| file.infos.push(("x", &[8], 0, 96)), Malformed, "'x' stands twice");
    check(|file| file.infos[0].1 = &[63, 2], Malformed, "63 elements");
    check(|file| file.infos[0].1 = &[64, 0], Malformed, "impossible shape");
    check(|file| file.infos[0].1 = &[1 << 40, 1 << 40], Malformed, "impossible shape");
    check(|file| file.infos[0].1 = &[], Malformed, "0 dimensions");
    check(|file| file.infos[0].2 = 4, UnsupportedFeature, "ggml type 4");
    check(|file| file.infos[0].3 = 8, Malformed, "not aligned");
    check(|file| file.infos[1].3 = 64, Malformed, "'x' and 'norm' overlap");
    check(|file| file.data_bytes = 100, Malformed, "'norm' needs 32 bytes");
    check(|file| file.infos[1].3 = u64::MAX - 31, Malformed, "needs 32 bytes");
    let mut strings = 8_u32.to_le_bytes().to_vec();
    strings.extend((1_u64 << 60).to_le_bytes());
    check(|file| file.entries[3].2 = strings, TooLarge, "1152921504606846976 array elements");
}

#[test]
fn counts_are_limited() {
    let mut bytes = File::plain().bytes();
    bytes[8..16].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    let Err(HeaderError::Refused(refusal)) = parse(&bytes) else { panic!("accepted") };
    assert_eq!(refusal.reason, Reason::TooLarge);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), claimed in any::<u64>()) {
        let _ = Gguf::parse(&bytes, claimed, &GgufLimits::default());
        let _ = parse(&bytes);
    }

    /// One changed byte is either refused with a type or still gives an inventory that lies inside the file.
    #[test]
    fn damaged_files(at in 0_usize..500, value in any::<u8>()) {
        let mut bytes = File::plain().bytes();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(header) = parse(&bytes) {
            for tensor in &header.tensors {
                prop_assert!(tensor.offset + tensor.bytes <= bytes.len() as u64);
            }
        }
    }

    #[test]
    fn every_cut_is_refused(cut in 0_usize..10_000) {
        let bytes = File::plain().bytes();
        prop_assert!(parse(&bytes[..cut % bytes.len()]).is_err());
    }
}
