//! Puts lorafleet into a cluster by its chart.
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::kubectl::Kubectl;
use crate::repository;
use crate::shell::Shell;
use crate::tools::Tools;

pub const NAMESPACE: &str = "lorafleet-system";
pub const RELEASE: &str = "lorafleet";

/// Where a cluster finds the images.
#[derive(Clone, Debug)]
pub struct Images {
    /// What stands before `/operator`, `/gateway`, `/engine`, `/s3`.
    pub repository: String,
    pub tag: String,
}

impl Default for Images {
    fn default() -> Self {
        Self { repository: "lorafleet.local".to_owned(), tag: "dev".to_owned() }
    }
}

impl Images {
    /// Name of one image.
    pub fn name(&self, image: &str) -> String {
        format!("{}/{image}:{}", self.repository, self.tag)
    }
}

/// The chart's folder.
pub fn chart() -> PathBuf {
    repository().join("charts/lorafleet")
}

/// Installs or upgrades the release and waits until the operator is ready.
///
/// # Errors
/// When helm fails; the message holds its words.
pub fn helm(tools: &Tools, kubectl: &Kubectl, images: &Images, values: &[String]) -> Result<()> {
    let mut helm = Shell::new(&tools.helm)
        .args(["upgrade", "--install", RELEASE])
        .arg(chart())
        .args(["--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s"])
        .args(["--set", &format!("image.repository={}", images.repository)])
        .args(["--set", &format!("image.tag={}", images.tag)])
        .args(["--set", "image.pullPolicy=IfNotPresent"])
        .args(kubectl.helm_words());
    for value in values {
        helm = helm.args(["--set", value]);
    }
    helm.run().context("install the chart")
}
