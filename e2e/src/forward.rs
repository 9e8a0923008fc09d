//! Ways from this machine to a port in the cluster.
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::kubectl::Kubectl;
use crate::tied;

/// A base URL, `http://host:port`, and what keeps it open: it is good for as long as one copy is held.
#[derive(Clone, Debug)]
pub struct Route {
    url: String,
    _forward: Option<Arc<Forward>>,
}

impl Route {
    /// To an address that this machine reaches by itself.
    pub fn direct(url: impl Into<String>) -> Self {
        Self { url: url.into(), _forward: None }
    }

    /// Over a free port of 127.0.0.1 that `kubectl port-forward` opens to `target` (`service/NAME` or `pod/NAME`).
    ///
    /// # Errors
    /// When no pod stands behind it; kubectl's own words are on standard error.
    pub fn forwarded(kubectl: &Kubectl, namespace: &str, target: &str, port: u16) -> Result<Self> {
        let words = ["port-forward", "--address", "127.0.0.1", target, &format!(":{port}")];
        let mut command = tied::command(kubectl.namespace(namespace).args(words).words());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let child = tied::spawn(command).context("start kubectl port-forward")?;
        let mut forward = Forward { child };
        // "Forwarding from 127.0.0.1:43211 -> 8080"
        let line = forward.child.stdout.take().map(first_line).unwrap_or_default();
        let address = line.split_whitespace().find(|word| word.starts_with("127.0.0.1:"));
        let address = address.with_context(|| {
            format!("kubectl port-forward to {target}:{port} of namespace {namespace} said `{}`", line.trim())
        })?;
        Ok(Self { url: format!("http://{address}"), _forward: Some(Arc::new(forward)) })
    }

    /// `http://host:port`.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// A running `kubectl port-forward`; it ends when dropped.
#[derive(Debug)]
struct Forward {
    child: Child,
}

/// The first line; the rest is read and forgotten, since a pipe that nobody reads stops who writes into it.
fn first_line(output: ChildStdout) -> String {
    let mut output = BufReader::new(output);
    let mut line = String::new();
    // An output that cannot be read says as little as an empty one.
    let _ = output.read_line(&mut line);
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    line
}

impl Drop for Forward {
    fn drop(&mut self) {
        // It may have ended by itself, with its pod.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
