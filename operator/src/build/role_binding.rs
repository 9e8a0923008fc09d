//! What a pool's gateway may read, in the pool's namespace alone.

use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use kube::ResourceExt;
use lorafleet_crds::{ServingPool, names};

use super::{Defaults, metadata};

pub(super) fn gateway(pool: &ServingPool, defaults: &Defaults) -> RoleBinding {
    let name = names::gateway(&pool.name_any());
    RoleBinding {
        metadata: metadata(pool, name.clone(), names::GATEWAY_COMPONENT),
        role_ref: RoleRef {
            api_group: "rbac.authorization.k8s.io".to_owned(),
            kind: "ClusterRole".to_owned(),
            name: defaults.gateway_cluster_role.clone(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name,
            namespace: pool.metadata.namespace.clone(),
            ..Subject::default()
        }]),
    }
}
