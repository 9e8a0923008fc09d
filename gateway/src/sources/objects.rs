//! What the gateway reads of a pool and of its base: so little that nothing new in the rest of them can hide it. A gateway may
//! be older than the objects that it serves.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Resource;
use lorafleet_artifact::Digest;
use lorafleet_crds::{BaseModel, BaseModelRef, ServingPool};
use serde::Deserialize;

/// Of a `ServingPool`.
#[derive(Resource, Deserialize, Clone, Debug)]
#[resource(inherit = "ServingPool")]
pub struct Pool {
    pub metadata: ObjectMeta,
    pub spec: PoolSpec,
}

#[derive(Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    pub base_model_ref: BaseModelRef,
    #[serde(default)]
    pub adapter_selector: Option<LabelSelector>,
}

/// Of a `BaseModel`.
#[derive(Resource, Deserialize, Clone, Debug)]
#[resource(inherit = "BaseModel")]
pub struct Base {
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub status: Option<BaseStatus>,
}

#[derive(Deserialize, Clone, Debug)]
pub struct BaseStatus {
    #[serde(default)]
    pub digest: Option<Digest>,
}
