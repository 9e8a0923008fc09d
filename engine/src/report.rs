//! What this engine says about itself: the body of `GET /v1/lora_adapters`. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterReport, AdapterState, Budgets, Load, Tier};
use sha2::{Digest as _, Sha256};

use crate::fleet::{Catalog, Placed};
use crate::residency::Facts;
use crate::snapshot::Snapshot;

pub fn budgets(snapshot: &Snapshot) -> Budgets {
    let pages = snapshot.pages;
    let idle = u64::from(snapshot.idle_adapter_pages);
    Budgets {
        page_bytes: snapshot.page_bytes,
        pages_total: pages.total.into(),
        pages_free: pages.free.into(),
        pages_cached: u64::from(pages.cached) + idle,
        pages_used: u64::from(pages.kv + pages.adapter) - idle,
        host_bytes_total: snapshot.host_bytes_total,
        host_bytes_used: snapshot.host_bytes_used,
        disk_bytes_total: 0,
        disk_bytes_used: 0,
    }
}

pub fn load(snapshot: &Snapshot) -> Load {
    Load { running: snapshot.running, waiting: snapshot.waiting, waiting_tokens: snapshot.waiting_tokens }
}

/// One row per (name, digest): those that are placed, then those that are on their way out.
pub fn adapters(catalog: &Catalog, snapshot: &Snapshot, now: Instant) -> Vec<AdapterReport> {
    let named = catalog.names.versions().filter_map(|(name, digest)| {
        let placed = catalog.wanted(name, &digest)?;
        Some(row(&digest, placed, snapshot, now, false))
    });
    let leaving = catalog.departed.iter().filter(|(digest, _)| snapshot.facts(digest).is_some());
    let leaving = leaving.map(|(digest, placed)| row(digest, placed, snapshot, now, true));
    named.chain(leaving).collect()
}

/// Names what these rows and aliases say, but for the counters, which move all the time.
pub fn holdings(adapters: &[AdapterReport], aliases: &BTreeMap<String, Digest>) -> String {
    let mut hasher = Sha256::new();
    for adapter in adapters {
        // Without `..`, so that a new field has to choose its side.
        let AdapterReport {
            name,
            namespace,
            digest,
            state,
            tier,
            pinned,
            rank,
            bytes,
            last_error,
            leases: _,
            waiting: _,
            idle_ms: _,
            loads: _,
            evictions: _,
        } = adapter;
        let error = last_error.as_ref().map(|error| (&error.code, &error.message));
        let said = format!("{:?}", (name, namespace, digest, state, tier, pinned, rank, bytes, error));
        hasher.update(said);
    }
    hasher.update(format!("{aliases:?}"));
    hasher.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn row(digest: &Digest, placed: &Placed, snapshot: &Snapshot, now: Instant, leaving: bool) -> AdapterReport {
    let facts = snapshot.facts(digest);
    AdapterReport {
        name: placed.name.clone(),
        namespace: placed.namespace.clone(),
        digest: *digest,
        state: state(facts, now, leaving),
        tier: facts.map_or(Tier::Source, |facts| facts.tier),
        pinned: placed.pinned,
        rank: facts.map_or(0, |facts| facts.rank),
        bytes: facts.map_or(0, |facts| facts.bytes),
        leases: facts.map_or(0, |facts| facts.leases),
        waiting: snapshot.waiting_adapters.get(digest).copied().unwrap_or(0),
        idle_ms: facts
            .and_then(|facts| facts.last_used)
            .map(|used| now.saturating_duration_since(used).as_millis() as u64),
        loads: facts.map_or(0, |facts| facts.loads),
        evictions: facts.map_or(0, |facts| facts.evictions),
        last_error: facts
            .and_then(|facts| facts.failure.as_ref().map(|(refusal, _)| refusal).or(facts.note.as_ref()))
            .map(|refusal| refusal.body()),
    }
}

fn state(facts: Option<&Facts>, now: Instant, leaving: bool) -> AdapterState {
    match facts {
        _ if leaving => AdapterState::Draining,
        None => AdapterState::Loading,
        Some(facts) => facts.state(now),
    }
}
