//! A process that starts again with what is on its disk: a real S3 server, there and away.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::server::{Server, TIME_MAX, cases, digest_of, variant};

/// s3s-fs over a folder; its buckets are the folders of its root.
struct Store {
    child: Child,
    address: SocketAddr,
    root: tempfile::TempDir,
}

impl Drop for Store {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Store {
    /// At an address that nobody else takes, also while it is away: the host is this process's own.
    fn start() -> Self {
        let [_, high, middle, low] = std::process::id().to_be_bytes();
        let address = (Ipv4Addr::new(127, 64 | high, middle, low), 20_000).into();
        let root = tempfile::tempdir().unwrap();
        Self { child: Self::run(address, root.path()), address, root }
    }

    fn run(address: SocketAddr, root: &Path) -> Child {
        let binary = std::env::var("LORAFLEET_TEST_S3S_FS").expect("LORAFLEET_TEST_S3S_FS: path of an s3s-fs binary");
        let mut child = Command::new(binary)
            .args(["--access-key", "key", "--secret-key", "secret"])
            .args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()])
            .arg(root)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while std::net::TcpStream::connect(address).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "the S3 server ended");
            assert!(begun.elapsed() < TIME_MAX, "the S3 server does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn start_again(&mut self) {
        self.child = Self::run(self.address, self.root.path());
    }

    fn put_case(&self, case: &str) {
        let folder = self.root.path().join("bucket").join(case);
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(cases().join(case)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
    }
}

/// Flags of a managed engine whose model and adapters are in the store; its cache is `disk`.
fn flags(store: &Store, disk: &Path) -> Vec<String> {
    let keys = disk.join("keys");
    std::fs::create_dir_all(&keys).unwrap();
    std::fs::write(keys.join("access-key-id"), "key").unwrap();
    std::fs::write(keys.join("secret-access-key"), "secret").unwrap();
    let config = disk.join("config.toml");
    let (address, keys) = (store.address, keys.display());
    let text = format!(
        "[[source]]\nprefix = \"s3://bucket\"\nendpoint = \"http://{address}\"\ncredentials_dir = \"{keys}\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let cache = format!("{},100000000", disk.join("cache").display());
    ["--managed", "--config", config.to_str().unwrap(), "--disk-cache", &cache].map(str::to_owned).to_vec()
}

async fn start(flags: &[String], digest: Option<&Value>) -> Server {
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    if let Some(digest) = digest {
        flags.extend(["--model-digest", digest.as_str().unwrap()]);
    }
    Server::start_model(tempfile::tempdir().unwrap(), "s3://bucket/base", "base", &flags).await
}

fn kill(server: &mut Server) {
    server.process.kill().unwrap();
    server.process.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs LORAFLEET_TEST_S3S_FS"]
async fn what_is_on_disk_is_served_while_the_store_is_away() {
    let (mut store, disk) = (Store::start(), tempfile::tempdir().unwrap());
    store.put_case("base");
    store.put_case("plain-r8-qv");
    let flags = flags(&store, disk.path());
    let mut server = start(&flags, None).await;
    let report = server.report().await;
    let base = report["base"]["digest"].clone();
    assert_eq!(report["base"]["origin"], "Source", "{report}");
    let digest = super::server::digest_of(&cases().join("plain-r8-qv"));
    let adapter = json!({ "name": "a", "digest": digest, "uri": "s3://bucket/plain-r8-qv", "floor": "Host" });
    let placement =
        json!({ "bootId": report["bootId"], "generation": 1, "aliases": { "a": digest }, "adapters": [adapter] });
    assert_eq!(server.put("/v1/placement", &placement).await.0, 200);
    server.wait_ready().await;
    let row = super::server::case("plain-r8-qv")["answers"][0].clone();
    server.check_row("a", &row).await;
    kill(&mut server);
    store.stop();

    let mut server = start(&flags, Some(&base)).await;
    server.wait_ready().await;
    let report = server.report().await;
    assert_eq!(report["base"]["origin"], "Disk", "{report}");
    assert_eq!((&report["adapters"][0]["state"], &report["adapters"][0]["tier"]), (&json!("Ready"), &json!("Host")));
    server.check_row("a", &row).await;
    kill(&mut server);

    // Damaged on disk: without the store a typed end, with it whole again.
    let model = std::fs::read_dir(disk.path().join("cache/models")).unwrap().next().unwrap().unwrap().path();
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    let all: Vec<&str> = flags.iter().map(String::as_str).chain(["--model-digest", base.as_str().unwrap()]).collect();
    let mut broken = Server::spawn(tempfile::tempdir().unwrap(), "s3://bucket/base", "base", &all);
    assert!(!broken.process.wait().unwrap().success());
    let log = broken.log();
    assert!(log.contains("the copy on disk is damaged") && log.contains("DigestMismatch"), "{log}");
    store.start_again();
    let server = start(&flags, Some(&base)).await;
    server.wait_ready().await;
    assert_eq!(server.report().await["base"]["origin"], "Source");
    server.check_row("a", &row).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_moment_it_comes_back_whole() {
    let (disk, sources) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let names = ["plain-r8-qv", "all-linear", "r3-odd", "rslora"];
    let folders: Vec<_> = (0..32).map(|number| variant(names[number % names.len()], sources.path(), number)).collect();
    let cache = format!("{},100000000", disk.path().display());
    let allowed = sources.path().to_str().unwrap();
    let flags = ["--managed", "--disk-cache", &cache, "--allowed-source", allowed];
    let copies = disk.path().join("adapters");
    for round in 0..8_usize {
        let mut server = Server::start_unready("base", &flags).await;
        let boot = server.report().await["bootId"].clone();
        // Each time some more, so that every round fetches and keeps something.
        let placed = (0..(round + 1) * 4).map(|number| {
            let (uri, digest) = (&folders[number], digest_of(&folders[number]));
            json!({ "name": format!("a{number}"), "digest": digest, "uri": uri, "floor": "Host" })
        });
        let placed: Vec<Value> = placed.collect();
        let aliases: Value = placed.iter().map(|row| (row["name"].as_str().unwrap(), row["digest"].clone())).collect();
        let placement = json!({ "bootId": boot, "generation": 1, "adapters": placed, "aliases": aliases });
        // The last one is accepted, so that there is something to come back to.
        let most = if round < 7 { Duration::from_millis(1 + round as u64 * 5) } else { TIME_MAX };
        let _ = tokio::time::timeout(most, server.put("/v1/placement", &placement)).await;
        kill(&mut server);
        // And the disk forgets the end of one file.
        if let Some(copy) = std::fs::read_dir(&copies).unwrap().flatten().nth(round) {
            let weights = copy.path().join("adapter_model.safetensors");
            if let Ok(bytes) = std::fs::read(&weights) {
                std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
            }
        }
    }
    let server = Server::start("base", &flags).await;
    let report = server.report().await;
    let held = report["adapters"].as_array().unwrap();
    assert!(held.len() == 32 && held.iter().all(|row| row["state"] == "Ready"), "{report}");
    for row in held {
        let number: usize = row["name"].as_str().unwrap()[1..].parse().unwrap();
        let answers = super::server::case(names[number % names.len()])["answers"].clone();
        server.check_row(&format!("a{number}"), &answers[number % 3]).await;
    }
    let left = std::fs::read_dir(&copies).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let left: Vec<String> = left.collect();
    assert!(left.len() >= held.len() && left.iter().all(|name| name.len() == 64), "{left:?}");
}
