//! A real S3 server over a folder, and a proxy that breaks connections.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what it expects")]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lorafleet_artifact::SourceUri;
use lorafleet_source::{Access, Credentials, ReadLimits, Sources};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

pub fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifact/tests/cases").canonicalize().unwrap()
}

pub fn uri(text: &str) -> SourceUri {
    text.parse().unwrap()
}

/// An address of this machine that nobody else takes: the host is this process's own, the port counts its servers. A port
/// that was found free could be another's by the time it is used.
pub fn own_address() -> SocketAddr {
    static SERVERS: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    (Ipv4Addr::new(127, 64 | high, middle, low), SERVERS.fetch_add(1, Ordering::SeqCst)).into()
}

/// s3s-fs at an address of its own. Buckets are the folders of its root.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    pub root: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let binary = std::env::var("LORAFLEET_TEST_S3S_FS").expect("LORAFLEET_TEST_S3S_FS: path of an s3s-fs binary");
        let root = tempfile::tempdir().unwrap();
        let address = own_address();
        let child = Command::new(binary)
            .args(["--access-key", "key", "--secret-key", "secret"])
            .args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()])
            .arg(root.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, address, root };
        let start = Instant::now();
        while std::net::TcpStream::connect(address).is_err() {
            assert!(server.child.try_wait().unwrap().is_none(), "the S3 server ended");
            assert!(start.elapsed() < Duration::from_secs(120), "the S3 server does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    pub fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn put_case(&self, case: &str, folder: &str) {
        for entry in std::fs::read_dir(cases().join(case)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            self.put(&format!("{folder}/{name}"), &std::fs::read(entry.path()).unwrap());
        }
    }

    pub fn sources(&self, prefixes: &[&str]) -> Sources {
        sources_at(self.address, prefixes, patient_limits())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// For whoever answers: however slow this machine is, no limit of time is reached. What a test wants to be reached it sets.
pub fn patient_limits() -> ReadLimits {
    const LONG: Duration = Duration::from_secs(120);
    ReadLimits {
        connect: LONG,
        answer: LONG,
        stall: LONG,
        grace: LONG,
        attempts: 3,
        interruptions: 5,
        backoff: Duration::from_millis(10),
        ..ReadLimits::default()
    }
}

pub fn access_at(address: SocketAddr, prefix: &str) -> Access {
    Access {
        prefix: uri(prefix),
        endpoint: Some(format!("http://{address}")),
        region: None,
        credentials: Credentials::Static {
            access_key_id: "key".to_owned(),
            secret_access_key: "secret".to_owned(),
            session_token: None,
        },
    }
}

pub fn sources_at(address: SocketAddr, prefixes: &[&str], limits: ReadLimits) -> Sources {
    Sources::new(prefixes.iter().map(|prefix| access_at(address, prefix)), limits)
}

/// What happens to an answer once it has `after` bytes.
#[derive(Clone, Copy)]
pub enum Fault {
    Cut { after: usize },
    Stall { after: usize },
}

/// A proxy that does this to the first `times` answers that are long enough, and then no more.
pub struct Proxy {
    pub address: SocketAddr,
    pub faults_left: Arc<AtomicU32>,
}

impl Proxy {
    pub async fn start(to: SocketAddr, fault: Fault, times: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let faults_left = Arc::new(AtomicU32::new(times));
        let left = faults_left.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, to, fault, left.clone()));
            }
        });
        Self { address, faults_left }
    }
}

async fn forward(client: TcpStream, to: SocketAddr, fault: Fault, left: Arc<AtomicU32>) {
    let server = TcpStream::connect(to).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let (Fault::Cut { after } | Fault::Stall { after }) = fault;
    let mut sent = 0;
    let mut piece = vec![0; 8192];
    loop {
        let count = from_server.read(&mut piece).await.unwrap_or(0);
        if count == 0 {
            break;
        }
        if sent + count > after
            && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
        {
            let _ = to_client.write_all(&piece[..after.saturating_sub(sent)]).await;
            if matches!(fault, Fault::Stall { .. }) {
                std::future::pending::<()>().await;
            }
            break;
        }
        sent += count;
        if to_client.write_all(&piece[..count]).await.is_err() {
            break;
        }
    }
    requests.abort();
}
