//! What is decided before any byte is read: name, base, allowed sources. Pure.

use kube::ResourceExt;
use lorafleet_artifact::{BaseShape, Claims, Digest, Policy, SourceUri};
use lorafleet_crds::condition::Cause;
use lorafleet_crds::{AdapterPolicy, AllowedSource, BaseModel, LoraAdapter, NameClaim, SourceFile};

use crate::hash::short_hash;
use crate::shape;
use crate::source::{Closed, Door, readable, resolve_at, within_caps};

/// The way is free: what to read, and how to judge it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    pub uri: SourceUri,
    pub order: Order,
}

/// What a read needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// Names all that the verification rests on: `content`, and the policy.
    pub fingerprint: String,
    /// Names all that it rests on but for the policy: the place, what is said of its content, and the base.
    pub content: String,
    pub uri: SourceUri,
    pub door: Door,
    pub claims: Claims,
    /// The digest was found there before: other content is `SourceChanged`.
    pub pinned: bool,
    /// Files as they were when the digest of the status was found.
    pub pinned_files: Vec<SourceFile>,
    pub shape: BaseShape,
    pub policy: Policy,
}

/// Why it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Barred {
    pub cause: Cause,
    pub message: String,
    /// It goes on by itself when something else is done.
    pub waiting: bool,
}

impl Barred {
    fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into(), waiting: false }
    }
}

/// Judges the adapter's spec against its base's.
pub fn gate(
    adapter: &LoraAdapter,
    base: Option<&BaseModel>,
    rivals: &[NameClaim],
    source_caps: &[String],
) -> Result<Gate, Barred> {
    let base_name = &adapter.spec.base_model_ref.name;
    let Some(base) = base else {
        let message = format!("there is no BaseModel '{base_name}' in this namespace");
        return Err(Barred { waiting: true, ..Barred::new(Cause::BaseNotFound, message) });
    };
    check_name(adapter, base, rivals)?;
    let policy = &base.spec.adapter_policy;
    let barred = |Closed { cause, message }: Closed| Barred::new(cause, message);
    let uri = readable(&adapter.spec.source.uri).map_err(barred)?;
    let Some(entry) = allowing_entry(policy, &uri) else {
        let allowed: Vec<&str> = policy.allowed_sources.iter().take(8).map(|entry| entry.prefix.as_str()).collect();
        let allowed = if allowed.is_empty() { "no source at all".to_owned() } else { allowed.join(", ") };
        return Err(Barred::new(
            Cause::SourceForbidden,
            format!("'{uri}' is not allowed: the BaseModel '{base_name}' allows {allowed}"),
        ));
    };
    within_caps(&uri, &entry.access, source_caps).map_err(barred)?;
    if policy.require_digest && adapter.spec.digest.is_none() {
        let message =
            format!("spec.digest is missing, and adapterPolicy.requireDigest of the BaseModel '{base_name}' is true");
        return Err(Barred::new(Cause::DigestRequired, message));
    }
    let status = base.status.as_ref();
    let facts = status.and_then(|status| status.digest.zip(shape::from_status(status)));
    let Some((base_digest, shape)) = facts else {
        let message = format!("the BaseModel '{base_name}' is not resolved yet");
        return Err(Barred { waiting: true, ..Barred::new(Cause::BaseNotReady, message) });
    };
    Ok(Gate { order: order(adapter, base, base_digest, shape, entry, &uri), uri })
}

/// The base's own name comes before all; among adapters, the smallest [`NameClaim`].
fn check_name(adapter: &LoraAdapter, base: &BaseModel, rivals: &[NameClaim]) -> Result<(), Barred> {
    let served = adapter.served_name();
    if served == base.name_any() {
        return Err(Barred::new(Cause::NameConflict, format!("the served name '{served}' is the base's own")));
    }
    match rivals.iter().min().filter(|rival| **rival < adapter.claim(served)) {
        None => Ok(()),
        Some(rival) => {
            let message = format!("the served name '{served}' belongs to the LoraAdapter '{}'", rival.name);
            Err(Barred::new(Cause::NameConflict, message))
        }
    }
}

/// The entry with the longest prefix that holds the source.
pub fn allowing_entry<'a>(policy: &'a AdapterPolicy, uri: &SourceUri) -> Option<&'a AllowedSource> {
    // An entry that cannot be read allows nothing.
    let entries: Vec<(SourceUri, &AllowedSource)> =
        policy.allowed_sources.iter().filter_map(|entry| Some((entry.prefix.parse().ok()?, entry))).collect();
    let index = uri.longest_prefix(entries.iter().map(|(prefix, _)| prefix))?;
    entries.get(index).map(|(_, entry)| *entry)
}

/// The digest that was found at this source, if it is still the one to be found there.
pub fn pin<'a>(adapter: &'a LoraAdapter, uri: &SourceUri) -> Option<(Digest, &'a [SourceFile])> {
    let status = adapter.status.as_ref()?;
    let pin = status.source.as_ref()?;
    let holds = pin.uri == uri.to_string() && pin.resolve_at == resolve_at(adapter);
    let digest = status.digest.filter(|digest| adapter.spec.digest.is_none_or(|claimed| claimed == *digest))?;
    holds.then_some((digest, pin.files.as_slice()))
}

fn order(
    adapter: &LoraAdapter,
    base: &BaseModel,
    base_digest: Digest,
    shape: BaseShape,
    entry: &AllowedSource,
    uri: &SourceUri,
) -> Order {
    let policy = artifact_policy(base, Some(base_digest));
    let door = Door::new(&base.namespace().unwrap_or_default(), &entry.prefix, &entry.access);
    let spec = &adapter.spec;
    let asked = (uri.to_string(), spec.source.follow, resolve_at(adapter), spec.digest, spec.base_model_digest);
    let content = short_hash(&(asked, door.store(), base_digest, &shape));
    let fingerprint = format!("{content}-{}", short_hash(&policy));
    let pin = pin(adapter, uri);
    let pinned = pin.map(|(digest, _)| digest).filter(|_| !spec.source.follow);
    Order {
        fingerprint,
        content,
        uri: uri.clone(),
        door,
        claims: Claims { digest: spec.digest.or(pinned), base_digest: spec.base_model_digest },
        pinned: pinned.is_some(),
        pinned_files: pin.map(|(_, files)| files.to_vec()).unwrap_or_default(),
        shape,
        policy,
    }
}

/// The base's policy in the words of the crate that judges. Before the base's own digest is known no claim about it can be
/// checked, and none is.
pub(super) fn artifact_policy(base: &BaseModel, base_digest: Option<Digest>) -> Policy {
    let AdapterPolicy {
        allowed_sources: _,
        max_rank,
        allowed_ranks,
        allowed_target_modules,
        // Judged already, by the spec alone: a pinned digest is no claim of the owner's.
        require_digest: _,
        require_base_digest,
        max_adapter_bytes,
    } = &base.spec.adapter_policy;
    let mut policy = Policy {
        max_rank: *max_rank,
        allowed_ranks: allowed_ranks.clone(),
        allowed_target_modules: allowed_target_modules.clone(),
        require_digest: false,
        require_base_digest: *require_base_digest,
        ..Policy::default()
    };
    if let Some(own) = base_digest {
        policy.identities = [own].into_iter().chain(base.spec.identities.iter().copied()).collect();
    }
    if let Some(limit) = max_adapter_bytes {
        policy.max_adapter_bytes = *limit;
    }
    policy
}
