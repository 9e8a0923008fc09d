//! The safetensors header parser over wrong files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod support;

use lorafleet_artifact::{HeaderError, Reason, Safetensors, SafetensorsLimits};
use proptest::prelude::*;
use support::{Files, with_header};

fn parse(bytes: &[u8]) -> Result<Safetensors, HeaderError> {
    Safetensors::parse(bytes, bytes.len() as u64, &SafetensorsLimits::default())
}

#[test]
fn refusals() {
    fn check(json: &str, data_bytes: usize, reason: Reason, message: &str) {
        let file = with_header(json.as_bytes(), &vec![0; data_bytes]);
        match parse(&file) {
            Err(HeaderError::Refused(refusal)) => {
                assert_eq!(refusal.reason, reason, "{json}: {refusal}");
                assert!(refusal.message.contains(message), "{json}: {refusal}");
            }
            other => panic!("{json}: {other:?}"),
        }
    }
    use Reason::{Malformed, UnsupportedFeature};
    let tensor = |range: &str| format!(r#"{{"dtype": "F32", "shape": [2], "data_offsets": {range}}}"#);
    let (first, second) = (tensor("[0, 8]"), tensor("[8, 16]"));
    check("", 0, Malformed, "does not start with '{'");
    check("[]", 0, Malformed, "does not start with '{'");
    check(" {}", 0, Malformed, "does not start with '{'");
    check("{", 0, Malformed, "not valid JSON");
    check("{} x", 0, Malformed, "not valid JSON");
    check("{\"a\": 3}", 0, Malformed, "not valid JSON");
    check("{\"__metadata__\": {\"a\": 3}}", 0, Malformed, "expected a string");
    check(&format!("{{\"a\": {first}, \"a\": {second}}}"), 16, Malformed, "'a' stands twice");
    check(r#"{"a": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}"#, 8, Malformed, "twice");
    check(&format!("{{\"a\": {first}, \"b\": {}}}", tensor("[4, 12]")), 12, Malformed, "overlap");
    check(&format!("{{\"a\": {first}, \"b\": {first}}}"), 8, Malformed, "overlap");
    check(&format!("{{\"a\": {first}, \"b\": {}}}", tensor("[12, 20]")), 20, Malformed, "belong to no tensor");
    check(&format!("{{\"a\": {second}}}"), 16, Malformed, "belong to no tensor");
    check(&format!("{{\"a\": {first}, \"b\": {second}}}"), 15, Malformed, "ends early");
    check(&format!("{{\"a\": {first}, \"b\": {second}}}"), 17, Malformed, "the tensors end at 16");
    check("{}", 1, Malformed, "the tensors end at 0");
    check(&format!("{{\"a\": {}}}", tensor("[8, 0]")), 8, Malformed, "needs 8 bytes");
    check(&format!("{{\"a\": {}}}", tensor("[0, 9]")), 9, Malformed, "needs 8 bytes");
    check(&format!("{{\"a\": {}}}", tensor("[-8, 0]")), 8, Malformed, "data_offsets");
    check(&format!("{{\"a\": {}}}", tensor("[0]")), 8, Malformed, "data_offsets");
    check(&format!("{{\"a\": {}}}", tensor("[0, 1e99]")), 8, Malformed, "data_offsets");
    let shape = r#"{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}"#;
    check(shape, 0, Malformed, "more than 2^64");
    let shape = r#"{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}"#;
    check(shape, 0, Malformed, "more than 2^64");
    check(
        r#"{"a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,2], "data_offsets": [0, 8]}}"#,
        8,
        Malformed,
        "9 dimensions",
    );
    check(r#"{"a": {"shape": [2], "data_offsets": [0, 8]}}"#, 8, Malformed, "no 'dtype'");
    check(r#"{"a": {"dtype": "F32", "data_offsets": [0, 8]}}"#, 8, Malformed, "no 'shape'");
    check(r#"{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}"#, 8, UnsupportedFeature, "'F4'");
    check(&format!("{{\"{}\": {first}}}", "a".repeat(2000)), 8, Malformed, "2000 bytes");
    let deep = "[".repeat(100_000);
    check(&format!("{{\"a\": {deep}"), 0, Malformed, "not valid JSON");
}

#[test]
fn lengths() {
    let refused = |bytes: &[u8]| match parse(bytes) {
        Err(HeaderError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert!(refused(&[]).message.contains("has 0"));
    assert!(refused(&[0; 7]).message.contains("has 7"));
    assert!(refused(&(1_u64 << 60).to_le_bytes()).message.contains("1152921504606846976"));
    assert!(refused(&u64::MAX.to_le_bytes()).message.contains("18446744073709551615"));
    // A header that the file could hold, but that is larger than any adapter's.
    let claim = (64_u64 << 20).to_le_bytes();
    let Err(HeaderError::Refused(refusal)) = Safetensors::parse(&claim, 1 << 40, &SafetensorsLimits::default()) else {
        panic!("accepted");
    };
    assert_eq!(refusal.reason, Reason::TooLarge);
    let incomplete = Safetensors::parse(&100_u64.to_le_bytes(), 1000, &SafetensorsLimits::default());
    assert_eq!(incomplete, Err(HeaderError::Incomplete { bytes: 108 }));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), claimed in any::<u64>()) {
        let _ = Safetensors::parse(&bytes, claimed, &SafetensorsLimits::default());
        let _ = parse(&with_header(&bytes, &[]));
    }

    /// One changed byte in the header: refused, or still a partition of the data section.
    #[test]
    fn damaged_headers(at in 0_usize..1200, value in any::<u8>()) {
        let mut bytes = Files::of_case("plain-r8-qv").weights;
        bytes[at] = value;
        if let Ok(header) = parse(&bytes) {
            let covered: u64 = header.tensors.iter().map(|tensor| tensor.range.end - tensor.range.start).sum();
            prop_assert_eq!(covered, header.data_bytes);
        }
    }

    #[test]
    fn every_cut_is_refused(cut in 0_usize..15_368) {
        let bytes = Files::of_case("plain-r8-qv").weights;
        prop_assert!(parse(&bytes[..cut]).is_err());
    }
}
