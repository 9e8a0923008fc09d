//! Manners in a cluster that belongs to somebody: what is asked before anything is made there, and what is taken away again.
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cache::Cache;
use crate::images;
use crate::install::{self, Images};
use crate::kubectl::Kubectl;
use crate::progress::{say, step};
use crate::shell::Shell;
use crate::{demo, s3, tools, wait};

/// On every namespace that the harness makes; nothing without it is changed or removed.
const MADE_BY: &str = "lorafleet.dev/made-by";
const US: &str = "xtask";

/// Longest wait for an answer to a first question.
const ANSWER_TIME_MAX: &str = "--request-timeout=10s";
/// Time for the images to be pulled.
const PULL_TIME_MAX: Duration = Duration::from_secs(300);

/// What the chart and the demo make that not everybody may.
const RIGHTS: [&str; 5] = [
    "namespaces",
    "customresourcedefinitions.apiextensions.k8s.io",
    "clusterroles.rbac.authorization.k8s.io",
    "clusterrolebindings.rbac.authorization.k8s.io",
    "deployments.apps",
];

/// Manifest of a namespace that may be removed again.
pub fn namespace(name: &str) -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{MADE_BY}: {US}}}}}\n")
}

/// Asks the cluster of a context whether lorafleet can be put there without touching anything that is not the harness's.
///
/// # Errors
/// When the context is unknown, its cluster does not answer, a right is missing, or lorafleet is installed there already.
pub fn enter(kubectl: &Kubectl, context: &str) -> Result<()> {
    known(kubectl, context)?;
    kubectl
        .output(["get", "--raw", "/readyz", ANSWER_TIME_MAX])
        .with_context(|| format!("the API server of context {context} does not answer"))?;
    let missing: Vec<&str> = RIGHTS.into_iter().filter(|kind| !may_create(kubectl, kind)).collect();
    if !missing.is_empty() {
        bail!(
            "context {context}: you may not create {} there. The chart brings custom resources and cluster roles, so it \
             wants somebody who may; without a cluster of your own, `cargo xtask demo` starts one here",
            missing.join(", ")
        );
    }
    for name in [install::NAMESPACE, s3::NAMESPACE, demo::NAMESPACE] {
        if let Some(found) = find(kubectl, "namespace", name)?
            && found["metadata"]["labels"][MADE_BY] != US
        {
            bail!(
                "context {context} has a namespace {name} that this command did not make; what is in it could be in use, \
                 so nothing was changed. Remove it, or take another cluster"
            );
        }
    }
    let ours = find(kubectl, "namespace", install::NAMESPACE)?.is_some();
    if !ours && find(kubectl, "crd", "loraadapters.lorafleet.dev")?.is_some() {
        bail!(
            "context {context} has the custom resources of lorafleet, installed by somebody else, so nothing was changed. \
             Use that installation (README, On your own cluster), or take another cluster"
        );
    }
    for name in [install::NAMESPACE, s3::NAMESPACE] {
        kubectl.apply(&namespace(name))?;
    }
    Ok(())
}

fn known(kubectl: &Kubectl, context: &str) -> Result<()> {
    let listed = Shell::new(kubectl.program()).args(["config", "get-contexts", "--output=name"]).output()?;
    if listed.lines().any(|name| name == context) {
        return Ok(());
    }
    let names: Vec<&str> = listed.lines().collect();
    let place = std::env::var("KUBECONFIG").unwrap_or_else(|_| "~/.kube/config".to_owned());
    if names.is_empty() {
        bail!("no context `{context}`: {place} has none at all; set KUBECONFIG to the file of your cluster");
    }
    bail!("no context `{context}` in {place}; there are: {}", names.join(", "))
}

/// kubectl's exit says no as well as failure; either way nothing is tried.
fn may_create(kubectl: &Kubectl, kind: &str) -> bool {
    kubectl.output(["auth", "can-i", "create", kind, "--all-namespaces", "--quiet", ANSWER_TIME_MAX]).is_ok()
}

fn find(kubectl: &Kubectl, kind: &str, name: &str) -> Result<Option<Value>> {
    let text = kubectl.output(["get", kind, name, "--ignore-not-found", "-o", "json"])?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&text).with_context(|| format!("read {kind} {name}"))?))
}

/// Runs each image once for its `--help`, so that one that cannot be pulled or run says so now and by its name.
///
/// # Errors
/// Such an image, with what the cluster says about it and how images come to a cluster.
pub fn try_images(kubectl: &Kubectl, context: &str, images: &Images) -> Result<()> {
    let store = kubectl.namespace(s3::NAMESPACE);
    let remove = ["delete", "pod", "images", "--ignore-not-found", "--grace-period=0", "--force"];
    step(&format!("try the images {} in context {context}", images.name("*")), || {
        store.output(remove)?;
        store.apply(&trial(images))?;
        let tried = wait::until("every image has run once", PULL_TIME_MAX, || {
            let pod = store.json(["get", "pod", "images"])?;
            match images_state(&pod) {
                State::Ran => Ok(Some(Ok(()))),
                State::Failed(why) => Ok(Some(Err(why))),
                State::Waiting(why) => bail!("{why}"),
            }
        });
        let removed = store.output(remove);
        if let Err(why) = tried? {
            bail!(
                "context {context} cannot run the image {why}\n{}\nTwo namespaces were made; `cargo xtask down --context \
                 {context}` removes them",
                how_images_come(images)
            );
        }
        removed.map(drop)
    })
}

fn trial(images: &Images) -> String {
    let containers: String = images::NAMES
        .iter()
        .map(|name| {
            format!(
                "  - name: {name}
    image: {}
    imagePullPolicy: IfNotPresent
    args: [--help]
    securityContext: {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
",
                images.name(name)
            )
        })
        .collect();
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: images, namespace: {}}}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
{containers}",
        s3::NAMESPACE
    )
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Ran,
    Waiting(String),
    Failed(String),
}

/// What a pod of one-shot containers says about its images.
fn images_state(pod: &Value) -> State {
    let none = Vec::new();
    let statuses = pod["status"]["containerStatuses"].as_array().unwrap_or(&none);
    let mut waiting = Vec::new();
    for status in statuses {
        let (name, image) = (status["name"].as_str().unwrap_or("?"), status["image"].as_str().unwrap_or("?"));
        let (wait, end) = (&status["state"]["waiting"], &status["state"]["terminated"]);
        let said = |state: &Value| {
            let (reason, message) = (state["reason"].as_str().unwrap_or(""), state["message"].as_str().unwrap_or(""));
            format!("{image}: {reason} {message}").trim().to_owned()
        };
        if wait["reason"].as_str().is_some_and(|reason| reason != "ContainerCreating" && reason != "PodInitializing") {
            return State::Failed(said(wait));
        }
        match end["exitCode"].as_i64() {
            Some(0) => {}
            Some(code) => return State::Failed(format!("{} (exit {code})", said(end))),
            None => waiting.push(name.to_owned()),
        }
    }
    if statuses.is_empty() || !waiting.is_empty() {
        let scheduled = pod["status"]["conditions"].as_array().unwrap_or(&none);
        let why = scheduled.iter().filter_map(|it| it["message"].as_str()).collect::<Vec<_>>().join("; ");
        return State::Waiting(format!("not finished: {} {why}", waiting.join(", ")));
    }
    State::Ran
}

/// How images come to a cluster.
pub fn how_images_come(images: &Images) -> String {
    let names: Vec<String> = images::NAMES.iter().map(|name| images.name(name)).collect();
    format!(
        "The cluster must be able to run {}.
`cargo xtask images` makes them as OCI archives and prints their paths. Then either bring each archive to every node:
  kind load image-archive ARCHIVE --name CLUSTER
  minikube image load ARCHIVE
  k3s ctr images import ARCHIVE
  ctr --namespace k8s.io images import ARCHIVE
or push each to a registry that the nodes may pull from, and name it:
  skopeo copy oci-archive:ARCHIVE docker://registry.example/lorafleet/NAME:dev
  cargo xtask demo --context CONTEXT --repository registry.example/lorafleet --tag dev",
        names.join(", ")
    )
}

/// Takes away what [`enter`] and what came after it made, and nothing else.
///
/// # Errors
/// When something cannot be removed.
pub fn leave(cache: &Cache, context: &str) -> Result<()> {
    let kubectl = Kubectl::context(&tools::kubectl(cache)?, context);
    known(&kubectl, context)?;
    let selector = format!("--selector={MADE_BY}={US}");
    let made = kubectl.output(["get", "namespaces", &selector, "-o", "name"])?;
    let made: Vec<&str> = made.lines().collect();
    if made.is_empty() {
        say(format!("nothing in context {context} was made by this command"));
        return Ok(());
    }
    let system = format!("namespace/{}", install::NAMESPACE);
    if made.contains(&system.as_str()) {
        let others = elsewhere(&kubectl, &made)?;
        if !others.is_empty() {
            bail!(
                "context {context} has objects of lorafleet in namespaces that this command did not make, and the kinds go with \
                 the installation: {}. Nothing was removed; delete them first",
                others.join(", ")
            );
        }
    }
    step(&format!("leave context {context}: {}", made.join(" ")), || {
        // Objects first, while their operator is there; then the release with the custom resources.
        let (last, first): (Vec<&str>, Vec<&str>) = made.iter().partition(|name| **name == system);
        remove(&kubectl, &first)?;
        if !last.is_empty() {
            install::uninstall(cache, &kubectl)?;
        }
        remove(&kubectl, &last)
    })
}

/// Objects of the three kinds in namespaces other than these (`namespace/NAME`).
fn elsewhere(kubectl: &Kubectl, made: &[&str]) -> Result<Vec<String>> {
    if find(kubectl, "crd", "loraadapters.lorafleet.dev")?.is_none() {
        return Ok(Vec::new());
    }
    let found = kubectl.json(["get", "basemodels,loraadapters,servingpools", "--all-namespaces"])?;
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let items = found["items"].as_array().cloned().unwrap_or_default();
    Ok(items
        .iter()
        .map(|it| (text(&it["metadata"]["namespace"]), text(&it["kind"]), text(&it["metadata"]["name"])))
        .filter(|(namespace, ..)| !made.contains(&format!("namespace/{namespace}").as_str()))
        .map(|(namespace, kind, name)| format!("{kind} {namespace}/{name}"))
        .collect())
}

fn remove(kubectl: &Kubectl, names: &[&str]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    kubectl.args(["delete", "--timeout=300s"]).args(names.iter().copied()).shell().run()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(states: &str) -> Value {
        serde_json::from_str(&format!("{{\"status\": {{\"containerStatuses\": [{states}]}}}}")).unwrap()
    }

    #[test]
    fn reads_what_became_of_each_image() {
        let ended = r#"{"name": "a", "image": "r/a:1", "state": {"terminated": {"exitCode": 0}}}"#;
        let pulling = r#"{"name": "b", "image": "r/b:1", "state": {"waiting": {"reason": "ContainerCreating"}}}"#;
        let missing = r#"{"name": "c", "image": "r/c:1",
            "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}"#;
        let broken = r#"{"name": "d", "image": "r/d:1",
            "state": {"terminated": {"exitCode": 128, "reason": "StartError", "message": "exec format error"}}}"#;
        assert_eq!(images_state(&pod(ended)), State::Ran);
        assert_eq!(
            images_state(&pod(&format!("{ended}, {missing}"))),
            State::Failed("r/c:1: ErrImagePull not found".into())
        );
        let failed = "r/d:1: StartError exec format error (exit 128)";
        assert_eq!(images_state(&pod(broken)), State::Failed(failed.into()));
        for unfinished in [pulling, ""] {
            assert!(matches!(images_state(&pod(unfinished)), State::Waiting(_)), "{unfinished}");
        }
    }
}
