//! What the pods report of one adapter, as its status prints it.

use std::collections::HashMap;

use kube::ResourceExt;
use lorafleet_artifact::Digest;
use lorafleet_crds::condition::Cause;
use lorafleet_crds::wire::{AdapterReport, AdapterState};
use lorafleet_crds::{LoraAdapter, PlacementError, PlacementStatus, PoolPlacement};

use super::super::observed::{Answer, Observed, PodSeen};
use super::Reasoned;
use super::placement::{Revision, Stage, Verdict, revisions};

/// Longest message of one placement, in characters, as the schema has it.
const MESSAGE_CHARACTERS_MAX: usize = 512;

/// The pods that count and are there to stay, each with what it reports by name and digest: an adapter is looked up in every pod,
/// and there are thousands.
pub(super) struct Holders<'a> {
    pods: Vec<Holder<'a>>,
    /// There shall be none.
    idle: bool,
}

struct Holder<'a> {
    pod: &'a PodSeen,
    holds: HashMap<(&'a str, Digest), &'a AdapterReport>,
}

impl<'a> Holders<'a> {
    pub(super) fn of(observed: &'a Observed, counts: impl Fn(&str) -> bool) -> Self {
        let pods = observed.pods.iter().filter(|pod| !pod.deleting && counts(&pod.name));
        let holder = |pod: &'a PodSeen| {
            let reported = pod.report().map(|report| report.adapters.as_slice()).unwrap_or_default();
            Holder { pod, holds: reported.iter().map(|held| ((held.name.as_str(), held.digest), held)).collect() }
        };
        Self { pods: pods.map(holder).collect(), idle: observed.pool.spec.replicas == 0 }
    }

    /// What it means that this pod does not hold an adapter for this reason.
    fn cause(&self, pod: &str, error: &PlacementError) -> Cause {
        let asked = self.pods.iter().any(|holder| holder.pod.name == pod && holder.pod.answer != Answer::NotAsked);
        match (asked, error.code == Cause::PodUnreachable.to_string()) {
            (false, _) => Cause::PodsNotReady,
            (true, true) => Cause::PodUnreachable,
            (true, false) => Cause::LoadFailed,
        }
    }

    fn take_traffic(&self) -> usize {
        self.pods.iter().filter(|holder| holder.pod.takes_traffic()).count()
    }
}

/// What pods hold is what they say, whether or not they shall hold it by now.
pub(super) fn seen(pool: &str, holders: &Holders<'_>, adapter: &LoraAdapter, verdict: &Verdict) -> PoolPlacement {
    let known = revisions(adapter);
    let revisions = match verdict {
        Verdict::Placed { revisions, .. } => revisions,
        Verdict::NotVerified => &known,
    };
    let placements: Vec<PlacementStatus> = holders
        .pods
        .iter()
        .flat_map(|holder| revisions.iter().map(move |revision| placement(holder, revision)))
        .collect();
    let held = revisions.iter().map(|revision| revision.digest);
    let held: Vec<Digest> = held.filter(|digest| held_by_all(holders, &placements, digest)).collect();
    let reason = match verdict {
        Verdict::NotVerified => Reasoned::new(Cause::Waiting, "nothing of it is verified for the present base"),
        Verdict::Placed { refused: Some(why), .. } => why.clone(),
        Verdict::Placed { refused: None, .. } => reason(holders, revisions, &placements),
    };
    said(pool.to_owned(), reason, held, placements)
}

/// What is known where pods cannot be asked: what its status says of those that are there still.
pub(super) fn before(observed: &Observed, adapter: &LoraAdapter, why: Reasoned) -> PoolPlacement {
    let name = observed.pool.name_any();
    let mut pools = adapter.status.iter().flat_map(|status| &status.pools);
    let known = pools.find(|pool| pool.name == name).cloned();
    let (held, placements) = known.map(|pool| (pool.held, pool.placements)).unwrap_or_default();
    let there = |name: &str| observed.pods.iter().find(|pod| pod.name == name && !pod.deleting);
    let placements = placements.into_iter().filter_map(|placement| {
        let traffic = there(&placement.pod)?.takes_traffic();
        Some(PlacementStatus { traffic, ..placement })
    });
    let serves = observed.pods.iter().any(PodSeen::takes_traffic);
    said(name, why, if serves { held } else { Vec::new() }, placements.collect())
}

fn said(name: String, why: Reasoned, held: Vec<Digest>, placements: Vec<PlacementStatus>) -> PoolPlacement {
    PoolPlacement { name, reason: why.cause.to_string(), message: why.message, held, placements }
}

/// Ready only if the pod's own report says so, and the report is of the process that answers now.
fn placement(Holder { pod, holds }: &Holder<'_>, revision: &Revision) -> PlacementStatus {
    let last_error = |code: &str, message: &str| {
        Some(PlacementError {
            code: code.chars().take(64).collect(),
            message: message.chars().take(MESSAGE_CHARACTERS_MAX).collect(),
        })
    };
    let (ready, last_error) = match &pod.answer {
        Answer::NotAsked => {
            (false, pod.trouble.as_ref().and_then(|trouble| last_error(&trouble.reason, &trouble.message)))
        }
        Answer::Unreachable(message) => (false, last_error(&Cause::PodUnreachable.to_string(), message)),
        Answer::Report(_) => match holds.get(&(revision.name.as_str(), revision.digest)) {
            None => (false, None),
            Some(adapter) => {
                // What is ready may have one too: its floor was refused, or its source did not give it once more.
                let tells = matches!(adapter.state, AdapterState::Failed | AdapterState::Ready);
                let error = adapter.last_error.as_ref().filter(|_| tells);
                let error = error.and_then(|error| last_error(&error.code, &error.message));
                (adapter.state == AdapterState::Ready, error)
            }
        },
    };
    PlacementStatus { pod: pod.name.clone(), digest: revision.digest, ready, traffic: pod.takes_traffic(), last_error }
}

/// Every pod that takes traffic holds it, and there is one.
fn held_by_all(holders: &Holders<'_>, placements: &[PlacementStatus], digest: &Digest) -> bool {
    let held = placements.iter().filter(|placed| placed.traffic && placed.ready && placed.digest == *digest).count();
    held > 0 && held == holders.take_traffic()
}

/// The newest revision's state in one word: the worst that any pod says.
fn reason(holders: &Holders<'_>, revisions: &[Revision], placements: &[PlacementStatus]) -> Reasoned {
    let newest = revisions.iter().rfind(|revision| revision.stage != Stage::Retiring);
    let Some(newest) = newest.map(|revision| revision.digest) else {
        return Reasoned::new(Cause::Waiting, "");
    };
    let of_newest = || placements.iter().filter(|placement| placement.digest == newest);
    let wrong = |ready: bool| {
        let placements = of_newest().filter(move |placement| placement.ready == ready);
        placements.filter_map(|placement| Some((placement.pod.as_str(), placement.last_error.as_ref()?)))
    };
    // A pod that does not run is no failure of the adapter's: what another pod says of it comes first.
    let failures = wrong(false).map(|(pod, error)| (holders.cause(pod, error), pod, error));
    if let Some((cause, pod, error)) = failures.min_by_key(|(cause, ..)| *cause == Cause::PodsNotReady) {
        return Reasoned::new(cause, format!("pod {pod}: {}: {}", error.code, error.message));
    }
    if let Some(placement) = of_newest().find(|placement| !placement.ready) {
        return Reasoned::new(Cause::Loading, format!("pod {} is loading {}", placement.pod, newest.short()));
    }
    if holders.take_traffic() == 0 {
        let message = if holders.idle { "the pool is scaled to 0" } else { "no pod takes traffic yet" };
        return Reasoned::new(Cause::NoReadyPod, message);
    }
    // It is served, if not as the spec asks.
    let but = wrong(true).next().map(|(pod, error)| format!("pod {pod}: {}: {}", error.code, error.message));
    Reasoned::new(Cause::Succeeded, but.unwrap_or_default())
}
