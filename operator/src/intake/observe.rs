//! The one reader of an adapter's world: the stores, its job, and what the pools saw.

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use lorafleet_crds::{LoraAdapter, NameClaim};

use super::gate::gate;
use super::observed::{Observed, PoolSeen};
use crate::context::Context;
use crate::job::JobState;
use crate::pool::selects;

pub fn observe(adapter: &LoraAdapter, context: &Context) -> Observed {
    let stores = &context.stores;
    let namespace = adapter.namespace().unwrap_or_default();
    let (uid, base_name) = (adapter.uid().unwrap_or_default(), &adapter.spec.base_model_ref.name);
    let base = stores.base_models.get(&ObjectRef::new(base_name).within(&namespace)).map(|base| base.as_ref().clone());
    let same_name = stores.adapters_of(Some(&namespace), base_name).into_iter().filter(|other| {
        other.served_name() == adapter.served_name()
            && other.uid() != adapter.uid()
            && other.metadata.deletion_timestamp.is_none()
    });
    let rivals: Vec<NameClaim> = same_name.map(|other| other.claim(adapter.served_name())).collect();
    let mut pools: Vec<PoolSeen> = stores
        .pools_of(Some(&namespace), base_name)
        .into_iter()
        .filter(|pool| pool.metadata.deletion_timestamp.is_none())
        .map(|pool| {
            let sighting = context.sightings.of(&pool.uid().unwrap_or_default(), &uid);
            PoolSeen {
                name: pool.name_any(),
                selects: selects(&pool.spec.adapter_selector, adapter),
                idle: pool.spec.replicas == 0,
                looked: sighting.is_some(),
                seen: sighting.flatten(),
            }
        })
        .collect();
    pools.sort_by(|a, b| a.name.cmp(&b.name));
    let source_caps = context.settings.source_caps.clone();
    let job = match gate(adapter, base.as_ref(), &rivals, &source_caps) {
        Ok(gate) => context.intake_jobs.state(&uid, &gate.order.fingerprint),
        Err(_) => JobState::Idle,
    };
    let judged = adapter.status.as_ref().and_then(|status| status.source_listing.as_ref());
    let recheck = context.adapter_rechecks.of(&uid, judged);
    let now_s = Timestamp::now().as_second();
    Observed { adapter: adapter.clone(), base, rivals, pools, job, recheck, source_caps, now_s }
}
