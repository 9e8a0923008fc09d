//! The adapters of the demo are what the demo needs: two that fit SmolLM2 and one that is refused for its base.

#![allow(clippy::panic, clippy::unwrap_used)] // Helpers of tests may say what they expect plainly.

use std::path::{Path, PathBuf};

use lorafleet_artifact::gguf::{Gguf, GgufLimits};
use lorafleet_artifact::{BaseShape, Claims, Digest, Policy, Reason, Refusal, Verification, Verified, digest_of_files};
use sha2::{Digest as _, Sha256};

fn judge(name: &str, policy: &Policy, base: &BaseShape) -> Result<Verified, Refusal> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/demo/adapters").join(name);
    let config = std::fs::read(folder.join("adapter_config.json")).unwrap();
    let weights = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let mut verification = Verification::begin(&config, weights.len() as u64, Claims::default(), base, policy)?;
    for piece in weights.chunks(65_536) {
        verification.push(piece)?;
    }
    verification.finish()
}

fn check_served(name: &str, rank: u32, modules: usize, policy: &Policy, base: &BaseShape) {
    let verified = judge(name, policy, base).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
    assert_eq!(verified.fitted.rank_max(), rank, "{name}");
    assert_eq!(verified.fitted.modules.len(), modules, "{name}");
    assert!(verified.weights_bytes < 4 << 20, "{name} has {} bytes", verified.weights_bytes);
}

#[test]
#[ignore = "needs LORAFLEET_TEST_GGUF"]
fn demo_adapters_are_judged_as_the_demo_tells() {
    let path = std::env::var_os("LORAFLEET_TEST_GGUF").map(PathBuf::from);
    let path = path.expect("LORAFLEET_TEST_GGUF is the path of SmolLM2-135M-Instruct.Q4_1.gguf");
    let bytes = std::fs::read(&path).unwrap();
    let header = Gguf::parse(&bytes, bytes.len() as u64, &GgufLimits::default()).unwrap();
    let base = BaseShape::from_gguf(&header).unwrap();
    let file = path.file_name().unwrap().to_str().unwrap().to_owned();
    let digest: Digest = digest_of_files(&[(file, Sha256::digest(&bytes).into())].into());
    let policy = Policy { identities: vec![digest], ..Policy::default() };

    check_served("tickets", 8, 2 * 30, &policy, &base);
    check_served("pirate", 16, 3 * 30, &policy, &base);
    let refusal = judge("stranger", &policy, &base).unwrap_err();
    assert_eq!(refusal.reason, Reason::BaseMismatch);
    assert!(refusal.to_string().contains(&digest.to_string()), "{refusal}");
    // Even where no base is named, it does not pass: it holds tensors for 2 of the 30 layers that it claims to change.
    let lenient = Policy::default();
    let refusal = judge("stranger", &lenient, &base).unwrap_err();
    assert_eq!(refusal.reason, Reason::Malformed, "{refusal}");
}
