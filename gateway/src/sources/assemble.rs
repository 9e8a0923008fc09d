//! From objects and reports to a `FleetView`. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::{Selector, SelectorExt as _};
use kube::{Resource as _, ResourceExt as _};
use lorafleet_crds::LoraAdapter;
use lorafleet_crds::condition::{self, ConditionType};

use super::objects::{Base, Pool};
use crate::view::{AdapterView, FleetView, Obstacle, PodReport, PodView};

/// Name of the engines' port in their Service.
const PORT_NAME: &str = "http";

/// What the API server has shown.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    pub namespace: String,
    pub pool: Option<Pool>,
    pub bases: Vec<Base>,
    pub adapters: Vec<LoraAdapter>,
    pub slices: Vec<Arc<EndpointSlice>>,
}

/// What asking a pod has shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Polled {
    pub address: SocketAddr,
    /// The last good one.
    pub report: Option<Arc<PodReport>>,
    /// Why the last question had no answer.
    pub error: Option<String>,
}

/// One engine pod as its Service shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    pub ready: bool,
}

/// The view. Without a pool object there is nothing to serve, so that a deleted pool answers 404.
pub fn assemble(objects: &Objects, polled: &BTreeMap<String, Polled>) -> FleetView {
    let Some(pool) = objects.pool.as_ref().filter(|pool| pool.meta().deletion_timestamp.is_none()) else {
        return FleetView { namespace: objects.namespace.clone(), ..FleetView::default() };
    };
    let base = objects.bases.iter().find(|base| base.name_any() == pool.spec.base_model_ref.name);
    FleetView {
        namespace: objects.namespace.clone(),
        base_digest: base.and_then(|base| base.status.as_ref()?.digest),
        base: pool.spec.base_model_ref.name.clone(),
        base_created_unix_s: created_unix_s(pool),
        adapters: Arc::new(adapters(pool, &objects.adapters)),
        pods: endpoints(&objects.slices).into_iter().map(|(name, endpoint)| pod(name, endpoint, polled)).collect(),
    }
}

fn pod(name: String, endpoint: Endpoint, polled: &BTreeMap<String, Polled>) -> (String, PodView) {
    let polled = polled.get(&name).filter(|polled| polled.address == endpoint.address);
    let pod = PodView {
        address: endpoint.address,
        ready: endpoint.ready,
        report: polled.and_then(|polled| polled.report.clone()),
        poll_error: polled.and_then(|polled| polled.error.clone()),
    };
    (name, pod)
}

/// Adapters of the pool's base that it selects, by served name.
fn adapters(pool: &Pool, objects: &[LoraAdapter]) -> BTreeMap<String, AdapterView> {
    let selector = match pool.spec.adapter_selector.clone().map(Selector::try_from) {
        None => Selector::default(),
        Some(Ok(selector)) => selector,
        // The operator says so in the pool's conditions.
        Some(Err(_)) => return BTreeMap::new(),
    };
    let mut objects: Vec<&LoraAdapter> = objects
        .iter()
        .filter(|object| object.meta().deletion_timestamp.is_none())
        .filter(|object| object.spec.base_model_ref == pool.spec.base_model_ref && selector.matches(object.labels()))
        .collect();
    objects.sort_by_cached_key(|object| object.claim(&served_name(object)));
    let mut adapters = BTreeMap::new();
    for object in objects {
        adapters.entry(served_name(object)).or_insert_with(|| adapter(object, &pool.name_any()));
    }
    adapters
}

/// The name that the operator has told the pods, which may lag behind the spec.
fn served_name(object: &LoraAdapter) -> String {
    let told = object.status.as_ref().and_then(|status| status.served_name.clone());
    let asked = || object.spec.served_name.as_ref().map(ToString::to_string);
    told.or_else(asked).unwrap_or_else(|| object.name_any())
}

fn adapter(object: &LoraAdapter, pool: &str) -> AdapterView {
    let Some(status) = &object.status else {
        return AdapterView { created_unix_s: created_unix_s(object), ..AdapterView::default() };
    };
    let held = status.pools.iter().filter(|placement| placement.name == pool).flat_map(|placement| &placement.held);
    let stalled = condition::is_true(&status.conditions, ConditionType::Stalled);
    let told = condition::find(&status.conditions, ConditionType::Ready).filter(|ready| ready.status != "True");
    let current = status.current_revision;
    let ranks = current.and_then(|current| status.revision(current)).map(|revision| &revision.ranks);
    AdapterView {
        current,
        others: status.candidate_revision.iter().chain(held).copied().collect(),
        created_unix_s: created_unix_s(object),
        rank: ranks.and_then(|ranks| ranks.values().flatten().max()).copied().unwrap_or(0),
        obstacle: told.map(|ready| Obstacle {
            refused: stalled,
            reason: ready.reason.clone(),
            message: ready.message.clone(),
        }),
    }
}

fn created_unix_s(object: &impl kube::Resource) -> i64 {
    object.meta().creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

/// Engine pods by name, ready or not: those that are not can still say why.
pub fn endpoints(slices: &[Arc<EndpointSlice>]) -> BTreeMap<String, Endpoint> {
    let mut endpoints = BTreeMap::<String, Endpoint>::new();
    for slice in slices {
        let ports = slice.ports.as_deref().unwrap_or_default();
        let port = ports.iter().find(|port| port.name.as_deref() == Some(PORT_NAME)).or(ports.first());
        let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else {
            continue;
        };
        for endpoint in &slice.endpoints {
            let address = endpoint.addresses.first().and_then(|address| address.parse::<IpAddr>().ok());
            let Some(address) = address.map(|address| SocketAddr::new(address, port)) else {
                continue;
            };
            let name = endpoint.target_ref.as_ref().and_then(|target| target.name.clone());
            let conditions = endpoint.conditions.as_ref();
            let terminating = conditions.and_then(|conditions| conditions.terminating).unwrap_or(false);
            let ready = conditions.and_then(|conditions| conditions.ready).unwrap_or(true) && !terminating;
            let known = endpoints.entry(name.unwrap_or_else(|| address.to_string()));
            // While an endpoint moves between slices it may be in two of them.
            let known = known.or_insert(Endpoint { address, ready });
            if ready && !known.ready {
                *known = Endpoint { address, ready };
            }
        }
    }
    endpoints
}

#[cfg(test)]
#[path = "assemble_tests.rs"]
mod tests;
