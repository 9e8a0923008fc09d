//! Adapters into host memory: from files, over the disk cache, and with copies of the base's tensors.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use lorafleet_artifact::safetensors::{Safetensors, SafetensorsLimits};
use lorafleet_artifact::{BaseShape, Claims, Digest, FloatType, HuggingFaceConfig, Policy, SourceUri};
use lorafleet_engine::adapter::{BaseTensors, DiskCache, Exactness, LoadError, LoadedAdapter, Loader, Origin, Rooms};
use lorafleet_engine::inspect::{InspectArguments, inspect};
use lorafleet_source::{Access, Progress, ReadLimits, Sources};
use tokio::sync::{Semaphore, oneshot};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/artifact/tests/cases").canonicalize().unwrap()
}

fn shape(base: &str) -> BaseShape {
    let config = std::fs::read(cases().join(base).join("config.json")).unwrap();
    BaseShape::from_config(&HuggingFaceConfig::parse(&config).unwrap()).unwrap()
}

/// A base's safetensors file as the oracle of its own weights.
struct FileTensors {
    bytes: Vec<u8>,
    header: Safetensors,
    /// What is said of the values that are handed out.
    exactness: Exactness,
    /// Added to each value.
    offset: f32,
}

impl FileTensors {
    fn of(base: &str) -> Self {
        let bytes = std::fs::read(cases().join(base).join("model.safetensors")).unwrap();
        let header = Safetensors::parse(&bytes, bytes.len() as u64, &SafetensorsLimits::default()).unwrap();
        Self { bytes, header, exactness: Exactness::Stored(FloatType::F32), offset: 0.0 }
    }
}

impl BaseTensors for FileTensors {
    fn row(&self, name: &str, row: usize, out: &mut [f32]) -> Option<Exactness> {
        let tied = (name == "lm_head.weight").then(|| self.header.tensor("model.embed_tokens.weight")).flatten();
        let tensor = self.header.tensor(name).or(tied)?;
        let start = (self.header.data_start + tensor.range.start) as usize + row * out.len() * 4;
        let values = self.bytes.get(start..start + out.len() * 4)?;
        for (out, value) in out.iter_mut().zip(values.chunks_exact(4)) {
            *out = f32::from_le_bytes(value.try_into().unwrap()) + self.offset;
        }
        Some(self.exactness)
    }
}

fn loader(root: &Path, base: &str, disk: Option<DiskCache>) -> Loader {
    let prefix: SourceUri = root.to_str().unwrap().parse().unwrap();
    Loader {
        sources: Sources::new([Access::ambient(prefix)], ReadLimits::default()),
        base: shape(base),
        policy: Policy { require_base_digest: false, ..Policy::default() },
        tensors: Some(Arc::new(FileTensors::of(base))),
        disk,
        rooms: Rooms::new(1 << 30),
        judges: Arc::new(Semaphore::new(2)),
    }
}

async fn load(loader: &Loader, folder: &Path, expected: Option<Digest>) -> Result<LoadedAdapter, LoadError> {
    let claims = Claims { digest: expected, base_digest: None };
    loader.load(folder.to_str().unwrap(), claims, &Progress::default()).await
}

#[tokio::test]
async fn every_case() {
    for entry in std::fs::read_dir(cases()).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(case) = std::fs::read(folder.join("case.json")) else { continue };
        let case: serde_json::Value = serde_json::from_slice(&case).unwrap();
        let loader = loader(&cases(), case["base"].as_str().unwrap(), None);
        let loaded = load(&loader, &folder, None).await;
        match case["expect"].as_str().unwrap() {
            "serve" => {
                let loaded = loaded.unwrap_or_else(|error| panic!("{folder:?}: {error}"));
                let last = loaded.adapter.fitted.modules.iter().map(|module| module.b.range.end).max();
                assert!(last.unwrap() <= loaded.adapter.bytes.len() as u64);
            }
            "refuse" => {
                let error = loaded.unwrap_err();
                assert_eq!((error.code(), error.http_status()), (case["reason"].as_str().unwrap(), 422), "{folder:?}");
                assert!(!error.is_transient());
            }
            _ => assert_eq!(loaded.unwrap_err().code(), "UnsupportedFeature"),
        }
    }
}

#[tokio::test]
async fn what_is_not_there_or_not_allowed() {
    let loader = loader(&cases().join("merge-a"), "base", None);
    let check = async |path: &str, status: u16, code: &str| {
        let error = loader.load(path, Claims::default(), &Progress::default()).await.unwrap_err();
        assert_eq!((error.http_status(), error.code()), (status, code), "{path}: {error}");
    };
    let inside = cases().join("merge-a/missing");
    check(inside.to_str().unwrap(), 404, "NotFound").await;
    check(cases().join("merge-b").to_str().unwrap(), 403, "SourceForbidden").await;
    check("relative/path", 403, "SourceForbidden").await;
    check("/etc", 403, "SourceForbidden").await;
    check(&format!("{}/../merge-b", cases().join("merge-a").display()), 403, "SourceForbidden").await;
    check(&format!("{}/%2e%2e/merge-b", cases().join("merge-a").display()), 403, "SourceForbidden").await;
    check("s3://bucket/x", 403, "SourceForbidden").await;
}

/// A folder that holds a copy of a case.
fn copy_of(case: &str, root: &Path) -> PathBuf {
    let folder = root.join(case);
    std::fs::create_dir(&folder).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(cases().join(case).join(name), folder.join(name)).unwrap();
    }
    folder
}

#[tokio::test]
async fn the_disk_cache_serves_what_the_source_no_longer_has() {
    let root = tempfile::tempdir().unwrap();
    let disk_root = root.path().join("cache");
    let folder = copy_of("plain-r8-qv", root.path());
    let with_disk = || loader(root.path(), "base", Some(DiskCache::open(&disk_root, 1 << 20).unwrap()));
    let first = load(&with_disk(), &folder, None).await.unwrap();
    assert_eq!((first.origin, first.on_disk), (Origin::Source, true));
    let digest = first.adapter.digest;
    std::fs::remove_dir_all(&folder).unwrap();
    // Another process with the same disk.
    let second = load(&with_disk(), &folder, Some(digest)).await.unwrap();
    assert_eq!(second.origin, Origin::Disk);
    assert_eq!(second.adapter.bytes, first.adapter.bytes);
    assert_eq!(second.adapter.fitted, first.adapter.fitted);
    // Without the digest, only the source can say what is meant.
    assert_eq!(load(&with_disk(), &folder, None).await.unwrap_err().http_status(), 404);
}

/// The same adapter with every tensor stored as F64, which single precision holds exactly.
fn store_as_doubles(folder: &Path) {
    let path = folder.join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = Safetensors::parse(&bytes, bytes.len() as u64, &SafetensorsLimits::default()).unwrap();
    let (mut described, mut data) = (serde_json::Map::new(), Vec::new());
    for tensor in &header.tensors {
        let start = data.len();
        let stored = (header.data_start + tensor.range.start) as usize..(header.data_start + tensor.range.end) as usize;
        for value in bytes[stored].chunks_exact(4) {
            data.extend(f64::from(f32::from_le_bytes(value.try_into().unwrap())).to_le_bytes());
        }
        let place = serde_json::json!({"dtype": "F64", "shape": tensor.shape, "data_offsets": [start, data.len()]});
        described.insert(tensor.name.clone(), place);
    }
    let described = serde_json::to_vec(&described).unwrap();
    std::fs::write(path, [&(described.len() as u64).to_le_bytes()[..], &described, &data].concat()).unwrap();
}

#[tokio::test]
async fn doubles_are_rounded_when_they_are_loaded() {
    // One of them carries a copy of a tensor of its base.
    for (case, base) in [("plain-r8-qv", "base"), ("lm-head-tied", "base-tied")] {
        let root = tempfile::tempdir().unwrap();
        let folder = copy_of(case, root.path());
        let loader = || loader(root.path(), base, Some(DiskCache::open(root.path().join("cache"), 1 << 20).unwrap()));
        let plain = load(&loader(), &folder, None).await.unwrap().adapter;
        store_as_doubles(&folder);
        let from_source = load(&loader(), &folder, None).await.unwrap();
        let digest = from_source.adapter.digest;
        assert_ne!(digest, plain.digest, "the bytes are others");
        let from_disk = load(&loader(), &folder, Some(digest)).await.unwrap();
        assert_eq!((from_source.origin, from_disk.origin), (Origin::Source, Origin::Disk));
        let (model, mut told) = (cases().join(base).to_str().unwrap().to_owned(), Vec::new());
        let adapters = vec![folder.to_str().unwrap().to_owned()];
        let arguments = InspectArguments { adapters, model: Some(model), json: false };
        assert!(inspect(&arguments, &mut told).await.unwrap(), "{}", String::from_utf8_lossy(&told));
        for loaded in [from_source.adapter, from_disk.adapter] {
            assert_eq!(loaded.fitted.modules.len(), plain.fitted.modules.len());
            for (found, expected) in loaded.fitted.modules.iter().zip(&plain.fitted.modules) {
                for (found, expected) in [(&found.a, &expected.a), (&found.b, &expected.b)] {
                    assert_eq!(found.dtype, expected.dtype);
                    assert_eq!(loaded.tensor(&found.range), plain.tensor(&expected.range), "{}", found.name);
                }
            }
        }
    }
}

#[tokio::test]
async fn a_damaged_copy_on_disk_is_fetched_again() {
    let root = tempfile::tempdir().unwrap();
    let disk_root = root.path().join("cache");
    let folder = copy_of("plain-r8-qv", root.path());
    let loader = loader(root.path(), "base", Some(DiskCache::open(&disk_root, 1 << 20).unwrap()));
    let digest = load(&loader, &folder, None).await.unwrap().adapter.digest;
    let copy = disk_root.join(digest.hex()).join("adapter_model.safetensors");
    for damage in 0..3 {
        let mut bytes = std::fs::read(&copy).unwrap();
        match damage {
            0 => *bytes.last_mut().unwrap() ^= 1,
            1 => bytes.truncate(9000),
            _ => bytes.clear(),
        }
        std::fs::write(&copy, bytes).unwrap();
        let again = load(&loader, &folder, Some(digest)).await.unwrap();
        assert_eq!((again.origin, again.on_disk), (Origin::Source, true), "damage {damage}");
        assert_eq!(load(&loader, &folder, Some(digest)).await.unwrap().origin, Origin::Disk);
    }
}

#[tokio::test]
async fn a_wrong_digest_is_refused_and_not_kept() {
    let root = tempfile::tempdir().unwrap();
    let folder = copy_of("plain-r8-qv", root.path());
    let loader = loader(root.path(), "base", Some(DiskCache::open(root.path().join("cache"), 1 << 20).unwrap()));
    let error = load(&loader, &folder, Some(Digest::from_bytes([7; 32]))).await.unwrap_err();
    assert_eq!((error.code(), error.http_status()), ("DigestMismatch", 422));
    assert_eq!(loader.disk.as_ref().unwrap().used_bytes(), 0);
    assert_eq!(std::fs::read_dir(root.path().join("cache")).unwrap().count(), 0);
}

#[tokio::test]
async fn the_disk_budget_holds_and_the_longest_unused_goes() {
    let root = tempfile::tempdir().unwrap();
    let disk_root = root.path().join("cache");
    std::fs::create_dir_all(disk_root.join(".unfinished-0123")).unwrap();
    std::fs::write(disk_root.join("7".repeat(64)), "no folder").unwrap();
    let folders = ["merge-a", "merge-b", "plain-r8-qv"].map(|case| copy_of(case, root.path()));
    // Room for two.
    let budget = 2 * (15_368 + 1042);
    let loader = loader(root.path(), "base", Some(DiskCache::open(&disk_root, budget).unwrap()));
    let disk = loader.disk.as_ref().unwrap();
    let first = load(&loader, &folders[0], None).await.unwrap().adapter.digest;
    let second = load(&loader, &folders[1], None).await.unwrap().adapter.digest;
    assert_eq!(load(&loader, &folders[0], Some(first)).await.unwrap().origin, Origin::Disk);
    let third = load(&loader, &folders[2], None).await.unwrap().adapter.digest;
    assert_eq!([first, second, third].map(|digest| disk.holds(digest)), [true, false, true]);
    assert_eq!(disk.used_bytes(), budget);
    assert_eq!(std::fs::read_dir(&disk_root).unwrap().count(), 2);
    // A smaller budget at the next start.
    let smaller = DiskCache::open(&disk_root, budget / 2).unwrap();
    assert!(smaller.used_bytes() <= budget / 2);
    assert_eq!(std::fs::read_dir(&disk_root).unwrap().count(), 1);
    // What can never fit is served without a copy.
    let none = self::loader(root.path(), "base", Some(DiskCache::open(root.path().join("tiny"), 100).unwrap()));
    assert!(!load(&none, &folders[0], None).await.unwrap().on_disk);
}

#[tokio::test]
async fn changed_copies_of_base_tensors_are_refused() {
    let check = async |case: &str, base: &str, change: &dyn Fn(&mut FileTensors), expected: Option<&str>| {
        let mut loader = loader(&cases(), base, None);
        let mut tensors = FileTensors::of(base);
        change(&mut tensors);
        loader.tensors = Some(Arc::new(tensors));
        let loaded = load(&loader, &cases().join(case), None).await;
        match expected {
            None => drop(loaded.unwrap()),
            Some(message) => {
                let error = loaded.unwrap_err();
                assert_eq!((error.code(), error.http_status()), ("UnsupportedFeature", 422));
                assert!(error.to_string().contains(message), "{error}");
            }
        }
    };
    let changed = |tensors: &mut FileTensors| tensors.offset = 1e-4;
    check("extra-base-copy", "base", &|_| {}, None).await;
    check("lm-head-tied", "base-tied", &|_| {}, None).await;
    check("extra-base-copy", "base", &changed, Some("'model.embed_tokens.weight': row 0 column 0")).await;
    check("lm-head-tied", "base-tied", &changed, Some("lm_head.base_layer.weight")).await;
    // A quantised base cannot tell a change below its own error from the quantiser's.
    let quantised = |tensors: &mut FileTensors| (tensors.offset, tensors.exactness) = (1e-4, Exactness::Within(1e-3));
    check("extra-base-copy", "base", &quantised, None).await;
    let coarse = |tensors: &mut FileTensors| (tensors.offset, tensors.exactness) = (1e-2, Exactness::Within(1e-3));
    check("extra-base-copy", "base", &coarse, Some("changed copy")).await;
    // The embedding of another base.
    let mut without = loader(&cases(), "base", None);
    without.tensors = None;
    let error = load(&without, &cases().join("extra-base-copy"), None).await.unwrap_err();
    assert!(error.to_string().contains("cannot be compared"), "{error}");
}

/// A base whose first row is compared only after a task of the runtime has been on.
struct Waits {
    tensors: FileTensors,
    reached: Mutex<Option<oneshot::Sender<()>>>,
    gone_on: Mutex<mpsc::Receiver<()>>,
}

impl BaseTensors for Waits {
    fn row(&self, name: &str, row: usize, out: &mut [f32]) -> Option<Exactness> {
        if let Some(reached) = self.reached.lock().unwrap().take() {
            reached.send(()).unwrap();
            let waited = self.gone_on.lock().unwrap().recv_timeout(Duration::from_secs(60));
            waited.expect("the runtime stood still while an adapter was judged");
        }
        self.tensors.row(name, row, out)
    }
}

/// The runtime of this test has one thread: whatever was judged on it would wait for itself.
#[tokio::test(flavor = "current_thread")]
async fn others_go_on_while_an_adapter_is_judged() {
    let root = tempfile::tempdir().unwrap();
    let folder = copy_of("extra-base-copy", root.path());
    let mut expected = None;
    for origin in [Origin::Source, Origin::Disk] {
        let disk = DiskCache::open(root.path().join("cache"), 1 << 30).unwrap();
        let mut loader = loader(root.path(), "base", Some(disk));
        let ((reached, judging), (go_on, gone_on)) = (oneshot::channel(), mpsc::channel());
        let (reached, gone_on) = (Mutex::new(Some(reached)), Mutex::new(gone_on));
        loader.tensors = Some(Arc::new(Waits { tensors: FileTensors::of("base"), reached, gone_on }));
        let another = async {
            judging.await.unwrap();
            go_on.send(()).unwrap();
        };
        let (loaded, ()) = tokio::join!(load(&loader, &folder, expected), another);
        let loaded = loaded.unwrap();
        assert_eq!(loaded.origin, origin);
        expected = Some(loaded.adapter.digest);
    }
}

/// The model as the engine opens it, against what PEFT saved beside the adapters.
#[tokio::test]
async fn copies_are_compared_with_the_opened_model() {
    for (case, base) in [("extra-base-copy", "base"), ("lm-head-tied", "base-tied")] {
        let root = tempfile::tempdir().unwrap();
        let folder = copy_of(case, root.path());
        let mut loader = loader(root.path(), base, None);
        loader.tensors = Some(Arc::new(lorafleet_backend::model::Model::open(&cases().join(base)).unwrap()));
        let loaded = load(&loader, &folder, None).await.unwrap();
        let copy = &loaded.adapter.fitted.base_copies[0];
        // One bit of one value in the middle of the copy.
        let path = folder.join("adapter_model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let data_start = bytes.len() - loaded.adapter.bytes.len();
        let at = data_start + (copy.range.start + copy.range.end) as usize / 2;
        bytes[at + 2] ^= 0x10;
        std::fs::write(&path, bytes).unwrap();
        let error = load(&loader, &folder, None).await.unwrap_err();
        assert_eq!(error.code(), "UnsupportedFeature");
        assert!(
            error.to_string().contains(&copy.base_name) && error.to_string().contains("row 129 column 0"),
            "{error}"
        );
    }
}

/// Every tensor of the base, by the name that a copy of it would have.
#[test]
fn each_row_of_the_model_is_that_of_its_file() {
    for base in ["base", "base-tied"] {
        let model = lorafleet_backend::model::Model::open(&cases().join(base)).unwrap();
        let file = FileTensors::of(base);
        for name in shape(base).tensor_names() {
            let dimensions = shape(base).tensor_shape(&name).unwrap();
            let columns = *dimensions.last().unwrap() as usize;
            let rows = dimensions.iter().product::<u64>() as usize / columns;
            let (mut ours, mut theirs) = (vec![0.0; columns], vec![1.0; columns]);
            for row in 0..rows {
                assert_eq!(BaseTensors::row(&model, &name, row, &mut ours), Some(Exactness::Stored(FloatType::F32)));
                file.row(&name, row, &mut theirs).unwrap();
                assert_eq!(ours, theirs, "{base} {name} {row}");
            }
            assert_eq!(BaseTensors::row(&model, &name, rows, &mut ours), None);
        }
        assert_eq!(BaseTensors::row(&model, "model.layers.9.mlp.up_proj.weight", 0, &mut [0.0; 64]), None);
    }
}

#[tokio::test]
async fn what_the_one_who_enrols_says_of_the_base_goes_before_what_the_file_says() {
    let root = tempfile::tempdir().unwrap();
    let folder = copy_of("plain-r8-qv", root.path());
    let (ours, other) = (Digest::from_bytes([1; 32]), Digest::from_bytes([2; 32]));
    let mut loader = loader(root.path(), "base", Some(DiskCache::open(root.path().join("cache"), 1 << 20).unwrap()));
    loader.policy = Policy { identities: vec![ours], require_base_digest: true, ..Policy::default() };
    let load = async |claim: Option<Digest>, digest: Option<Digest>| {
        let claims = Claims { digest, base_digest: claim };
        loader.load(folder.to_str().unwrap(), claims, &Progress::default()).await
    };
    assert_eq!(load(None, None).await.unwrap_err().code(), "BaseUnknown");
    assert_eq!(load(Some(other), None).await.unwrap_err().code(), "BaseMismatch");
    let digest = load(Some(ours), None).await.unwrap().adapter.digest;
    // The copy on disk is judged by the same claim.
    assert_eq!(load(Some(ours), Some(digest)).await.unwrap().origin, Origin::Disk);
    assert_eq!(load(Some(other), Some(digest)).await.unwrap_err().code(), "BaseMismatch");
}

#[tokio::test]
async fn loads_wait_until_there_is_room_for_their_bytes() {
    let root = tempfile::tempdir().unwrap();
    let folder = copy_of("plain-r8-qv", root.path());
    let mut loader = loader(root.path(), "base", Some(DiskCache::open(root.path().join("cache"), 1 << 20).unwrap()));
    // Less than one adapter: one at a time then, and never none.
    loader.rooms = Rooms::new(9000);
    let mut expected = None;
    for origin in [Origin::Source, Origin::Disk] {
        let held = loader.rooms.here(1).await;
        let mut loading = Box::pin(load(&loader, &folder, expected));
        let early = tokio::time::timeout(Duration::from_millis(200), &mut loading).await;
        assert!(early.is_err(), "it was loaded beside what takes the room");
        drop(held);
        let loaded = loading.await.unwrap();
        assert_eq!(loaded.origin, origin);
        expected = Some(loaded.adapter.digest);
    }
    let two = tokio::join!(load(&loader, &folder, expected), load(&loader, &folder, None));
    assert!(two.0.is_ok() && two.1.is_ok());
}
