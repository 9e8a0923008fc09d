//! A port of this machine that leads to a Service, for as long as it is held.
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use anyhow::{Context, Result};

use crate::kubectl::Kubectl;

/// A running `kubectl port-forward`; it ends when dropped.
#[derive(Debug)]
pub struct Forward {
    child: Child,
    url: String,
}

impl Forward {
    /// Opens a free port of 127.0.0.1 to `port` of a Service.
    ///
    /// # Errors
    /// When no pod stands behind the Service.
    pub fn open(kubectl: &Kubectl, namespace: &str, service: &str, port: u16) -> Result<Self> {
        let mut child = kubectl
            .namespace(namespace)
            .args(["port-forward", "--address", "127.0.0.1", &format!("service/{service}"), &format!(":{port}")])
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("start kubectl port-forward")?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.as_mut() {
            BufReader::new(stdout).read_line(&mut line).context("read kubectl port-forward")?;
        }
        // "Forwarding from 127.0.0.1:43211 -> 8080"
        let mut forward = Self { child, url: String::new() };
        let address = line.split_whitespace().find(|word| word.starts_with("127.0.0.1:"));
        let address =
            address.with_context(|| format!("kubectl port-forward to {service}:{port} said `{}`", line.trim()))?;
        forward.url = format!("http://{address}");
        Ok(forward)
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // It may have ended by itself, with its pod.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
