//! The program itself: what it logs at its start, and how it ends when it is told to. No API server is there.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may say what it expects plainly")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

/// A running gateway; killed when dropped.
struct Process {
    child: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("engine-key"), "engine-key").unwrap();
        let config = "{apiVersion: v1, kind: Config, current-context: none, users: [{name: nobody, user: {}}], \
            clusters: [{name: none, cluster: {server: 'http://127.0.0.1:1'}}], contexts: [{name: none, context: {cluster: none, user: nobody}}]}";
        std::fs::write(path("kubeconfig"), config).unwrap();
        let address = free_address();
        let child = Command::new(env!("CARGO_BIN_EXE_lorafleet-gateway"))
            .args(["run", "--namespace=demo", "--pool=chat", "--drain-delay-seconds=0", "--max-queue=7"])
            .arg(format!("--listen={address}"))
            .arg(format!("--metrics-listen={}", free_address()))
            .arg(format!("--engine-key-file={}", path("engine-key").display()))
            .env("KUBECONFIG", path("kubeconfig"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Self { child, address, _folder: folder };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(begun.elapsed() < PATIENCE, "it does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        process
    }

    /// A request that is under way: its body never comes whole.
    fn ask(&self) -> TcpStream {
        let mut client = TcpStream::connect(self.address).unwrap();
        client
            .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n")
            .unwrap();
        // It asks for the body once it reads it.
        let mut answer = [0; 12];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"HTTP/1.1 100");
        client
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    fn refuses_connections(&self) {
        let begun = Instant::now();
        while TcpStream::connect(self.address).is_ok() {
            assert!(begun.elapsed() < PATIENCE, "it still listens");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Exit code, and the lines of its log.
    fn ended(&mut self) -> (Option<i32>, Vec<serde_json::Value>) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.signal(), None, "it ends by itself");
        let mut log = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut log).unwrap();
        (status.code(), log.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn the_log_names_each_limit_as_a_number() {
    let mut process = Process::start();
    process.signal("-TERM");
    let (code, log) = process.ended();
    assert_eq!(code, Some(0));
    let limits = log.iter().map(|line| &line["fields"]).find(|fields| fields["message"] == "limits").unwrap();
    assert_eq!((&limits["max_queue"], &limits["drain_delay_seconds"]), (&7.into(), &0.0.into()), "{limits}");
    let others = limits.as_object().unwrap().iter().filter(|(name, _)| *name != "message");
    assert!(others.clone().count() == 20 && others.clone().all(|(_, value)| value.is_number()), "{limits}");
}

#[test]
fn a_first_signal_waits_for_requests_and_a_second_does_not() {
    for (second, code) in [("-TERM", 143), ("-INT", 130)] {
        let mut process = Process::start();
        let mut client = process.ask();
        process.signal("-TERM");
        process.refuses_connections();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(process.child.try_wait().unwrap(), None, "a request is under way");
        process.signal(second);
        let (ended, log) = process.ended();
        assert_eq!(ended, Some(code), "{second}");
        let last = &log.last().unwrap()["fields"]["message"];
        assert!(last.as_str().unwrap().starts_with("told again"), "{last}");
        let mut rest = Vec::new();
        // Cut off: no answer.
        let _ = client.read_to_end(&mut rest);
        assert!(!String::from_utf8_lossy(&rest).contains("HTTP/1.1 2"), "{rest:?}");
    }
}

#[test]
fn a_first_signal_lets_a_request_end() {
    let mut process = Process::start();
    let mut client = process.ask();
    process.signal("-TERM");
    process.refuses_connections();
    client.write_all(b"{\"model\":").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    // Whole, and no JSON.
    assert!(answer.contains("HTTP/1.1 400 ") && answer.contains("InvalidRequest"), "{answer}");
    assert_eq!(process.ended().0, Some(0));
}
