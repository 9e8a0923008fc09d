//! Whether the present policy allows a revision that was read before, by what is remembered of it. Pure: its source may
//! hold something else by now, or be out of reach.

use lorafleet_artifact::Digest;
use lorafleet_crds::condition::Cause;
use lorafleet_crds::{BaseModel, LoraAdapter};

use super::gate::{allowing_entry, artifact_policy};
use crate::source::{Closed, readable, within_caps};

/// Why a revision must not be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Forbidden {
    pub(super) reason: String,
    pub(super) message: String,
}

impl Forbidden {
    fn new(reason: impl ToString, message: impl Into<String>) -> Self {
        Self { reason: reason.to_string(), message: message.into() }
    }
}

/// What the policy and the cluster's caps have against this revision, which was found under `uri`. Without a base there is
/// no policy, and nothing is said.
pub(super) fn forbidden(
    adapter: &LoraAdapter,
    base: Option<&BaseModel>,
    source_caps: &[String],
    digest: Digest,
    uri: Option<&str>,
) -> Option<Forbidden> {
    let base = base?;
    let Forbidden { reason, message } = place(base, source_caps, uri?).or_else(|| content(adapter, base, digest))?;
    Some(Forbidden { reason, message: format!("revision {} must not be served: {message}", digest.short()) })
}

fn place(base: &BaseModel, source_caps: &[String], uri: &str) -> Option<Forbidden> {
    let judged = readable(uri).and_then(|uri| match allowing_entry(&base.spec.adapter_policy, &uri) {
        Some(entry) => within_caps(&uri, &entry.access, source_caps),
        None => Err(Closed { cause: Cause::SourceForbidden, message: format!("'{uri}' is not allowed any more") }),
    });
    judged.err().map(|Closed { cause, message }| Forbidden::new(cause, message))
}

/// What the policy has against the content, wherever it lies.
pub(super) fn content(adapter: &LoraAdapter, base: &BaseModel, digest: Digest) -> Option<Forbidden> {
    let status = adapter.status.as_ref()?;
    let known = status.revision(digest);
    if base.spec.adapter_policy.require_digest
        && adapter.spec.digest != Some(digest)
        && known.is_some_and(|known| !known.digest_claimed)
    {
        let message = "it was never named by spec.digest, and adapterPolicy.requireDigest is true";
        return Some(Forbidden::new(Cause::DigestRequired, message));
    }
    let policy = artifact_policy(base, base.status.as_ref().and_then(|status| status.digest));
    let verdict = match known {
        Some(known) => policy.check_traits(&known.traits()),
        // Written by an operator that remembered less.
        None if status.digest == Some(digest) => policy.check_ranks(&status.ranks),
        None => Ok(()),
    };
    verdict.err().map(|refusal| Forbidden::new(refusal.reason, refusal.message))
}
