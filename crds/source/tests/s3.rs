//! Reading from a real S3 server on 127.0.0.1, also over connections that break.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects")]

mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lorafleet_artifact::{Claims, HuggingFaceConfig, Policy};
use lorafleet_source::{
    Access, AccessConfig, Credentials, ErrorKind, LocalBase, Progress, ReadLimits, SourceError, Sources, fetch_base,
    read_adapter, read_base,
};
use support::{Fault, Proxy, Server, access_at, cases, patient_limits, sources_at, uri};

fn base() -> lorafleet_artifact::BaseShape {
    let config = std::fs::read(cases().join("base/config.json")).unwrap();
    lorafleet_artifact::BaseShape::from_config(&HuggingFaceConfig::parse(&config).unwrap()).unwrap()
}

fn open_policy() -> Policy {
    Policy { require_base_digest: false, ..Policy::default() }
}

/// Bytes that say where they are.
fn numbered(count: u32) -> Vec<u8> {
    (0..count).flat_map(u32::to_le_bytes).collect()
}

async fn whole(sources: &Sources, folder: &str, name: &str) -> Result<Vec<u8>, SourceError> {
    let listing = sources.list(&uri(folder)).await?;
    let file = listing.file(name).unwrap();
    let mut download = sources.open(&listing, file, 0..file.bytes)?;
    let mut out = Vec::new();
    while let Some(piece) = download.next().await? {
        out.extend_from_slice(&piece);
    }
    Ok(out)
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn folders_files_and_ranges() {
    let server = Server::start();
    let bytes = numbered(300_000);
    server.put("bucket/adapters/1/x.bin", &bytes);
    server.put("bucket/adapters/1/deeper/y.bin", b"y");
    server.put("bucket/adapters/10/z.bin", b"z");
    let sources = server.sources(&["s3://bucket/adapters"]);
    for folder in ["s3://bucket/adapters/1", "s3://bucket/adapters/1/"] {
        let listing = sources.list(&uri(folder)).await.unwrap();
        assert_eq!(listing.names().collect::<Vec<_>>(), ["x.bin"], "{folder}");
        assert_eq!((listing.files[0].bytes, listing.single), (1_200_000, false));
        let part = sources.read(&listing, &listing.files[0], 4000..4008).await.unwrap();
        assert_eq!(part.as_ref(), numbered(1002).split_off(4000));
        let nothing = sources.read(&listing, &listing.files[0], 5..5).await.unwrap();
        assert!(nothing.is_empty());
    }
    assert_eq!(whole(&sources, "s3://bucket/adapters/1", "x.bin").await.unwrap(), bytes);
    let single = sources.list(&uri("s3://bucket/adapters/1/x.bin")).await.unwrap();
    assert!(single.single && single.files[0].name == "x.bin");
    assert_eq!(sources.read(&single, &single.files[0], 0..4).await.unwrap().as_ref(), [0; 4]);
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn errors_have_their_kind() {
    let server = Server::start();
    server.put("bucket/team/x/a.bin", b"a");
    let check = async |sources: &Sources, source: &str, kind: ErrorKind| {
        let error = sources.list(&uri(source)).await.unwrap_err();
        assert_eq!(error.kind, kind, "{source}: {error}");
        assert!(error.to_string().contains(source), "{error}");
        assert_eq!(error.is_transient(), matches!(kind, ErrorKind::Timeout | ErrorKind::Unavailable));
    };
    let sources = server.sources(&["s3://bucket/team", "s3://other"]);
    check(&sources, "s3://bucket/team/missing", ErrorKind::NotFound).await;
    check(&sources, "s3://other/x", ErrorKind::NotFound).await;
    check(&sources, "s3://bucket/team-evil/x", ErrorKind::NotAllowed).await;
    check(&sources, "s3://bucket", ErrorKind::NotAllowed).await;
    check(&sources, "file:///etc", ErrorKind::NotAllowed).await;
    let with = |change: &dyn Fn(&mut Access)| {
        let mut access = access_at(server.address, "s3://bucket/team");
        change(&mut access);
        Sources::new([access], patient_limits())
    };
    let wrong_key = with(&|access| {
        let (access_key_id, secret_access_key) = ("key".to_owned(), "wrong".to_owned());
        access.credentials = Credentials::Static { access_key_id, secret_access_key, session_token: None };
    });
    check(&wrong_key, "s3://bucket/team/x", ErrorKind::Forbidden).await;
    let no_keys = with(&|access| access.credentials = Credentials::Dir("/nonexistent".into()));
    let error = no_keys.list(&uri("s3://bucket/team/x")).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/access-key-id"), "{error}");
    let no_url = with(&|access| access.endpoint = Some("s3.example:9000".to_owned()));
    let error = no_url.list(&uri("s3://bucket/team/x")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Misconfigured, "{error}");
    // Nobody listens, or ever will; and somebody who never answers.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = closed.local_addr().unwrap();
    check(&sources_at(address, &["s3://bucket"], patient_limits()), "s3://bucket/x", ErrorKind::Unavailable).await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let limits = ReadLimits { answer: Duration::from_millis(500), ..patient_limits() };
    check(&sources_at(address, &["s3://bucket"], limits), "s3://bucket/x", ErrorKind::Timeout).await;
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn keys_from_a_folder() {
    let server = Server::start();
    server.put("bucket/x/a.bin", b"a");
    let keys = tempfile::tempdir().unwrap();
    std::fs::write(keys.path().join("access-key-id"), "key\n").unwrap();
    std::fs::write(keys.path().join("secret-access-key"), "secret").unwrap();
    let config = AccessConfig {
        prefix: "s3://bucket/".to_owned(),
        endpoint: Some(format!("http://{}", server.address)),
        region: Some("eu-central-1".to_owned()),
        credentials_dir: Some(keys.path().to_owned()),
    };
    let sources = Sources::new([Access::try_from(config).unwrap()], patient_limits());
    assert_eq!(whole(&sources, "s3://bucket/x", "a.bin").await.unwrap(), b"a");
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn a_download_that_is_cut_goes_on_where_it_was() {
    let server = Server::start();
    let bytes = numbered(1_000_000);
    server.put("bucket/x/big.bin", &bytes);
    for fault in [Fault::Cut { after: 2_000_000 }, Fault::Stall { after: 300_000 }, Fault::Cut { after: 5000 }] {
        // A pause of this machine that is taken for a stall makes one attempt more.
        let limits = ReadLimits { stall: Duration::from_secs(2), attempts: 30, interruptions: 30, ..patient_limits() };
        let proxy = Proxy::start(server.address, fault, 2).await;
        let sources = sources_at(proxy.address, &["s3://bucket"], limits);
        assert_eq!(whole(&sources, "s3://bucket/x", "big.bin").await.unwrap(), bytes);
        assert_eq!(proxy.faults_left.load(Ordering::SeqCst), 0, "the fault did not happen");
    }
    // A store that gives a few bytes each time would be read for hours.
    let proxy = Proxy::start(server.address, Fault::Stall { after: 2000 }, 1000).await;
    let limits = ReadLimits { stall: Duration::from_millis(300), ..patient_limits() };
    let sources = sources_at(proxy.address, &["s3://bucket"], limits);
    let error = whole(&sources, "s3://bucket/x", "big.bin").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("no byte came for 300 ms"), "{error}");
    // And one that gives none.
    let proxy = Proxy::start(server.address, Fault::Cut { after: 600 }, 1000).await;
    let sources = sources_at(proxy.address, &["s3://bucket"], patient_limits());
    let error = whole(&sources, "s3://bucket/x", "big.bin").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn a_file_that_changes_meanwhile_is_noticed() {
    let server = Server::start();
    server.put("bucket/x/a.bin", &numbered(1000));
    let sources = server.sources(&["s3://bucket"]);
    let listing = sources.list(&uri("s3://bucket/x")).await.unwrap();
    // Modification times of the server have whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    server.put("bucket/x/a.bin", &numbered(1001));
    let error = sources.read(&listing, &listing.files[0], 0..4000).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Changed, "{error}");
    std::fs::remove_file(server.root.path().join("bucket/x/a.bin")).unwrap();
    let error = sources.read(&listing, &listing.files[0], 0..4000).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
}

#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn adapters_and_bases() {
    let server = Server::start();
    for case in ["plain-r8-qv", "nan", "pickle-only", "base"] {
        server.put_case(case, &format!("bucket/{case}"));
    }
    let sources = server.sources(&["s3://bucket"]);
    let progress = Progress::default();
    let read = async |case: &str, keep: bool| {
        let source = uri(&format!("s3://bucket/{case}"));
        read_adapter(&sources, &source, Claims::default(), &base(), &open_policy(), keep, &progress).await
    };
    let plain = read("plain-r8-qv", true).await.unwrap();
    assert_eq!(progress.bytes(), (15_368, 15_368));
    assert_eq!(
        plain.bytes.unwrap().weights,
        std::fs::read(cases().join("plain-r8-qv/adapter_model.safetensors")).unwrap()
    );
    assert!(read("plain-r8-qv", false).await.unwrap().bytes.is_none());
    assert_eq!(read("nan", true).await.unwrap_err().code(), "Malformed");
    assert_eq!(read("pickle-only", true).await.unwrap_err().code(), "UnsupportedFeature");
    assert_eq!(read("missing", true).await.unwrap_err().code(), "NotFound");

    let found = read_base(&sources, &uri("s3://bucket/base"), true, &progress).await.unwrap();
    assert_eq!(found.shape, base());
    let script = "sha256sum chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json | sha256sum";
    let shell =
        std::process::Command::new("sh").args(["-c", script]).current_dir(cases().join("base")).output().unwrap();
    assert!(String::from_utf8(shell.stdout).unwrap().starts_with(&found.digest.unwrap().hex()));

    let cache = tempfile::tempdir().unwrap();
    let source = uri("s3://bucket/base");
    let fetch = async |expected| fetch_base(&sources, &source, expected, cache.path(), &progress).await;
    let first = fetch(found.digest).await.unwrap();
    assert!(first.fetched && Some(first.digest) == found.digest);
    let folder = first.path.clone();
    let same = |name: &str| {
        std::fs::read(folder.join(name)).unwrap() == std::fs::read(cases().join("base").join(name)).unwrap()
    };
    assert!(same("model.safetensors") && same("config.json") && same("tokenizer.json"));
    assert!(!folder.join("answers.json").exists());
    // Again: from disk.
    let again = LocalBase { fetched: false, ..first.clone() };
    assert_eq!(fetch(None).await.unwrap(), again);
    // Changed: what is expected is still here; anything else is refused and leaves nothing.
    server.put("bucket/base/chat_template.jinja", b"other");
    assert_eq!(fetch(found.digest).await.unwrap(), again);
    let strange = lorafleet_artifact::Digest::from_bytes([7; 32]);
    let error = fetch(Some(strange)).await.unwrap_err();
    assert!(error.code() == "DigestMismatch" && error.to_string().contains(&strange.hex()), "{error}");
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 1);
    // The present version, and the old one goes.
    let other = fetch(None).await.unwrap();
    assert!(other.fetched && other.digest != first.digest && !folder.exists());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 1);
    // Without the store, what is here under its digest is enough, and nothing else is.
    drop(server);
    assert_eq!(fetch(Some(other.digest)).await.unwrap(), LocalBase { fetched: false, ..other.clone() });
    assert_eq!(fetch(None).await.unwrap_err().code(), "SourceUnavailable");
    other.discard().await.unwrap();
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}

/// Prints what a load of 2 MB costs.
#[tokio::test]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn two_megabytes() {
    let server = Server::start();
    let values = std::iter::repeat_n(0.01_f32.to_le_bytes(), 500_000).flatten().collect::<Vec<_>>();
    server.put("bucket/x/adapter_model.safetensors", &values);
    let sources = sources_at(server.address, &["s3://bucket"], ReadLimits::default());
    let mut times = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        assert_eq!(whole(&sources, "s3://bucket/x", "adapter_model.safetensors").await.unwrap().len(), 2_000_000);
        times.push(start.elapsed());
    }
    times.sort();
    println!("2 MB from S3 on loopback: median {:?}, first of a process {:?}", times[10], times[19]);
}
