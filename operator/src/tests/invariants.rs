//! What no pass may ever do, whatever has happened before.

use kube::ResourceExt;
use lorafleet_artifact::Digest;
use lorafleet_crds::wire::PlacedAdapter;
use lorafleet_crds::{LoraAdapter, LoraAdapterStatus};

use super::world::{Pod, World};
use crate::pool::{self, PodAction};

/// What a status tells pods to hold.
fn told(status: &LoraAdapterStatus) -> impl Iterator<Item = Digest> {
    let retiring = status.retiring.as_ref().map(|old| old.digest);
    [status.current_revision, status.candidate_revision, retiring].into_iter().flatten()
}

/// Whether what a pod is told is a version of this adapter, under the name that it has.
fn is_of(object: &LoraAdapter, placed: &PlacedAdapter) -> bool {
    object.status.as_ref().is_some_and(|status| {
        status.served_name.as_ref() == Some(&placed.name) && told(status).any(|digest| digest == placed.digest)
    })
}

impl World {
    /// What the name means changes only to what every pod that takes traffic was seen to hold, and is taken away only by a
    /// policy or a base that forbids it, by who has the name, or by a claim that it does not meet.
    pub(super) fn check_revisions(&self, adapter: &LoraAdapter, name: &str, new: &LoraAdapterStatus) {
        let before = adapter.status.as_ref().and_then(|status| status.current_revision);
        let seen = self.sightings.as_ref().and_then(|seen| seen.get(&adapter.uid().unwrap()));
        match (before, new.current_revision) {
            (before, Some(now)) if before != Some(now) => {
                assert!(seen.is_some_and(|seen| seen.held.contains(&now)), "{name} is promoted before it is held");
            }
            (Some(_), None) => {
                let other_base = adapter.status.as_ref().unwrap().verified_base != Some(self.base_digest());
                let rival = !self.rivals(adapter).is_empty();
                let claims = adapter.spec.digest.is_some_and(|claimed| Some(claimed) != before);
                assert!(!self.allows(before.unwrap()) || other_base || rival || claims, "{name} is taken away");
            }
            _ => {}
        }
        self.check_told(name, new);
    }

    /// Whatever an intake pass leaves in the status, the present policy allows.
    pub(super) fn check_told(&self, name: &str, status: &LoraAdapterStatus) {
        for digest in told(status) {
            assert!(self.allows(digest), "{name}: the policy forbids {digest}, and pods are told to hold it");
        }
    }

    /// Held is what all pods that take traffic have in truth.
    pub(super) fn check_held(&self, plan: &pool::Plan) {
        let serving: Vec<&Pod> =
            (0..self.pods.len()).filter(|index| self.ready(*index)).map(|index| &self.pods[index]).collect();
        for step in &plan.adapters {
            let status = self.watched()[&step.name].status.as_ref();
            let name = status.and_then(|status| status.served_name.clone()).unwrap_or_default();
            for digest in &step.seen.held {
                let holds = |pod: &&Pod| pod.loaded.contains(&(name.clone(), *digest));
                assert!(!serving.is_empty() && serving.iter().all(holds), "{} is said to be held", step.name);
            }
        }
    }

    /// What no pass may ever do.
    pub(super) fn check_placements(&self, observed: &pool::Observed, plan: &pool::Plan) {
        for (step, pod) in plan.pods.iter().zip(&self.pods) {
            let PodAction::Put { placement, .. } = &step.action else { continue };
            assert_eq!(pod.base, self.base_digest(), "a pod of another base is told something");
            for object in &observed.adapters {
                let status = object.status.clone().unwrap_or_default();
                for digest in told(&status).filter(|_| status.verified_base == Some(pod.base)) {
                    let placed = placement.adapters.iter().any(|placed| placed.digest == digest);
                    assert!(placed, "{} is to be had, and a pod is not told", object.name_any());
                }
            }
            for (alias, digest) in &placement.aliases {
                let placed = |name: &String, other: &Digest| name == alias && other == digest;
                assert!(
                    placement.adapters.iter().any(|adapter| placed(&adapter.name, &adapter.digest)),
                    "an alias to nothing"
                );
            }
            for adapter in &placement.adapters {
                let object = observed.adapters.iter().find(|object| is_of(object, adapter));
                let object = object.expect("a digest that nobody verified");
                let status = object.status.as_ref().unwrap();
                assert_eq!(status.verified_base, Some(pod.base), "verified for another base");
                let verified = self.verified.contains(&(object.name_any(), adapter.digest, pod.base));
                assert!(verified, "{}@{} was never verified for this base", adapter.name, adapter.digest);
                if placement.aliases.get(&adapter.name) == Some(&adapter.digest) {
                    assert_eq!(status.current_revision, Some(adapter.digest), "an alias that the name does not mean");
                }
            }
        }
    }
}
