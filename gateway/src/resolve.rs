//! From the `model` of a request to one version of one adapter. Pure.
//!
//! ```text
//! model = ""                      the base
//!       | base name               the base
//!       | [namespace/]name        what the name means now
//!       | [namespace/]name@hex    the one version whose digest starts with 12 to 64 hex digits
//! ```

use std::collections::BTreeSet;
use std::fmt;

use lorafleet_artifact::Digest;
use lorafleet_crds::names::{VERSION_DIGITS_MAX, VERSION_DIGITS_MIN, asked, version_digits};
use lorafleet_crds::wire::AdapterState;

use crate::view::{AdapterView, FleetView, Obstacle};

/// Longest `model` that is looked at.
pub const MODEL_BYTES_MAX: usize = 512;

/// What a request shall run on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    Base { name: String },
    Adapter { name: String, digest: Digest },
}

impl Target {
    /// Name without the version: what metrics and limits count by.
    pub fn name(&self) -> &str {
        match self {
            Target::Base { name } | Target::Adapter { name, .. } => name,
        }
    }

    /// `model` as an engine shall read it. An adapter is always named with its whole digest, so that an alias that moves
    /// while the request is on its way changes nothing.
    pub fn wire_model(&self) -> Option<String> {
        match self {
            Target::Base { .. } => None,
            Target::Adapter { name, digest } => Some(format!("{name}@{}", digest.hex())),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Base { name } => write!(f, "base '{name}'"),
            Target::Adapter { name, digest } => write!(f, "adapter '{name}@{}'", digest.short()),
        }
    }
}

/// Why a name leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    #[error("the model '{model}' does not exist or this key may not use it")]
    Unknown { model: String },
    #[error("'{name}' has no version whose digest starts with '{prefix}'")]
    UnknownVersion { name: String, prefix: String },
    #[error("'{model}': a version is written as {VERSION_DIGITS_MIN} to {VERSION_DIGITS_MAX} lower-case hex digits")]
    BadVersion { model: String },
    #[error("'{name}@{prefix}' is ambiguous: it is the start of {}", listed(digests))]
    Ambiguous { name: String, prefix: String, digests: Vec<Digest> },
    #[error("the adapter '{name}' is refused ({}): {}", obstacle.reason, obstacle.message)]
    Refused { name: String, obstacle: Obstacle },
    #[error("the adapter '{name}' is not served yet{}", why(obstacle))]
    NotServedYet { name: String, obstacle: Option<Obstacle> },
}

/// The models that a client may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permitted {
    All,
    /// Canonical names without versions.
    Only(BTreeSet<String>),
}

impl Permitted {
    pub fn allows(&self, canonical_name: &str) -> bool {
        match self {
            Permitted::All => true,
            Permitted::Only(names) => names.contains(canonical_name),
        }
    }
}

/// The one version that `model` means. A name that the client may not use is answered exactly as one that does not exist.
pub fn resolve(view: &FleetView, permitted: &Permitted, model: &str) -> Result<Target, ResolveError> {
    let unknown = || ResolveError::Unknown { model: model.chars().take(80).collect() };
    if model.len() > MODEL_BYTES_MAX {
        return Err(unknown());
    }
    let (asked_name, version) = asked(model);
    let is_base = model.is_empty() || (asked_name == view.base && version.is_none());
    let name = if is_base { view.base.as_str() } else { view.canonical(asked_name) };
    if name.is_empty() || !permitted.allows(name) {
        return Err(unknown());
    }
    if is_base {
        return Ok(Target::Base { name: name.to_owned() });
    }
    let object = view.adapters.get(name);
    let digest = match version {
        Some(version) => by_prefix(view, object, name, version).map_err(|error| error.unwrap_or_else(unknown))?,
        None => by_alias(view, object, name).map_err(|error| error.unwrap_or_else(unknown))?,
    };
    Ok(Target::Adapter { name: name.to_owned(), digest })
}

/// `Err(None)` if nobody knows the name.
fn by_alias(view: &FleetView, object: Option<&AdapterView>, name: &str) -> Result<Digest, Option<ResolveError>> {
    let Some(object) = object else {
        return foreign_alias(view, name).ok_or(None);
    };
    object.current.ok_or_else(|| {
        let name = name.to_owned();
        Some(match &object.obstacle {
            Some(obstacle) if obstacle.refused => ResolveError::Refused { name, obstacle: obstacle.clone() },
            obstacle => ResolveError::NotServedYet { name, obstacle: obstacle.clone() },
        })
    })
}

fn by_prefix(
    view: &FleetView,
    object: Option<&AdapterView>,
    name: &str,
    version: &str,
) -> Result<Digest, Option<ResolveError>> {
    if object.is_none() && foreign_alias(view, name).is_none() {
        return Err(None);
    }
    let Some(prefix) = version_digits(version) else {
        return Err(Some(ResolveError::BadVersion { model: format!("{name}@{version}") }));
    };
    let mut digests = versions(view, object, name);
    digests.retain(|digest| digest.hex().starts_with(prefix));
    match digests.pop_first() {
        None => Err(Some(ResolveError::UnknownVersion { name: name.to_owned(), prefix: prefix.to_owned() })),
        Some(digest) if digests.is_empty() => Ok(digest),
        Some(digest) => {
            let digests = std::iter::once(digest).chain(digests).collect();
            Err(Some(ResolveError::Ambiguous { name: name.to_owned(), prefix: prefix.to_owned(), digests }))
        }
    }
}

/// All versions of a name that could answer: those the object names, and those that pods still hold for older requests.
fn versions(view: &FleetView, object: Option<&AdapterView>, name: &str) -> BTreeSet<Digest> {
    let written = object.into_iter().flat_map(|object| object.current.iter().chain(&object.others));
    let held = view.reports().filter_map(|(_, report)| report.holdings.adapters.get(name)).flatten();
    let held = held.filter(|holding| matches!(holding.state, AdapterState::Ready | AdapterState::Loading));
    let aliased = view.reports().filter_map(|(_, report)| report.holdings.aliases.get(name));
    written.chain(aliased).copied().chain(held.map(|holding| holding.digest)).collect()
}

/// Meaning of a name from another namespace, whose objects this gateway may not be allowed to read: the pods carry the
/// operator's aliases. Of pods that disagree while an alias moves, the digest that most of them name wins.
fn foreign_alias(view: &FleetView, name: &str) -> Option<Digest> {
    if !name.contains('/') {
        return None;
    }
    let mut votes = std::collections::BTreeMap::<Digest, u32>::new();
    for digest in view.reports().filter_map(|(_, report)| report.holdings.aliases.get(name)) {
        *votes.entry(*digest).or_default() += 1;
    }
    votes.into_iter().max_by_key(|(digest, count)| (*count, *digest)).map(|(digest, _)| digest)
}

fn listed(digests: &[Digest]) -> String {
    digests.iter().map(Digest::to_string).collect::<Vec<_>>().join(" and ")
}

fn why(obstacle: &Option<Obstacle>) -> String {
    match obstacle {
        Some(obstacle) => format!(" ({}): {}", obstacle.reason, obstacle.message),
        None => ": the operator has not verified and placed it".to_owned(),
    }
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
