//! Files of this machine: inside of the allowed folder, and nothing else.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

mod support;

use std::os::unix::fs::symlink;
use std::time::Duration;

use lorafleet_source::{Access, ErrorKind, Progress, ReadLimits, Sources, fetch_base, list_adapter, read_base};
use support::uri;

/// File systems count time in ticks of some milliseconds: what is written this much later is of another time.
const TICK: Duration = Duration::from_millis(50);

struct Place {
    root: tempfile::TempDir,
    sources: Sources,
}

impl Place {
    /// `allowed/` is the allowed folder, `outside/secret` is not in it.
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("allowed/x")).unwrap();
        std::fs::create_dir_all(root.path().join("outside")).unwrap();
        std::fs::create_dir_all(root.path().join("allowed-evil")).unwrap();
        std::fs::write(root.path().join("outside/secret"), "secret").unwrap();
        std::fs::write(root.path().join("allowed-evil/secret"), "secret").unwrap();
        std::fs::write(root.path().join("allowed/x/a"), "0123456789").unwrap();
        let prefix = uri(root.path().join("allowed").to_str().unwrap());
        Self { sources: Sources::new([Access::ambient(prefix)], ReadLimits::default()), root }
    }

    fn path(&self, path: &str) -> String {
        self.root.path().join(path).to_str().unwrap().to_owned()
    }

    async fn read(&self, folder: &str, name: &str) -> Result<Vec<u8>, ErrorKind> {
        let listing = self.sources.list(&uri(&self.path(folder))).await.map_err(|error| error.kind)?;
        let file = listing.file(name).ok_or(ErrorKind::NotFound)?;
        let bytes = self.sources.read(&listing, file, 0..file.bytes).await.map_err(|error| error.kind)?;
        Ok(bytes.to_vec())
    }
}

#[tokio::test]
async fn folders_files_and_ranges() {
    let place = Place::new();
    assert_eq!(place.read("allowed/x", "a").await.unwrap(), b"0123456789");
    assert_eq!(place.read("allowed/x/", "a").await.unwrap(), b"0123456789");
    let single = place.sources.list(&uri(&place.path("allowed/x/a"))).await.unwrap();
    assert!(single.single);
    assert_eq!(place.sources.read(&single, &single.files[0], 3..6).await.unwrap().as_ref(), b"345");
    let beyond = place.sources.read(&single, &single.files[0], 5..50).await.unwrap_err();
    assert_eq!(beyond.kind, ErrorKind::Unavailable);
    assert_eq!(place.read("allowed/missing", "a").await, Err(ErrorKind::NotFound));
    assert_eq!(place.read("allowed/x/a/b", "a").await, Err(ErrorKind::NotFound));
}

#[tokio::test]
async fn a_folder_without_an_adapter_or_a_base_is_named() {
    let place = Place::new();
    let cache = place.root.path().join("cache");
    std::fs::create_dir_all(place.path("allowed/empty")).unwrap();
    for (folder, adapter, base) in [
        ("allowed/empty", "the source does not exist or holds no files", "the base's source does not exist"),
        ("allowed/x", "the source holds no adapter_config.json", "the base's folder holds"),
    ] {
        let source = uri(&place.path(folder));
        let check = |message: String, why: &str| {
            assert!(message.contains(&format!("'{source}': {why}")), "{message}, expected {why}");
        };
        check(list_adapter(&place.sources, &source).await.unwrap_err().to_string(), adapter);
        check(read_base(&place.sources, &source, true, &Progress::default()).await.unwrap_err().to_string(), base);
        let fetched = fetch_base(&place.sources, &source, None, &cache, &Progress::default()).await;
        check(fetched.unwrap_err().to_string(), base);
    }
}

#[tokio::test]
async fn nothing_outside_is_opened() {
    let place = Place::new();
    for elsewhere in ["outside", "allowed-evil", ""] {
        assert_eq!(place.read(elsewhere, "secret").await, Err(ErrorKind::NotAllowed), "{elsewhere}");
    }
    symlink(place.path("outside"), place.path("allowed/folder")).unwrap();
    assert_eq!(place.read("allowed/folder", "secret").await, Err(ErrorKind::NotAllowed));
    symlink(place.path("outside/secret"), place.path("allowed/x/link")).unwrap();
    assert_eq!(place.read("allowed/x", "link").await, Err(ErrorKind::NotAllowed));
    symlink("../../outside/secret", place.path("allowed/x/relative")).unwrap();
    assert_eq!(place.read("allowed/x", "relative").await, Err(ErrorKind::NotAllowed));
    symlink("nowhere", place.path("allowed/x/dangling")).unwrap();
    assert_eq!(place.read("allowed/x", "dangling").await, Err(ErrorKind::NotFound));
    // A link that stays inside is as good as a file, as in a mounted Secret or a model cache.
    symlink("a", place.path("allowed/x/inside")).unwrap();
    assert_eq!(place.read("allowed/x", "inside").await.unwrap(), b"0123456789");
}

/// The allowed folder itself may be a link: its owner wrote it down.
#[tokio::test]
async fn a_linked_root() {
    let place = Place::new();
    symlink(place.path("allowed"), place.path("linked")).unwrap();
    let sources = Sources::new([Access::ambient(uri(&place.path("linked")))], ReadLimits::default());
    let listing = sources.list(&uri(&place.path("linked/x"))).await.unwrap();
    assert_eq!(sources.read(&listing, &listing.files[0], 0..1).await.unwrap().as_ref(), b"0");
}

#[tokio::test]
async fn a_link_that_appears_after_the_look() {
    let place = Place::new();
    let listing = place.sources.list(&uri(&place.path("allowed/x"))).await.unwrap();
    std::fs::remove_file(place.path("allowed/x/a")).unwrap();
    symlink(place.path("outside/secret"), place.path("allowed/x/a")).unwrap();
    let error = place.sources.read(&listing, &listing.files[0], 0..6).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotAllowed, "{error}");
}

#[tokio::test]
async fn what_is_no_plain_file_or_another_one() {
    let place = Place::new();
    let pipe = place.path("allowed/x/pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let listing = place.sources.list(&uri(&place.path("allowed/x"))).await.unwrap();
    assert_eq!(listing.names().collect::<Vec<_>>(), ["a"]);
    tokio::time::sleep(TICK).await;
    std::fs::write(place.path("allowed/x/a"), "012345678X").unwrap();
    let error = place.sources.read(&listing, &listing.files[0], 0..6).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Changed, "{error}");
    // The name becomes a pipe between look and open: refused, and it does not block.
    std::fs::remove_file(place.path("allowed/x/a")).unwrap();
    std::fs::rename(&pipe, place.path("allowed/x/a")).unwrap();
    let error = place.sources.read(&listing, &listing.files[0], 0..6).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotAllowed, "{error}");
}

#[tokio::test]
async fn a_file_that_is_written_to_while_it_is_read() {
    let place = Place::new();
    let path = place.path("allowed/x/large");
    std::fs::write(&path, vec![b'a'; 3 << 20]).unwrap();
    let listing = place.sources.list(&uri(&place.path("allowed/x"))).await.unwrap();
    let file = listing.file("large").unwrap();
    let mut download = place.sources.open(&listing, file, 0..file.bytes).unwrap();
    assert!(download.next().await.unwrap().is_some());
    tokio::time::sleep(TICK).await;
    let mut written = std::fs::File::options().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut written, &[b'b'; 3 << 20]).unwrap();
    let error = loop {
        match download.next().await {
            Ok(piece) => assert!(piece.is_some(), "half of each was read as one"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind, ErrorKind::Changed, "{error}");
}

#[tokio::test]
async fn limits() {
    let place = Place::new();
    for number in 0..20 {
        std::fs::write(place.path(&format!("allowed/x/{number}")), "x").unwrap();
    }
    let limits = ReadLimits { files: 10, read_bytes: 4, ..ReadLimits::default() };
    let sources = Sources::new([Access::ambient(uri(&place.path("allowed")))], limits);
    let error = sources.list(&uri(&place.path("allowed/x"))).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge);
    for number in 0..20 {
        std::fs::create_dir_all(place.path(&format!("allowed/y/{number}"))).unwrap();
    }
    let few = Sources::new([Access::ambient(uri(&place.path("allowed")))], ReadLimits { entries: 10, ..limits });
    let error = few.list(&uri(&place.path("allowed/y"))).await.unwrap_err();
    assert!(error.to_string().contains("holds more than 10 files and folders"), "{error}");
    let single = sources.list(&uri(&place.path("allowed/x/a"))).await.unwrap();
    let error = sources.read(&single, &single.files[0], 0..10).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge);
    assert!(error.to_string().contains("10 bytes") && error.to_string().contains("limit is 4"), "{error}");
}
