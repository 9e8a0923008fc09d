//! The commands with which a person looks around once something runs.
use std::fmt::Write;
use std::path::Path;

use crate::place::{Place, Target};
use crate::{demo, images, s3};

/// For a shell: kubectl and the programs, the demo's model, and where the demo runs a chat and the store.
pub fn text(target: &Target, model: Option<&Path>) -> String {
    let mut text = String::new();
    if let Some(model) = model {
        let _ = writeln!(text, "export MODEL={}", model.display());
    }
    if let Some(cluster) = target.own() {
        let (config, tools) = (cluster.kubeconfig(), cluster.tools());
        let helm = tools.helm.parent().unwrap_or(&tools.helm);
        let engine = images::built("engine");
        let programs = engine.parent().unwrap_or(&engine);
        let _ = writeln!(text, "export KUBECONFIG={}", config.display());
        let _ = writeln!(
            text,
            "export PATH={}:{}:{}:$PATH",
            tools.kubernetes.display(),
            helm.display(),
            programs.display()
        );
    }
    if let Some((before, url)) = way(target, demo::NAMESPACE, "chat-gateway", 80, 8080) {
        let _ = write!(
            text,
            "kubectl{} get lorafleet
{before}curl {url}/v1/chat/completions -H 'content-type: application/json' -d \\
  '{{\"model\": \"pirate\", \"messages\": [{{\"role\": \"user\", \"content\": \"How do I cook rice?\"}}], \"max_tokens\": 64}}'
export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none
",
            words(target, demo::NAMESPACE)
        );
    }
    if let Some((before, url)) = way(target, s3::NAMESPACE, "s3", s3::PORT, s3::PORT) {
        let _ = writeln!(
            text,
            "{before}export AWS_ENDPOINT_URL={url} AWS_REGION={} AWS_ACCESS_KEY_ID={} AWS_SECRET_ACCESS_KEY={}",
            s3::REGION,
            s3::ACCESS_KEY_ID,
            s3::SECRET_ACCESS_KEY
        );
    }
    match target.place() {
        Place::Own(settings) if settings.name == "dev" => text.push_str("cargo xtask down\n"),
        Place::Own(settings) => {
            let _ = writeln!(text, "cargo xtask down --name {}", settings.name);
        }
        Place::Context { name, .. } => {
            let _ = writeln!(text, "cargo xtask down --context {name}");
        }
    }
    text
}

/// Which cluster and namespace, in kubectl's words. The own cluster's kubeconfig says both by itself.
fn words(target: &Target, namespace: &str) -> String {
    match target.place() {
        Place::Own(_) => String::new(),
        Place::Context { name, .. } => format!(" --context {name} --namespace {namespace}"),
    }
}

/// What must run first, if anything, and the URL of a Service; none where there is no such Service.
fn way(target: &Target, namespace: &str, service: &str, port: u16, local: u16) -> Option<(String, String)> {
    let lookup = ["get", "service", service, "-o", "jsonpath={.spec.clusterIP}"];
    let address = target.kubectl().namespace(namespace).output(lookup).ok()?;
    Some(match target.place() {
        Place::Own(_) if port == 80 => (String::new(), format!("http://{}", address.trim())),
        Place::Own(_) => (String::new(), format!("http://{}:{port}", address.trim())),
        Place::Context { .. } => {
            let words = words(target, namespace);
            (
                format!("kubectl{words} port-forward service/{service} {local}:{port} &\n"),
                format!("http://127.0.0.1:{local}"),
            )
        }
    })
}
