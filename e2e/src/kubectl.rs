//! `kubectl` against one cluster.
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell::Shell;

/// A kubectl command in the making: program, cluster and the words so far.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    words: Vec<OsString>,
    /// What tells helm the same cluster.
    helm: OsString,
}

impl Kubectl {
    /// For the cluster of a kubeconfig; `program` is kubectl.
    pub fn new(program: &Path, kubeconfig: &Path) -> Self {
        let mut flag = OsString::from("--kubeconfig=");
        flag.push(kubeconfig);
        Self { program: program.to_owned(), words: vec![flag.clone()], helm: flag }
    }

    /// For a context of the user's own kubeconfig.
    pub fn context(program: &Path, context: &str) -> Self {
        let words = vec![format!("--context={context}").into()];
        Self { program: program.to_owned(), words, helm: format!("--kube-context={context}").into() }
    }

    /// The program itself, for what concerns no cluster.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The same with more words.
    #[must_use]
    pub fn args<S: Into<OsString>>(&self, args: impl IntoIterator<Item = S>) -> Self {
        let mut more = self.clone();
        more.words.extend(args.into_iter().map(Into::into));
        more
    }

    /// In one namespace.
    #[must_use]
    pub fn namespace(&self, name: &str) -> Self {
        self.args([format!("--namespace={name}")])
    }

    /// The command as it stands, to run to its end.
    pub fn shell(&self) -> Shell {
        Shell::new(&self.program).args(&self.words)
    }

    /// Program and words as they stand, for what runs until it is stopped.
    pub fn words(&self) -> impl Iterator<Item = &OsStr> {
        std::iter::once(self.program.as_os_str()).chain(self.words.iter().map(OsString::as_os_str))
    }

    /// helm's words for the same cluster.
    pub fn helm_words(&self) -> [&OsStr; 1] {
        [&self.helm]
    }

    /// Standard output of the command with these further words.
    ///
    /// # Errors
    /// When the exit is not zero.
    pub fn output<S: Into<OsString>>(&self, args: impl IntoIterator<Item = S>) -> Result<String> {
        self.args(args).shell().output()
    }

    /// The reply as JSON (`-o json` is added).
    ///
    /// # Errors
    /// When the exit is not zero or the reply is no JSON.
    pub fn json<S: Into<OsString>>(&self, args: impl IntoIterator<Item = S>) -> Result<Value> {
        let text = self.args(args).args(["-o", "json"]).shell().output()?;
        serde_json::from_str(&text).context("read kubectl's JSON")
    }

    /// Applies manifests on the server's side; they go before what somebody has changed by hand.
    ///
    /// # Errors
    /// When the API server refuses one; the message holds its words.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.args(["apply", "--server-side", "--force-conflicts", "-f", "-"]).shell().input(manifests).output()
    }
}
