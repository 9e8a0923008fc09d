//! What an adapter's status says, and whether it is to be read: a pure function.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use lorafleet_artifact::{Digest, Reason, Traits};
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType, find};
use lorafleet_crds::{KnownRevision, LoraAdapter, LoraAdapterStatus, PoolPlacement, SourcePin};

use super::gate::{Barred, Gate, Order, gate, pin};
use super::judge::{self, Forbidden};
use super::observed::{Facts, Observed, Outcome};
use super::rollout::{Rollout, rollout};
use crate::conditions::Stated;
use crate::job::{Fault, JobState, retry_in_ms};
use crate::recheck::{Next, knows_better, listing};
use crate::settings::Limits;
use crate::source::{Whose, cause, reading, resolve_at, stalls, words};

/// Placements that a status shows, of all pools together. With the longest names and errors they take half a megabyte.
const PLACEMENTS_SHOWN_MAX: usize = 512;

/// Pools that a status shows, as its schema has it.
const POOLS_SHOWN_MAX: usize = 32;

/// What is to be done, and what is to be said.
#[derive(Clone, Debug)]
pub struct Plan {
    pub read: Option<Order>,
    /// The source is to be looked at: whether it still holds what was judged.
    pub look: Option<Order>,
    /// Without conditions and generation. Absent if nothing is to be said yet.
    pub status: Option<LoraAdapterStatus>,
    pub stated: Vec<Stated>,
    /// When to look again though nothing changed; never, if absent.
    pub again_in_ms: Option<u64>,
}

/// How far the spec's revision came.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Standing {
    Barred(Barred),
    /// So many reads of its namespace came before, if it waits for its turn.
    Reading {
        before: usize,
    },
    Fault(Fault),
    Refused {
        reason: String,
        message: String,
        same_files: bool,
        /// What there is to say of the source: its digest, if it was read that far.
        found: String,
    },
    Verified,
}

pub fn plan(observed: &Observed, limits: &Limits) -> Plan {
    let adapter = &observed.adapter;
    let gate = gate(adapter, observed.base.as_ref(), &observed.rivals, &observed.source_caps);
    let Stand { standing, outcome, read, look, again_in_ms } = match &gate {
        Err(barred) => Stand::at(Standing::Barred(barred.clone())),
        Ok(gate) => stand(observed, gate, limits),
    };
    let mut status = facts(observed, &gate, &standing, outcome);
    let rollout = rollout(observed, &standing, status.digest);
    let Rollout { current, current_terms, candidate, retiring, served, pools, stated } = rollout;
    status.current_revision = current;
    (status.current_uri, status.current_base_digest) =
        current_terms.map_or((None, None), |terms| (Some(terms.uri), terms.base_digest));
    status.candidate_revision = candidate;
    status.retiring = retiring;
    forget(&mut status);
    status.served = served;
    status.pools = shown(pools);
    status.served_name = Some(adapter.served_name().to_owned());
    let retired_ms = status.retiring.as_ref().map(|old| milliseconds_until(&old.until, observed.now_s));
    let again_in_ms = [again_in_ms, retired_ms].into_iter().flatten().min();
    // A new leader says nothing of pods before their pools have looked: what the last one said stands until then, but for
    // what must not be served.
    let before = adapter.status.as_ref().filter(|status| !status.conditions.is_empty());
    let withdraws = before.is_some_and(|before| told(before).any(|digest| !told(&status).any(|kept| kept == digest)));
    let status = (!observed.unseen() || before.is_none() || withdraws).then_some(status);
    let stated = state(&standing, status.as_ref(), stated);
    Plan { read, look, status, stated, again_in_ms }
}

/// Revisions that pods are told to hold.
fn told(status: &LoraAdapterStatus) -> impl Iterator<Item = Digest> {
    let retiring = status.retiring.as_ref().map(|old| old.digest);
    [status.current_revision, status.candidate_revision, retiring].into_iter().flatten()
}

/// Keeps what is known of those revisions alone that may be judged again.
fn forget(status: &mut LoraAdapterStatus) {
    let kept: Vec<Digest> = status.digest.into_iter().chain(told(status)).collect();
    status.revisions.retain(|known| kept.contains(&known.digest));
}

/// Pools as a status can hold them: an object has its limit of bytes.
fn shown(mut pools: Vec<PoolPlacement>) -> Vec<PoolPlacement> {
    pools.truncate(POOLS_SHOWN_MAX);
    let most = PLACEMENTS_SHOWN_MAX / pools.len().max(1);
    for pool in pools.iter_mut().filter(|pool| pool.placements.len() > most) {
        pool.placements.sort_by_key(|placement| placement.ready);
        pool.placements.truncate(most);
    }
    pools
}

fn milliseconds_until(time: &Time, now_s: i64) -> u64 {
    let seconds = time.0.as_second().saturating_sub(now_s).max(1);
    u64::try_from(seconds).unwrap_or_default().saturating_mul(1000)
}

/// Where the spec's revision stands, and what is to be done about its source.
struct Stand<'a> {
    standing: Standing,
    /// The read that has just shown it.
    outcome: Option<&'a Outcome>,
    read: Option<Order>,
    look: Option<Order>,
    again_in_ms: Option<u64>,
}

impl<'a> Stand<'a> {
    fn at(standing: Standing) -> Self {
        Self { standing, outcome: None, read: None, look: None, again_in_ms: None }
    }

    fn shown_by(outcome: &'a Outcome) -> Self {
        let standing = match outcome {
            Outcome::Verified(_) => Standing::Verified,
            Outcome::Refused { reason, message, same_files, digest, .. } => {
                let (reason, message) = (reason.clone(), message.clone());
                Standing::Refused { reason, message, same_files: *same_files, found: found(*digest) }
            }
        };
        Self { outcome: Some(outcome), ..Self::at(standing) }
    }

    fn reading(order: &Order) -> Self {
        Self { read: Some(order.clone()), ..Self::at(Standing::Reading { before: 0 }) }
    }
}

fn stand<'a>(observed: &'a Observed, gate: &Gate, limits: &Limits) -> Stand<'a> {
    let order = &gate.order;
    if let Some(known) = remembered(&observed.adapter, gate).filter(|_| !newer(observed)) {
        return match observed.recheck.next() {
            Next::ReadAgain => Stand::reading(order),
            Next::Look => Stand { look: Some(order.clone()), ..Stand::at(known) },
            Next::Rest(again_in_ms) => Stand { again_in_ms, ..Stand::at(known) },
        };
    }
    match (&observed.job, judged_by_memory(observed, order)) {
        (JobState::Done(outcome), _) => Stand::shown_by(outcome),
        (_, Some(judged)) => Stand::at(judged),
        (JobState::Idle, None) => Stand::reading(order),
        (JobState::Waiting { before }, None) => Stand::at(Standing::Reading { before: *before }),
        (JobState::Running, None) => Stand::at(Standing::Reading { before: 0 }),
        (JobState::Failed { fault, attempts, age_ms }, None) => {
            let standing = Standing::Fault(fault.clone());
            match retry_in_ms(fault, *attempts, *age_ms, limits) {
                0 => Stand { read: Some(order.clone()), ..Stand::at(standing) },
                wait_ms => Stand { again_in_ms: Some(wait_ms), ..Stand::at(standing) },
            }
        }
    }
}

/// Whether a read knows better than what the status remembers.
fn newer(observed: &Observed) -> bool {
    let told = observed.adapter.status.as_ref().and_then(|status| status.source_listing.as_ref());
    knows_better(&observed.job, told, Outcome::listing)
}

/// What is remembered of the content that is pinned is enough for a changed policy, whether or not the source can be read:
/// to see that it is forbidden by now, and where nothing but the policy has changed since it was verified, that it is not.
fn judged_by_memory(observed: &Observed, order: &Order) -> Option<Standing> {
    let status = observed.adapter.status.as_ref()?;
    let digest = status.digest?;
    let known = status.revision(digest).is_some_and(|known| known.verified_for.as_ref() == Some(&order.content));
    // What was judged last may be other files, which a changed policy may let pass.
    let judged_last = !order.pinned_files.is_empty() && status.source_listing == Some(listing(&order.pinned_files));
    let same_content = known && judged_last;
    if !order.pinned && !same_content {
        return None;
    }
    match judge::content(&observed.adapter, observed.base.as_ref()?, digest) {
        Some(Forbidden { reason, message }) => {
            Some(Standing::Refused { reason, message, same_files: true, found: found(Some(digest)) })
        }
        None => (same_content && !newer(observed)).then_some(Standing::Verified),
    }
}

fn found(digest: Option<Digest>) -> String {
    digest.map_or_else(
        || "the files are there; they were refused before their digest was known".to_owned(),
        |digest| digest.to_string(),
    )
}

/// The judgement that the status already holds for the same inputs.
fn remembered(adapter: &LoraAdapter, gate: &Gate) -> Option<Standing> {
    let status = adapter.status.as_ref()?;
    // Without the files that it is about, it was made before a read of the source had ended.
    if status.verified_for.as_ref() != Some(&gate.order.fingerprint) || status.source_listing.is_none() {
        return None;
    }
    let verified = find(&status.conditions, ConditionType::Verified)?;
    match verified.status.as_str() {
        // A status that does not hold what a policy may ask for one day is made anew.
        "True" => status.verified_base.and(status.revision(status.digest?)).map(|_| Standing::Verified),
        "False" => Some(Standing::Refused {
            reason: verified.reason.clone(),
            message: verified.message.clone(),
            // What that meant for the current revision was done when it was judged.
            same_files: false,
            found: find(&status.conditions, ConditionType::Resolved)?.message.clone(),
        }),
        _ => None,
    }
}

/// What the status says of the adapter itself.
fn facts(
    observed: &Observed,
    gate: &Result<Gate, Barred>,
    standing: &Standing,
    outcome: Option<&Outcome>,
) -> LoraAdapterStatus {
    let adapter = &observed.adapter;
    let old = adapter.status.clone().unwrap_or_default();
    let Ok(gate) = gate else {
        // It is not known any more whether any of it is so, except for what is pinned and what its files were.
        let source_listing = old.source_listing.clone();
        return LoraAdapterStatus { source_listing, ..keep_pin(old, true) };
    };
    let pinned = pin(adapter, &gate.uri).is_some();
    let judged = matches!(standing, Standing::Verified | Standing::Refused { .. });
    let fingerprint = judged.then(|| gate.order.fingerprint.clone());
    match outcome {
        Some(outcome) => {
            let found = match outcome {
                Outcome::Verified(found) => verified(adapter, gate, found),
                Outcome::Refused { .. } => keep_pin(old, pinned),
            };
            LoraAdapterStatus { verified_for: fingerprint, source_listing: Some(outcome.listing()), ..found }
        }
        None => {
            let source_listing = old.source_listing.clone().filter(|_| judged);
            LoraAdapterStatus { verified_for: fingerprint, source_listing, ..keep_pin(old, pinned) }
        }
    }
}

fn keep_pin(old: LoraAdapterStatus, pinned: bool) -> LoraAdapterStatus {
    if pinned {
        LoraAdapterStatus { conditions: Vec::new(), verified_for: None, source_listing: None, ..old }
    } else {
        // The revision that is served was verified for this base, whatever the spec asks for by now.
        let (verified_base, revisions) = (old.verified_base, old.revisions);
        LoraAdapterStatus { verified_base, revisions, ..LoraAdapterStatus::default() }
    }
}

fn verified(adapter: &LoraAdapter, gate: &Gate, found: &Facts) -> LoraAdapterStatus {
    let ranks = found.traits.ranks_max();
    let known = adapter.status.iter().flat_map(|status| &status.revisions);
    let others = known.filter(|other| other.digest != found.digest).cloned();
    LoraAdapterStatus {
        digest: Some(found.digest),
        source: Some(SourcePin {
            uri: gate.uri.to_string(),
            resolve_at: resolve_at(adapter),
            files: found.files.clone(),
        }),
        verified_base: gate.order.policy.identities.first().copied(),
        revisions: [known_revision(adapter, gate, found)].into_iter().chain(others).collect(),
        rank: Some(found.traits.rank_max()),
        target_modules: ranks.keys().cloned().collect(),
        ranks,
        alpha: Some(found.alpha),
        size_bytes: Some(found.size_bytes),
        ..LoraAdapterStatus::default()
    }
}

fn known_revision(adapter: &LoraAdapter, gate: &Gate, found: &Facts) -> KnownRevision {
    let Facts { digest, traits, alpha: _, size_bytes, files: _ } = found;
    let Traits { ranks, base_digest, weights_bytes } = traits.clone();
    KnownRevision {
        digest: *digest,
        verified_for: Some(gate.order.content.clone()),
        digest_claimed: adapter.spec.digest == Some(*digest),
        declared_base: base_digest,
        ranks,
        weights_bytes,
        size_bytes: *size_bytes,
    }
}

/// The conditions in the order in which an adapter passes them.
fn state(standing: &Standing, status: Option<&LoraAdapterStatus>, mut later: Vec<Stated>) -> Vec<Stated> {
    use ConditionStatus::{False, True, Unknown};
    use ConditionType::{Resolved, SourceAllowed, Verified};
    let waiting = |type_| Stated::new(type_, Unknown, Cause::Waiting, "");
    let said = |type_, message: String| Stated::new(type_, True, Cause::Succeeded, message);
    let done = |type_| said(type_, String::new());
    let mut stated = match standing {
        Standing::Barred(barred) => {
            let status = if barred.waiting { Unknown } else { False };
            let message = barred.message.clone();
            vec![Stated::new(SourceAllowed, status, barred.cause, message), waiting(Resolved), waiting(Verified)]
        }
        Standing::Reading { before } => {
            let reading = |type_| Stated::new(type_, Unknown, Cause::InProgress, reading(*before));
            vec![done(SourceAllowed), reading(Resolved), reading(Verified)]
        }
        Standing::Fault(fault) => {
            let failed = Stated::new(Resolved, False, cause(fault.kind), words(fault, Whose::Adapter));
            vec![done(SourceAllowed), failed, waiting(Verified)]
        }
        Standing::Refused { reason, message, found, .. } => {
            let refused = Stated::new(Verified, False, reason, message.clone());
            vec![done(SourceAllowed), said(Resolved, found.clone()), refused]
        }
        Standing::Verified => {
            let (digest, what) = status.map(described).unwrap_or_default();
            vec![done(SourceAllowed), said(Resolved, digest), said(Verified, what)]
        }
    };
    stated.append(&mut later);
    stated
}

/// The digest, and in a few words what it is.
fn described(status: &LoraAdapterStatus) -> (String, String) {
    let digest = status.digest.map(|digest| digest.to_string()).unwrap_or_default();
    let (rank, bytes) = (status.rank.unwrap_or_default(), status.size_bytes.unwrap_or_default());
    let modules = status.target_modules.join(", ");
    (digest, format!("rank {rank} on {modules}; {bytes} bytes"))
}

impl Standing {
    /// Why the spec's revision cannot be served now, if it cannot: reason, message, and whether somebody must act.
    pub(super) fn obstacle(&self) -> Option<(String, String, bool)> {
        match self {
            Self::Verified => None,
            Self::Barred(barred) => Some((barred.cause.to_string(), barred.message.clone(), !barred.waiting)),
            Self::Reading { before } => Some((Cause::InProgress.to_string(), reading(*before), false)),
            Self::Fault(fault) => {
                Some((cause(fault.kind).to_string(), words(fault, Whose::Adapter), stalls(fault.kind)))
            }
            Self::Refused { reason, message, .. } => Some((reason.clone(), message.clone(), true)),
        }
    }

    /// Whether it says nothing against the pinned revision that is served: the source holds other bytes by now, or is
    /// being read again.
    pub(super) fn leaves_pinned(&self) -> bool {
        match self {
            Self::Reading { .. } | Self::Fault(_) => true,
            Self::Refused { reason, .. } => reason == Reason::SourceChanged.as_str(),
            Self::Barred(_) | Self::Verified => false,
        }
    }
}

/// The transcript that tests and people read.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(order) = &self.read {
            writeln!(f, "read {} through {}", order.uri, order.door.prefix)?;
        }
        if let Some(order) = &self.look {
            writeln!(f, "look at {}", order.uri)?;
        }
        if let Some(wait_ms) = self.again_in_ms {
            writeln!(f, "again in {wait_ms} ms")?;
        }
        let Some(status) = &self.status else { return writeln!(f, "say nothing yet") };
        let short = |digest: &Option<Digest>| digest.map_or("none".to_owned(), |digest| digest.short());
        let (digest, current) = (short(&status.digest), short(&status.current_revision));
        writeln!(f, "digest {digest}, current {current}, candidate {}", short(&status.candidate_revision))?;
        if let Some(retiring) = &status.retiring {
            writeln!(f, "retiring {} until {}", retiring.digest.short(), retiring.until.0)?;
        }
        if let Some(served) = &status.served {
            writeln!(f, "served {served}")?;
        }
        self.stated.iter().try_for_each(|stated| writeln!(f, "{stated}"))
    }
}
