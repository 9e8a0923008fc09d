//! `inspect` and `stamp` as people call them.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::path::{Path, PathBuf};

use lorafleet_engine::inspect::{InspectArguments, StampArguments, inspect, stamp};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/artifact/tests/cases").canonicalize().unwrap()
}

async fn run(adapters: &[PathBuf], model: Option<&str>, json: bool) -> (bool, String) {
    let adapters = adapters.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let model = model.map(|model| cases().join(model).to_str().unwrap().to_owned());
    let mut out = Vec::new();
    let accepted = inspect(&InspectArguments { adapters, model, json }, &mut out).await.unwrap();
    (accepted, String::from_utf8(out).unwrap())
}

#[tokio::test]
async fn a_table() {
    let adapters = ["plain-r8-qv", "rank-pattern", "extra-base-copy"].map(|case| cases().join(case));
    let (accepted, table) = run(&adapters, Some("base"), false).await;
    assert!(accepted, "{table}");
    for part in [
        "ADAPTER          DIGEST        BASE  RANK  MODULES",
        "plain-r8-qv      ",
        "  8     4: q v  ",
        "  16    14: down=7 gate=4 k=4 o=4 q=4,16 up=4 v=4  ",
        "  F32   15.0 KiB  149796   accepted, names no base\n",
        "plain-r8-qv: accepted, but\n  it does not say for which base it was made",
    ] {
        assert!(table.contains(part), "'{part}' is not in\n{table}");
    }
    assert_eq!(table.split("\n\n").next().unwrap().lines().count(), 4);
}

#[tokio::test]
async fn refusals_say_why() {
    let adapters = ["plain-r8-qv", "wrong-hidden", "pickle-only"].map(|case| cases().join(case));
    let (accepted, table) = run(&adapters, Some("base"), false).await;
    assert!(!accepted);
    assert!(table.contains("refused: ShapeMismatch") && table.contains("[8, 80]"), "{table}");
    assert!(table.contains("refused: UnsupportedFeature") && table.contains("adapter_model.bin"), "{table}");
    // Without a base, only what is wrong in itself.
    let (accepted, table) = run(&adapters[..2], None, false).await;
    assert!(accepted && table.contains("well-formed"), "{table}");
    let (accepted, table) = run(&[cases().join("truncated")], None, false).await;
    assert!(!accepted && table.contains("Malformed"), "{table}");
    let (accepted, table) = run(&[cases().join("nothing-here")], None, false).await;
    assert!(!accepted && table.contains("NotFound"), "{table}");
}

#[tokio::test]
async fn json() {
    let (accepted, text) = run(&[cases().join("r1-all"), cases().join("b-rows")], Some("base"), true).await;
    assert!(!accepted);
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found[0]["verdict"], "accepted");
    assert_eq!((found[0]["rank"].as_u64(), found[0]["modules"].as_u64()), (Some(1), Some(14)));
    // 2 layers x (128 + 2 x 96 + 128 + 3 x 192) elements of two bytes.
    assert_eq!(found[0]["adapterBytes"].as_u64(), Some(4096));
    assert_eq!(found[0]["perGib"].as_u64(), Some((1 << 30) / 4096));
    assert_eq!((&found[1]["verdict"], &found[1]["reason"]), (&"refused".into(), &"ShapeMismatch".into()));
}

fn copy_of(case: &str, root: &Path) -> PathBuf {
    let folder = root.join(case);
    std::fs::create_dir(&folder).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(cases().join(case).join(name), folder.join(name)).unwrap();
    }
    folder
}

#[tokio::test]
async fn a_stamp_names_the_base_and_changes_no_weight() {
    let root = tempfile::tempdir().unwrap();
    let folder = copy_of("plain-r8-qv", root.path());
    let base = cases().join("base").to_str().unwrap().to_owned();
    let mut out = Vec::new();
    stamp(&StampArguments { adapter: folder.clone(), base: base.clone() }, &mut out).await.unwrap();
    let out = String::from_utf8(out).unwrap();
    let digest = out.split("base     ").nth(1).unwrap().lines().next().unwrap();
    assert!(digest.starts_with("sha256:"), "{out}");
    // The same data section; nothing left beside it.
    let (old, new) = (cases().join("plain-r8-qv"), folder.clone());
    let read = |folder: PathBuf| std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let (old, new) = (read(old), read(new));
    let data = |bytes: &[u8]| bytes[8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize..].to_vec();
    assert_eq!(data(&old), data(&new));
    assert_eq!((new.len() - data(&new).len()) % 8, 0);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    // It is accepted with its claim for that base and refused for another one, although the shapes fit.
    let (accepted, table) = run(std::slice::from_ref(&folder), Some("base"), false).await;
    assert!(accepted && table.contains(&digest["sha256:".len()..][..12]), "{table}");
    assert!(table.ends_with("  accepted\n"), "{table}");
    let (accepted, table) = run(std::slice::from_ref(&folder), Some("base-tied"), false).await;
    assert!(!accepted && table.contains("BaseMismatch"), "{table}");
    // Again: the same file.
    stamp(&StampArguments { adapter: folder.clone(), base: base.clone() }, &mut Vec::new()).await.unwrap();
    assert_eq!(read(folder), new);
    // What does not fit is not stamped.
    let folder = copy_of("wrong-hidden", root.path());
    let error = stamp(&StampArguments { adapter: folder.clone(), base }, &mut Vec::new()).await.unwrap_err();
    assert!(format!("{error:#}").contains("ShapeMismatch"), "{error:#}");
    assert_eq!(read(folder), read(cases().join("wrong-hidden")));
}
