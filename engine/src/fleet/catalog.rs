//! What the fleet shall be: names, and what each wants of the content that it means. Pure.

use std::collections::{BTreeMap, BTreeSet};

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{Floor, PlacedAdapter, Placement, Role};

use crate::names::{Names, check_name};
use crate::refusal::{Refusal, shown};
use crate::residency::Enrolment;

/// What the fleet shall be.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    pub names: Names,
    /// What each name wants of the content that it means; by content, each name once.
    pub placed: BTreeMap<Digest, Vec<Placed>>,
    /// Adapters that are no longer named but may still be used: who they were.
    pub departed: BTreeMap<Digest, Placed>,
    /// Accepted in this process.
    pub placement: Option<Placement>,
    /// A placement is in force, accepted in this process or kept from the one before.
    pub placed_once: bool,
}

/// One adapter version as the owner of one of its names wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub name: String,
    pub namespace: String,
    pub source: String,
    pub pinned: bool,
    pub floor: Floor,
    pub base_digest: Option<Digest>,
}

impl Catalog {
    /// Replaces everything by what a placement says. Returns what to enrol and what to retire.
    pub(super) fn adopt(
        &mut self,
        placement: &Placement,
        known: impl Fn(&Digest) -> bool,
    ) -> (Vec<Enrolment>, Vec<Digest>) {
        let mut names = Names::new(self.names.base().to_owned());
        let mut placed: BTreeMap<Digest, Vec<Placed>> = BTreeMap::new();
        for adapter in &placement.adapters {
            names.add(&adapter.name, adapter.digest);
            placed.entry(adapter.digest).or_default().push(Placed::from(adapter));
        }
        for (name, digest) in &placement.aliases {
            names.point(name, *digest);
        }
        let retire: Vec<Digest> = self.placed.keys().filter(|digest| !placed.contains_key(digest)).copied().collect();
        self.depart(&retire, known);
        self.names = names;
        self.departed.retain(|digest, _| !placed.contains_key(digest));
        self.placed = placed;
        self.placed_once = true;
        let enrol = self.placed.keys().filter_map(|digest| self.enrolment(digest)).collect();
        (enrol, retire)
    }

    /// One content is held as near as the nearest of its names asks, and comes from wherever one of them has it.
    pub(super) fn enrolment(&self, digest: &Digest) -> Option<Enrolment> {
        let wanted = self.placed.get(digest)?;
        let mut sources: Vec<String> = Vec::new();
        for one in wanted {
            if !sources.contains(&one.source) {
                sources.push(one.source.clone());
            }
        }
        Some(Enrolment {
            name: wanted.first()?.name.clone(),
            digest: *digest,
            sources,
            pinned: wanted.iter().any(|one| one.pinned),
            floor: wanted.iter().map(|one| one.floor).max()?,
            base_digest: wanted.iter().find_map(|one| one.base_digest),
        })
    }

    /// What one name wants of a content.
    pub fn wanted(&self, name: &str, digest: &Digest) -> Option<&Placed> {
        self.placed.get(digest)?.iter().find(|one| one.name == name)
    }

    /// Forgets what a name wanted of these contents. Returns those that no name means any more.
    pub(super) fn give_up(
        &mut self,
        name: &str,
        digests: &BTreeSet<Digest>,
        known: impl Fn(&Digest) -> bool,
    ) -> Vec<Digest> {
        let alone = |wanted: &Vec<Placed>| wanted.iter().all(|one| one.name == name);
        let unnamed = |digest: &&Digest| self.placed.get(*digest).is_none_or(alone);
        let gone: Vec<Digest> = digests.iter().filter(unnamed).copied().collect();
        self.depart(&gone, known);
        for digest in digests {
            let Some(wanted) = self.placed.get_mut(digest) else { continue };
            wanted.retain(|one| one.name != name);
        }
        gone
    }

    fn depart(&mut self, gone: &[Digest], known: impl Fn(&Digest) -> bool) {
        self.departed.retain(|digest, _| known(digest));
        for digest in gone {
            if let Some(last) = self.placed.remove(digest).and_then(|mut wanted| wanted.pop()) {
                self.departed.insert(*digest, last);
            }
        }
    }
}

impl From<&PlacedAdapter> for Placed {
    fn from(adapter: &PlacedAdapter) -> Self {
        Self {
            name: adapter.name.clone(),
            namespace: adapter.namespace.clone(),
            source: adapter.uri.clone(),
            pinned: adapter.pinned,
            floor: adapter.floor,
            base_digest: adapter.base_digest,
        }
    }
}

/// What one object shows to be wrong, before anything is changed.
pub(super) fn check_placement(placement: &Placement, base: &str, adapters_max: usize) -> Result<(), Refusal> {
    let count = placement.adapters.len();
    if count > adapters_max {
        return Err(Refusal::new(
            409,
            "TooManyAdapters",
            format!("{count} adapters are placed, the limit is {adapters_max}"),
        ));
    }
    if placement.revision.len() > 64 {
        let message = format!("revision has {} bytes, the limit is 64", placement.revision.len());
        return Err(Refusal::invalid("revision", message));
    }
    if let Role::Merged(digest) = &placement.role {
        let message = format!("the role Merged({digest}) is not supported by this version");
        return Err(Refusal::new(422, "UnsupportedFeature", message));
    }
    let mut seen = BTreeSet::new();
    for adapter in &placement.adapters {
        check_name("adapters", &adapter.name)?;
        if adapter.name == base {
            return Err(Refusal::new(409, "NameConflict", format!("'{base}' is the base model's name")));
        }
        if !seen.insert((&adapter.name, adapter.digest)) {
            let message = format!("'{}' with {} is placed twice", adapter.name, adapter.digest);
            return Err(Refusal::invalid("adapters", message));
        }
    }
    for (name, digest) in &placement.aliases {
        if !seen.contains(&(name, *digest)) {
            let message = format!("the alias '{}' means {digest}, which is not placed under this name", shown(name));
            return Err(Refusal::invalid("aliases", message));
        }
    }
    Ok(())
}
