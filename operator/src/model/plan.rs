//! What is known of a base and what is to be read: a pure function.

use std::fmt;

use kube::ResourceExt;
use lorafleet_artifact::{BaseShape, Digest, HALF_BYTES, Reason, SourceUri};
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType, find};
use lorafleet_crds::{BaseModel, BaseModelStatus, SourceFile, SourcePin, WeightFormat};

use serde::Deserialize;

use crate::conditions::Stated;
use crate::hash::short_hash;
use crate::job::{Fault, JobState, retry_in_ms};
use crate::recheck::{Next, Recheck, knows_better, listing};
use crate::settings::Limits;
use crate::source::{Closed, Door, Whose, cause, readable, reading, resolve_at, stalls, within_caps, words};

/// Everything that a plan rests on.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Observed {
    pub base: BaseModel,
    pub job: JobState<Outcome>,
    /// The look whether the source is still what was judged.
    #[serde(default)]
    pub recheck: Recheck,
    #[serde(default)]
    pub source_caps: Vec<String>,
}

/// How a read ended for good.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Read(Box<Facts>),
    Refused {
        reason: String,
        message: String,
        /// Names the files that were refused.
        #[serde(default)]
        listing: String,
    },
}

impl Outcome {
    /// Names the files that it is about.
    fn listing(&self) -> String {
        match self {
            Self::Read(facts) => listing(&facts.files),
            Self::Refused { listing, .. } => listing.clone(),
        }
    }
}

/// What a read found.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub digest: Digest,
    pub shape: BaseShape,
    pub size_bytes: u64,
    pub files: Vec<SourceFile>,
}

/// What to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    pub fingerprint: String,
    pub uri: SourceUri,
    pub door: Door,
    pub format: WeightFormat,
    /// The digest that must come out, and what it means if another does.
    pub expected: Option<(Digest, Reason)>,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub read: Option<Order>,
    /// The source is to be looked at: whether it still holds what was judged.
    pub look: Option<Order>,
    /// Without conditions and generation.
    pub status: BaseModelStatus,
    pub stated: Vec<Stated>,
    /// When to look again though nothing changed; never, if absent.
    pub again_in_ms: Option<u64>,
}

/// Names all that a read rests on.
pub(super) fn fingerprint(base: &BaseModel) -> String {
    let spec = &base.spec;
    short_hash(&(&spec.source, resolve_at(base), spec.digest, spec.format))
}

/// Where the pass stands.
enum Standing {
    Closed(Closed),
    /// So many reads of its namespace came before, if it waits for its turn.
    Reading {
        before: usize,
    },
    Fault(Fault),
    Refused {
        reason: String,
        message: String,
    },
    Known,
}

pub fn plan(observed: &Observed, limits: &Limits) -> Plan {
    let base = &observed.base;
    // What was found before stays true of what is served until something else is found.
    let mut status = BaseModelStatus { conditions: Vec::new(), ..base.status.clone().unwrap_or_default() };
    let fingerprint = fingerprint(base);
    let (mut read, mut look, mut again_in_ms) = (None, None, None);
    let source = &base.spec.source;
    let uri =
        readable(&source.uri).and_then(|uri| within_caps(&uri, &source.access, &observed.source_caps).map(|()| uri));
    let standing = match (uri, &observed.job) {
        (Err(closed), _) => Standing::Closed(closed),
        (Ok(uri), _) if status.resolved_for.as_ref() == Some(&fingerprint) && !newer(observed) => {
            match observed.recheck.next() {
                Next::ReadAgain => {
                    read = Some(order(base, uri, fingerprint));
                    Standing::Reading { before: 0 }
                }
                Next::Look => {
                    look = Some(order(base, uri, fingerprint));
                    remembered(base)
                }
                Next::Rest(due_in_ms) => {
                    again_in_ms = due_in_ms;
                    remembered(base)
                }
            }
        }
        (Ok(uri), JobState::Idle) => {
            read = Some(order(base, uri, fingerprint));
            Standing::Reading { before: 0 }
        }
        (Ok(_), JobState::Waiting { before }) => Standing::Reading { before: *before },
        (Ok(_), JobState::Running) => Standing::Reading { before: 0 },
        (Ok(uri), JobState::Failed { fault, attempts, age_ms }) => {
            match retry_in_ms(fault, *attempts, *age_ms, limits) {
                0 => read = Some(order(base, uri, fingerprint)),
                wait_ms => again_in_ms = Some(wait_ms),
            }
            Standing::Fault(fault.clone())
        }
        (Ok(_), JobState::Done(Outcome::Refused { reason, message, listing })) => {
            status.resolved_for = Some(fingerprint);
            status.source_listing = Some(listing.clone());
            Standing::Refused { reason: reason.clone(), message: message.clone() }
        }
        (Ok(uri), JobState::Done(Outcome::Read(facts))) => {
            status = known(base, &uri, facts, fingerprint);
            Standing::Known
        }
    };
    if !matches!(standing, Standing::Known | Standing::Refused { .. }) {
        // Only a final judgement is remembered with its conditions.
        (status.resolved_for, status.source_listing) = (None, None);
    }
    Plan { read, look, stated: stated(&standing, &status), status, again_in_ms }
}

/// Whether a read knows better than what the status remembers.
fn newer(observed: &Observed) -> bool {
    let told = observed.base.status.as_ref().and_then(|status| status.source_listing.as_ref());
    knows_better(&observed.job, told, Outcome::listing)
}

/// The judgement that the status already holds.
fn remembered(base: &BaseModel) -> Standing {
    let conditions = base.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    match find(conditions, ConditionType::Resolved) {
        Some(resolved) if resolved.status == "False" => {
            Standing::Refused { reason: resolved.reason.clone(), message: resolved.message.clone() }
        }
        _ => Standing::Known,
    }
}

fn order(base: &BaseModel, uri: SourceUri, fingerprint: String) -> Order {
    let source = &base.spec.source;
    let pinned = base.status.as_ref().and_then(|status| {
        let pin = status.source.as_ref()?;
        (pin.uri == uri.to_string() && pin.resolve_at == resolve_at(base)).then_some(status.digest?)
    });
    let claimed = base.spec.digest.map(|digest| (digest, Reason::DigestMismatch));
    Order {
        fingerprint,
        door: Door::new(&base.namespace().unwrap_or_default(), &uri.to_string(), &source.access),
        uri,
        format: base.spec.format,
        expected: claimed.or(pinned.map(|digest| (digest, Reason::SourceChanged))),
    }
}

fn known(base: &BaseModel, uri: &SourceUri, facts: &Facts, fingerprint: String) -> BaseModelStatus {
    let Facts { digest, shape, size_bytes, files } = facts;
    BaseModelStatus {
        digest: Some(*digest),
        source: Some(SourcePin { uri: uri.to_string(), resolve_at: resolve_at(base), files: files.clone() }),
        resolved_for: Some(fingerprint),
        source_listing: Some(listing(files)),
        size_bytes: Some(*size_bytes),
        kv_bytes_per_token: Some(shape.kv_bytes_per_token(HALF_BYTES)),
        adapter_bytes_per_rank: Some(shape.adapter_bytes_per_rank(HALF_BYTES)),
        ..crate::shape::to_status(shape)
    }
}

fn stated(standing: &Standing, status: &BaseModelStatus) -> Vec<Stated> {
    use ConditionStatus::{False, True, Unknown};
    let (resolved, reason, message, stalled) = match standing {
        Standing::Known => (True, Cause::Succeeded.to_string(), status.digest.map(resolved_to), false),
        Standing::Reading { before } => (Unknown, Cause::InProgress.to_string(), Some(reading(*before)), false),
        Standing::Closed(closed) => (False, closed.cause.to_string(), Some(closed.message.clone()), true),
        Standing::Fault(fault) => {
            (False, cause(fault.kind).to_string(), Some(words(fault, Whose::Base)), stalls(fault.kind))
        }
        Standing::Refused { reason, message } => (False, reason.clone(), Some(message.clone()), true),
    };
    let message = message.unwrap_or_default();
    let done = resolved == True;
    let ready = if done { True } else { False };
    let flag = |on: bool| if on { True } else { False };
    let said = |type_, status| Stated::new(type_, status, &reason, message.clone());
    vec![
        said(ConditionType::Resolved, resolved),
        said(ConditionType::Ready, ready),
        said(ConditionType::Reconciling, flag(!done && !stalled)),
        said(ConditionType::Stalled, flag(stalled)),
    ]
}

fn resolved_to(digest: Digest) -> String {
    format!("the weights are {digest}")
}

/// The transcript that tests and people read.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(order) = &self.read {
            let expected = order.expected.map(|(digest, otherwise)| format!(", {} or {otherwise}", digest.short()));
            writeln!(f, "read {}{}", order.uri, expected.unwrap_or_default())?;
        }
        if let Some(order) = &self.look {
            writeln!(f, "look at {}", order.uri)?;
        }
        if let Some(wait_ms) = self.again_in_ms {
            writeln!(f, "again in {wait_ms} ms")?;
        }
        let digest = self.status.digest.map_or("none".to_owned(), |digest| digest.short());
        let resolved = self.status.resolved_for.is_some();
        writeln!(f, "digest {digest}, {}", if resolved { "judged" } else { "not judged" })?;
        self.stated.iter().try_for_each(|stated| writeln!(f, "{stated}"))
    }
}
