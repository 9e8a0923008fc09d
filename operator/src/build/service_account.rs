//! The identity of a pool's gateway pods.

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::ResourceExt;
use lorafleet_crds::{ServingPool, names};

use super::metadata;

pub(super) fn gateway(pool: &ServingPool) -> ServiceAccount {
    ServiceAccount {
        metadata: metadata(pool, names::gateway(&pool.name_any()), names::GATEWAY_COMPONENT),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}
