//! Puts lorafleet into a cluster by its chart, beside a store with the demo's model and adapters.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::{Cache, key};
use crate::kubectl::Kubectl;
use crate::place::Target;
use crate::progress::{say, step};
use crate::s3::{self, Store};
use crate::shell::Shell;
use crate::{guest, repository, tools};

pub const NAMESPACE: &str = "lorafleet-system";
pub const RELEASE: &str = "lorafleet";

/// Where a cluster finds the images.
#[derive(Clone, Debug)]
pub struct Images {
    /// What stands before the names of [`crate::images::NAMES`], with a slash between.
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

/// Everything: images, namespaces, S3 server, what is in it, and the chart. What is there already is used as it is.
///
/// # Errors
/// When one of them cannot be had.
pub fn all(cache: &Cache, target: &Target) -> Result<Store> {
    let kubectl = target.kubectl();
    let _alone = cache.alone(&target.name())?;
    let images = target.images(cache)?;
    let model = tools::model(cache)?;
    let wanted = key(&[images.name("*").as_bytes(), chart_text()?.as_bytes()]);
    let stamp = kubectl.output(["get", "namespace", s3::NAMESPACE, "--ignore-not-found", "-o", STAMP_PATH])?;
    if stamp.trim() == wanted {
        let store = store(target)?;
        if store.holds(&model_path(&model))? {
            say("lorafleet and its store are installed already");
            return Ok(store);
        }
    }
    for name in [s3::NAMESPACE, NAMESPACE] {
        kubectl.apply(&guest::namespace(name))?;
    }
    let store = step("start the S3 server and fill it", || {
        Store::deploy(kubectl, &images.name("s3"))?;
        let store = store(target)?;
        fill(&store, &model)?;
        Ok(store)
    })?;
    step("install lorafleet with helm", || {
        forget_half_done(kubectl)?;
        helm(cache, kubectl, &images)
    })?;
    kubectl.output(["annotate", "--overwrite", "namespace", s3::NAMESPACE, &format!("{STAMP}={wanted}")])?;
    Ok(store)
}

/// On the store's namespace: what is installed, written when all of it is.
const STAMP: &str = "lorafleet.dev/installed";
const STAMP_PATH: &str = r"jsonpath={.metadata.annotations.lorafleet\.dev/installed}";

/// The S3 server of a cluster.
///
/// # Errors
/// When it does not answer.
pub fn store(target: &Target) -> Result<Store> {
    Store::at(target.reach(s3::NAMESPACE, "service/s3", s3::PORT)?)
}

/// Puts the model and the demo's adapters into the store: `s3://models/smollm2` and `s3://adapters/team/NAME`.
fn fill(store: &Store, model: &Path) -> Result<()> {
    store.bucket("models")?;
    store.bucket("adapters")?;
    store.put(model, &model_path(model))?;
    for adapter in ["tickets", "pirate", "stranger"] {
        store.put_folder(&demo_adapter(adapter), &format!("adapters/team/{adapter}"))?;
    }
    Ok(())
}

fn model_path(model: &Path) -> String {
    format!("models/smollm2/{}", model.file_name().unwrap_or_default().to_string_lossy())
}

/// Folder of one of the demo's adapters.
pub fn demo_adapter(name: &str) -> PathBuf {
    repository().join("e2e/demo/adapters").join(name)
}

/// All that the chart consists of, to know whether it changed.
fn chart_text() -> Result<String> {
    let listed = Shell::new("find").arg(chart()).args(["-type", "f"]).output()?;
    let mut files: Vec<&str> = listed.lines().collect();
    files.sort_unstable();
    let mut text = String::new();
    for file in files {
        text.push_str(&fs::read_to_string(file).with_context(|| format!("read {file}"))?);
    }
    Ok(text)
}

/// helm refuses to go on where a killed helm has left a release half done; without that record it goes on from the one before.
/// Nobody else is at work on it: helm ends with the run that started it, and runs wait for each other.
fn forget_half_done(kubectl: &Kubectl) -> Result<()> {
    let half_done = "status in (pending-install, pending-upgrade, pending-rollback)";
    let selector = format!("--selector=owner=helm,name={RELEASE},{half_done}");
    kubectl.namespace(NAMESPACE).output(["delete", "secrets", &selector]).map(drop)
}

/// Nobody here waits for minutes until a changed source is noticed.
pub const SOURCE_CHECKS: &str = "operator.sourceCheckSeconds=2";

/// Installs or upgrades the release and waits until the operator is ready.
///
/// # Errors
/// When helm fails; the message holds its words.
pub fn helm(cache: &Cache, kubectl: &Kubectl, images: &Images) -> Result<()> {
    Shell::new(tools::helm(cache)?)
        .args(["upgrade", "--install", RELEASE])
        .arg(chart())
        .args(["--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "300s"])
        .args(["--set", &format!("image.repository={}", images.repository)])
        .args(["--set", &format!("image.tag={}", images.tag)])
        .args(["--set", "image.pullPolicy=IfNotPresent"])
        // What the harness installs it also takes away again, with the kinds.
        .args(["--set", "crds.keep=false"])
        .args(["--set", SOURCE_CHECKS])
        .args(kubectl.helm_words())
        .run()
        .context("install the chart")
}

/// Changes values of the release, each as `NAME=VALUE`, and waits until the operator is ready.
///
/// # Errors
/// When helm fails; the message holds its words.
pub fn set(cache: &Cache, kubectl: &Kubectl, values: &[&str]) -> Result<()> {
    Shell::new(tools::helm(cache)?)
        .args(["upgrade", RELEASE])
        .arg(chart())
        .args(["--namespace", NAMESPACE, "--reuse-values", "--wait", "--timeout", "300s"])
        .args(values.iter().flat_map(|value| ["--set", *value]))
        .args(kubectl.helm_words())
        .run()
        .context("change the values of the chart")
}

/// Removes the release and with it the kinds and all their objects; nothing happens where there is none.
///
/// # Errors
/// When helm fails; the message holds its words.
pub fn uninstall(cache: &Cache, kubectl: &Kubectl) -> Result<()> {
    Shell::new(tools::helm(cache)?)
        .args(["uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "300s"])
        .args(kubectl.helm_words())
        .run()
        .context("uninstall the chart")
}
