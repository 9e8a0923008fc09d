//! Objects of our kinds that this version cannot read: written for another version of the definitions, or with a value that no
//! type here holds. One of them must not hide all others, and it says so itself.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::conditions::{Stated, conditions};

/// Owner of the conditions that are said of such objects. Whoever reads them later takes the conditions over.
const MANAGER: &str = "lorafleet-unreadable";

/// Objects of which it is remembered what was said. Beyond that, all is forgotten and said once more.
const REMEMBERED_MAX: usize = 4096;

/// One that was seen.
#[derive(Clone, Debug)]
pub struct Unreadable {
    pub resource: ApiResource,
    pub metadata: ObjectMeta,
    pub error: String,
}

/// Writes into the status of each that it cannot be read, once for what it is.
pub async fn say(client: Client, mut seen: UnboundedReceiver<Unreadable>) {
    let mut said = HashMap::<String, (Option<i64>, String)>::new();
    while let Some(Unreadable { resource, metadata, error }) = seen.recv().await {
        let (namespace, name) = (metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref());
        let (name, uid) = (name.unwrap_or_default(), metadata.uid.clone().unwrap_or_default());
        let words = (metadata.generation, error);
        // Saying it is a change of the object, which is then seen again.
        if said.get(&uid) == Some(&words) {
            continue;
        }
        tracing::warn!(kind = %resource.kind, namespace, name, error = %words.1, "an object cannot be read");
        let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
        let patch = patch(&resource, &metadata, &words.1, Timestamp::now());
        match api.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&patch)).await {
            Ok(_) => {
                if said.len() >= REMEMBERED_MAX {
                    said.clear();
                }
                said.insert(uid, words);
            }
            Err(error) => {
                tracing::warn!(kind = %resource.kind, namespace, name, %error, "saying that it cannot be read")
            }
        }
    }
}

fn patch(resource: &ApiResource, metadata: &ObjectMeta, error: &str, now: Timestamp) -> Value {
    let message = format!("the operator cannot read this object: {error}");
    let said = |type_, status| Stated::new(type_, status, Cause::Unreadable, message.clone());
    let stated = [
        said(ConditionType::Ready, ConditionStatus::False),
        said(ConditionType::Reconciling, ConditionStatus::False),
        said(ConditionType::Stalled, ConditionStatus::True),
    ];
    json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": { "name": metadata.name, "uid": metadata.uid },
        "status": { "conditions": conditions(&[], &stated, metadata.generation, now) },
    })
}
