//! From what shall be to what is to be done.

use std::collections::{BTreeMap, HashSet};

use kube::{Resource, ResourceExt};
use lorafleet_artifact::Digest;
use lorafleet_crds::condition::Cause;
use lorafleet_crds::wire::{Placement, Report, Role};
use serde::Serialize;

use super::super::observed::{Answer, Observed, PodSeen};
use super::placement::Wanted;
use super::{PodAction, PodStep, Reasoned, Step};
use crate::build::Objects;
use crate::hash::short_hash;

/// Why an object is applied that somebody else has changed, if only its status.
pub(in crate::pool) const TOUCHED: &str = "touched by others";

/// Why an object is applied that is not among the operator's own: it does not exist, or is somebody else's.
pub(in crate::pool) const MISSING: &str = "missing";

/// Why an object is applied that has the pool's labels and that the pool does not control.
pub(in crate::pool) const NOT_OWN: &str = "not the pool's yet";

/// `Kind/name` of an object.
pub(in crate::pool) fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    format!("{}/{}", K::kind(&()), object.name_any())
}

/// Writes an object only if it is missing, differs from what was applied, or was changed since.
pub(super) fn objects(observed: &Observed, objects: &Objects) -> BTreeMap<String, Step> {
    let Objects { config, engine_service, engine, gateway_account, gateway_binding, gateway_service, gateway } =
        objects;
    let mut steps = BTreeMap::new();
    add(&mut steps, observed, config);
    add(&mut steps, observed, engine_service);
    add(&mut steps, observed, engine);
    add(&mut steps, observed, gateway_account);
    add(&mut steps, observed, gateway_binding);
    add(&mut steps, observed, gateway_service);
    add(&mut steps, observed, gateway);
    steps
}

fn add<K>(steps: &mut BTreeMap<String, Step>, observed: &Observed, object: &K)
where
    K: Resource<DynamicType = ()> + Serialize,
{
    let (key, hash) = (key(object), short_hash(object));
    let why = match observed.children.get(&key) {
        None => Some(MISSING),
        Some(child) if child.foreign => Some(NOT_OWN),
        Some(child) => match &child.applied {
            None => Some("not compared yet"),
            Some(applied) if applied.hash != hash => Some("changed"),
            Some(applied) if newer(&child.resource_version, &applied.resource_version) => Some(TOUCHED),
            Some(_) => None,
        },
    };
    steps.insert(key, why.map_or(Step::Keep, |why| Step::Apply { hash, why }));
}

/// Whether the version that is seen is not the one that was written, nor an older one that a watch still has to replace.
fn newer(seen: &str, written: &str) -> bool {
    match (seen.parse::<u64>(), written.parse::<u64>()) {
        (Ok(seen), Ok(written)) => seen > written,
        _ => seen != written,
    }
}

/// What every pod shall hold, with what is looked up in it for each pod.
pub(super) struct Telling<'a> {
    wanted: &'a Wanted,
    revision: String,
    names: HashSet<(&'a str, Digest)>,
}

impl<'a> Telling<'a> {
    pub(super) fn of(wanted: &'a Wanted) -> Self {
        let names = wanted.adapters.iter().map(|adapter| (adapter.name.as_str(), adapter.digest)).collect();
        Self { wanted, revision: short_hash(wanted), names }
    }
}

/// What to tell one pod.
pub(super) fn pod(pod: &PodSeen, base: &Digest, telling: &Telling<'_>) -> PodStep {
    let action = match &pod.answer {
        _ if pod.deleting => PodAction::Wait(Reasoned::new(Cause::Waiting, "it is going away")),
        Answer::NotAsked => PodAction::Wait(match &pod.trouble {
            Some(trouble) => Reasoned::new(Cause::PodsNotReady, format!("{}: {}", trouble.reason, trouble.message)),
            None => Reasoned::new(Cause::Waiting, "it has not started yet"),
        }),
        Answer::Unreachable(message) => PodAction::Wait(Reasoned::new(Cause::PodUnreachable, message.clone())),
        Answer::Report(report) if report.base.digest != *base => {
            let has = report.base.digest;
            PodAction::Refuse(Reasoned::new(
                Cause::WrongBase,
                format!("it serves the base {has}, the BaseModel is {base}"),
            ))
        }
        Answer::Report(report) => tell(report, telling),
    };
    PodStep { pod: pod.name.clone(), action }
}

fn tell(report: &Report, telling: &Telling<'_>) -> PodAction {
    let Telling { wanted, revision, .. } = telling;
    let why = if report.generation == 0 {
        "it has been told nothing since it started".to_owned()
    } else if report.revision != *revision {
        difference(report, telling)
    } else {
        return PodAction::Keep;
    };
    let placement = Placement {
        boot_id: report.boot_id.clone(),
        generation: report.generation.saturating_add(1),
        revision: revision.clone(),
        role: Role::Shared,
        adapters: wanted.adapters.clone(),
        aliases: wanted.aliases.clone(),
    };
    PodAction::Put { placement, why }
}

/// For people: what the pod has and shall not have, and the other way round.
fn difference(report: &Report, telling: &Telling<'_>) -> String {
    let has: HashSet<_> = report.adapters.iter().map(|held| (held.name.as_str(), held.digest)).collect();
    let more = telling.wanted.adapters.iter().filter(|wanted| !has.contains(&(wanted.name.as_str(), wanted.digest)));
    let more = more.map(|adapter| format!("+{}@{}", adapter.name, adapter.digest.short()));
    let less = report.adapters.iter().filter(|held| !telling.names.contains(&(held.name.as_str(), held.digest)));
    let less = less.map(|adapter| format!("-{}@{}", adapter.name, adapter.digest.short()));
    let words: Vec<String> = more.chain(less).take(8).collect();
    if words.is_empty() { "aliases or terms changed".to_owned() } else { words.join(" ") }
}
