//! The program itself: what it logs at its start, and how it ends when it is told to. No API server is there.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may say what it expects plainly")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// A running gateway; killed when dropped.
struct Process {
    child: Child,
    address: SocketAddr,
    /// The lines of its log that have been read.
    log: Vec<Value>,
    lines: Receiver<Value>,
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
        let mut child = Command::new(env!("CARGO_BIN_EXE_lorafleet-gateway"))
            .args(["run", "--namespace=demo", "--pool=chat", "--max-queue=7"])
            .args(["--drain-delay-seconds=0", "--drain-timeout-seconds=600", "--body-timeout-seconds=600"])
            .args(["--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"])
            .arg(format!("--engine-key-file={}", path("engine-key").display()))
            .env("KUBECONFIG", path("kubeconfig"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = child.stdout.take().unwrap();
        std::thread::spawn(move || read(stdout, &sender));
        let address = SocketAddr::from(([0; 4], 0));
        let mut process = Self { child, address, log: Vec::new(), lines, _folder: folder };
        process.address = process.says("listening")["clients"].as_str().unwrap().parse().unwrap();
        process
    }

    /// Waits for a line of its log that starts so, and returns its fields.
    fn says(&mut self, start: &str) -> Value {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {start:?} in {:#?}", self.log));
            let fields = line["fields"].clone();
            self.log.push(line);
            if fields["message"].as_str().unwrap().starts_with(start) {
                return fields;
            }
        }
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

    /// Its exit code, once its log has ended.
    fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.log.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {:#?}", self.log),
            }
        }
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), None, "it ends by itself");
        status.code()
    }
}

/// Sends each line of the log.
fn read(stdout: ChildStdout, lines: &Sender<Value>) {
    for line in BufReader::new(stdout).lines() {
        if lines.send(serde_json::from_str(&line.unwrap()).unwrap()).is_err() {
            return;
        }
    }
}

#[test]
fn the_log_names_each_limit_as_a_number() {
    let mut process = Process::start();
    process.signal("-TERM");
    assert_eq!(process.ended(), Some(0));
    let limits = process.log.iter().map(|line| &line["fields"]).find(|fields| fields["message"] == "limits").unwrap();
    assert_eq!((&limits["max_queue"], &limits["drain_delay_seconds"]), (&7.into(), &0.0.into()), "{limits}");
    let others = limits.as_object().unwrap().iter().filter(|(name, _)| *name != "message");
    assert!(others.clone().count() == 21 && others.clone().all(|(_, value)| value.is_number()), "{limits}");
}

#[test]
fn a_first_signal_waits_for_requests_and_a_second_does_not() {
    for (second, code) in [("-TERM", 143), ("-INT", 130)] {
        let mut process = Process::start();
        let mut client = process.ask();
        process.signal("-TERM");
        process.says("draining");
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(process.child.try_wait().unwrap(), None, "a request is under way");
        process.signal(second);
        process.says("told again");
        assert_eq!(process.ended(), Some(code), "{second}");
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
    process.says("draining");
    client.write_all(b"{\"model\":").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    // Whole, and no JSON.
    assert!(answer.contains("HTTP/1.1 400 ") && answer.contains("InvalidRequest"), "{answer}");
    assert_eq!(process.ended(), Some(0));
}
