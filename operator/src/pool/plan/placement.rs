//! Which adapter versions the pods shall hold.
//!
//! Every adapter goes to every pod, as far as they fit: what is served comes before what is on its way, and the oldest
//! object first.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{ParseExpressionError, Selector, SelectorExt};
use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{Floor, PlacedAdapter};
use lorafleet_crds::{LoraAdapter, WarmthFloor};

use super::super::observed::Observed;
use super::Reasoned;
use super::capacity::{Kept, Rooms, Taken};

/// One version of one adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    pub name: String,
    pub namespace: String,
    pub digest: Digest,
    pub uri: String,
    /// What its owner said of its base when it was verified.
    pub base_digest: Option<Digest>,
    pub floor: Floor,
    /// Not known of what an older operator verified.
    pub rank: Option<u32>,
    pub bytes: u64,
    pub stage: Stage,
}

/// Where a version stands in its life. In the order in which room is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The served name means it.
    Current,
    /// The served name meant it a moment ago.
    Retiring,
    /// The served name will mean it.
    Candidate,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Current, Self::Retiring, Self::Candidate];

    const fn word(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Retiring => "retiring",
            Self::Candidate => "candidate",
        }
    }
}

impl Revision {
    pub(super) fn in_host_memory(&self) -> bool {
        self.floor >= Floor::Host
    }
}

/// What the pool decides about one adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing of it is verified (any more).
    NotVerified,
    /// These go to the pods that have room for them; `refused` says why one does not go to some or to all.
    Placed { revisions: Vec<Revision>, refused: Option<Reasoned> },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotVerified => f.write_str("not verified"),
            Self::Placed { revisions, refused } => {
                let word = |revision: &Revision| format!("{} {}", revision.stage.word(), revision.digest.short());
                let placed: Vec<String> = revisions.iter().map(word).collect();
                write!(f, "place [{}]", placed.join(", "))?;
                refused.as_ref().map_or(Ok(()), |why| write!(f, ", refuse ({why})"))
            }
        }
    }
}

/// A verdict on each adapter that the pool selects, in the order of `observed.adapters`, and what is kept from which pods.
pub(super) fn verdicts(observed: &Observed) -> (Vec<(&LoraAdapter, Verdict)>, Kept) {
    let selected: Vec<&LoraAdapter> =
        observed.adapters.iter().filter(|adapter| selects(&observed.pool.spec.adapter_selector, adapter)).collect();
    let base = observed.base.as_ref().and_then(|base| base.status.as_ref()?.digest);
    let mut rooms = Rooms::of(observed, base);
    let mut placed: Vec<Vec<Revision>> = selected.iter().map(|_| Vec::new()).collect();
    let mut refused: Vec<Option<Reasoned>> = selected.iter().map(|_| None).collect();
    for stage in Stage::ALL {
        for ((adapter, placed), refused) in selected.iter().zip(&mut placed).zip(&mut refused) {
            let Some(revision) = verified(adapter, base).and_then(|adapter| revision(adapter, stage)) else { continue };
            let taken: Taken = rooms.take(&revision);
            *refused = taken.refused.or(refused.take());
            if taken.placed {
                placed.push(revision);
            }
        }
    }
    let verdict = |(revisions, refused): (Vec<Revision>, Option<Reasoned>)| match (revisions.is_empty(), &refused) {
        (true, None) => Verdict::NotVerified,
        _ => Verdict::Placed { revisions, refused },
    };
    (selected.into_iter().zip(placed.into_iter().zip(refused).map(verdict)).collect(), rooms.kept())
}

/// What a pod shall hold: adapters in a fixed order, and the aliases.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Wanted {
    pub(super) adapters: Vec<PlacedAdapter>,
    pub(super) aliases: BTreeMap<String, Digest>,
}

/// All that is placed, but for the versions that a pod lacks the room for.
pub(super) fn wanted(verdicts: &[(&LoraAdapter, Verdict)], lacking: &HashSet<(String, Digest)>) -> Wanted {
    let mut wanted = Wanted::default();
    for (_, verdict) in verdicts {
        let Verdict::Placed { revisions, .. } = verdict else { continue };
        let lacks =
            |revision: &Revision| !lacking.is_empty() && lacking.contains(&(revision.name.clone(), revision.digest));
        for revision in revisions.iter().filter(|revision| !lacks(revision)) {
            if revision.stage == Stage::Current {
                wanted.aliases.insert(revision.name.clone(), revision.digest);
            }
            wanted.adapters.push(PlacedAdapter {
                name: revision.name.clone(),
                namespace: revision.namespace.clone(),
                digest: revision.digest,
                uri: revision.uri.clone(),
                pinned: true,
                floor: revision.floor,
                base_digest: revision.base_digest,
            });
        }
    }
    wanted.adapters.sort_by(|a, b| (&a.name, a.digest).cmp(&(&b.name, b.digest)));
    wanted
}

/// What was verified for another base may fit this one's shapes by chance.
fn verified(adapter: &LoraAdapter, base: Option<Digest>) -> Option<&LoraAdapter> {
    let status = adapter.status.as_ref()?;
    (base.is_some() && status.verified_base == base).then_some(adapter)
}

/// All versions of the adapter that pods may hold, whether or not they shall.
pub(super) fn revisions(adapter: &LoraAdapter) -> Vec<Revision> {
    Stage::ALL.into_iter().filter_map(|stage| revision(adapter, stage)).collect()
}

/// The adapter's version at this stage, if it has one.
fn revision(adapter: &LoraAdapter, stage: Stage) -> Option<Revision> {
    let status = adapter.status.as_ref()?;
    if adapter.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let spec_uri = &adapter.spec.source.uri;
    let (current, candidate) = (status.current_revision, status.candidate_revision);
    let (digest, uri, base_digest) = match stage {
        Stage::Current => (current?, status.current_uri.as_ref().unwrap_or(spec_uri), status.current_base_digest),
        Stage::Candidate => {
            let candidate = candidate.filter(|candidate| current != Some(*candidate))?;
            (candidate, spec_uri, adapter.spec.base_model_digest)
        }
        Stage::Retiring => {
            let retiring = status.retiring.as_ref();
            let retiring = retiring.filter(|old| Some(old.digest) != current && Some(old.digest) != candidate)?;
            (retiring.digest, &retiring.uri, retiring.base_digest)
        }
    };
    let known = status.revision(digest);
    let of_spec = status.digest == Some(digest);
    Some(Revision {
        // As intake has judged it: the spec may claim a name by now that another adapter has.
        name: status.served_name.clone().unwrap_or_else(|| adapter.served_name().to_owned()),
        namespace: adapter.namespace().unwrap_or_default(),
        digest,
        uri: uri.trim_end_matches('/').to_owned(),
        base_digest,
        floor: match adapter.spec.warmth.floor {
            WarmthFloor::Disk => Floor::Disk,
            WarmthFloor::Host => Floor::Host,
            WarmthFloor::Device => Floor::Device,
        },
        rank: known.map(|known| known.traits().rank_max()).or(status.rank.filter(|_| of_spec)),
        bytes: known.map(|known| known.size_bytes).or(status.size_bytes).unwrap_or_default(),
        stage,
    })
}

/// Why the selector takes no adapter, whatever its labels: the schema cannot bound the keys of a map.
pub fn selector_fault(selector: &Option<LabelSelector>) -> Option<String> {
    let keys = selector.as_ref()?.match_labels.as_ref()?.keys();
    let key = keys.into_iter().find(|key| !is_label_key(key))?;
    let shown: String = key.chars().take(100).filter(|character| !character.is_control()).collect();
    Some(format!("adapterSelector.matchLabels: no label can have the key '{shown}', so no adapter is selected"))
}

fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let framed = |text: &str, most: usize, inner: &dyn Fn(char) -> bool| {
        let ends = [text.chars().next(), text.chars().next_back()];
        text.len() <= most
            && ends.into_iter().all(|end| end.is_some_and(|end| end.is_ascii_alphanumeric()))
            && text.chars().all(|character| character.is_ascii_alphanumeric() || inner(character))
    };
    let name_fits = framed(name, 63, &|character| matches!(character, '-' | '_' | '.'));
    let prefix_fits = |prefix: &str| {
        framed(prefix, 253, &|character| matches!(character, '-' | '.')) && prefix == prefix.to_ascii_lowercase()
    };
    name_fits && prefix.is_none_or(prefix_fits)
}

/// Whether the pool's selector takes the adapter. A selector that cannot be read takes none.
pub fn selects(selector: &Option<LabelSelector>, adapter: &LoraAdapter) -> bool {
    let Some(selector) = selector else { return true };
    let parsed: Result<Selector, ParseExpressionError> = selector.clone().try_into();
    parsed.is_ok_and(|selector| selector.matches(adapter.labels()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_no_label_has_are_found() {
        for key in ["tier", "a.b/Tier_1", "example.com/a", "x"] {
            assert!(is_label_key(key), "{key}");
        }
        for key in ["", "a b", "/a", "a/", "-a", "a-", "A.b/c", "a/b/c", "ä", &"a".repeat(64)] {
            assert!(!is_label_key(key), "{key}");
        }
    }
}
