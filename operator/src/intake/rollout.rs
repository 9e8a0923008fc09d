//! Which revision the served name means, and how far the pools are with it. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use lorafleet_artifact::{Digest, Reason};
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType};
use lorafleet_crds::{LoraAdapter, LoraAdapterStatus, PlacementStatus, PoolPlacement, RetiringRevision};

use super::judge::{Forbidden, forbidden};
use super::observed::Observed;
use super::plan::Standing;
use crate::conditions::Stated;

/// Longest `status.served`, in characters, as the schema has it.
const SERVED_CHARACTERS_MAX: usize = 256;

/// Seconds for which a revision is still held after the name means another.
const RETIRING_S: i64 = 15;

/// Revisions, pools, and the conditions from `Placed` on.
#[derive(Clone, Debug)]
pub(super) struct Rollout {
    pub(super) current: Option<Digest>,
    pub(super) current_terms: Option<Terms>,
    pub(super) candidate: Option<Digest>,
    pub(super) retiring: Option<RetiringRevision>,
    pub(super) served: Option<String>,
    pub(super) pools: Vec<PoolPlacement>,
    pub(super) stated: Vec<Stated>,
}

/// How a revision is to be had, and what its owner said of it when it was verified.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) uri: String,
    pub(super) base_digest: Option<Digest>,
}

impl Terms {
    fn of_spec(adapter: &LoraAdapter) -> Self {
        let spec = &adapter.spec;
        Self { uri: spec.source.uri.trim_end_matches('/').to_owned(), base_digest: spec.base_model_digest }
    }

    fn of_current(status: &LoraAdapterStatus) -> Option<Self> {
        Some(Self { uri: status.current_uri.clone()?, base_digest: status.current_base_digest })
    }
}

pub(super) fn rollout(observed: &Observed, standing: &Standing, digest: Option<Digest>) -> Rollout {
    let status = observed.adapter.status.clone().unwrap_or_default();
    let pools = pools(observed);
    let base = observed.base.as_ref().and_then(|base| base.status.as_ref()?.digest);
    let other_base = base.is_some() && status.verified_base != base;
    // Verified is what the present policy was asked about: what is remembered of it may be older.
    let verified = digest.filter(|_| *standing == Standing::Verified);
    let judged = |digest: Digest, uri: Option<&str>| {
        let unknown = verified != Some(digest);
        forbidden(&observed.adapter, observed.base.as_ref(), &observed.source_caps, digest, uri).filter(|_| unknown)
    };
    let of_current = status.current_revision.and_then(|current| judged(current, status.current_uri.as_deref()));
    let stays = status.current_revision.filter(|_| !withdrawn(standing, &status, of_current.is_some()));
    // Once it is verified for another base than before, nothing but what was verified stays.
    let stays = stays.filter(|stays| !(other_base && *standing == Standing::Verified) || digest == Some(*stays));
    // What is served goes on being served when its source changed or is read again; what is not, does not begin to be.
    let outlives = !other_base && standing.leaves_pinned() && stays.is_some() && stays == digest;
    let desired = digest.filter(|_| *standing == Standing::Verified || outlives);
    let (obstacle, aside) = if outlives { (None, standing.obstacle()) } else { (standing.obstacle(), None) };
    let promotes = |desired: &Digest| stays != Some(*desired) && held_everywhere(&pools, desired) && !observed.unseen();
    let promoted = desired.filter(promotes);
    let current = promoted.or(stays);
    let retiring = retiring(observed, &status, promoted, current.is_some());
    // What was verified for another base is none of this one's, however short a while is left of it.
    let moved = other_base && verified.is_some();
    let retiring = retiring.filter(|old| !moved && judged(old.digest, Some(&old.uri)).is_none());
    let against = match current {
        // What was withdrawn is remembered for as long as the status holds its digest, and so is the reason.
        None => of_current.or_else(|| judged(digest?, Some(&status.source.as_ref()?.uri))),
        // Pods of this base are told nothing of it. Should the base move back, it is served again.
        Some(current) if other_base && verified.is_none() => stranded(current, status.verified_base, base),
        Some(_) => None,
    };
    let of_spec = promoted.is_some() || current == desired;
    let terms = if of_spec { Some(Terms::of_spec(&observed.adapter)) } else { Terms::of_current(&status) };
    Rollout {
        retiring,
        stated: state(observed, obstacle.as_ref(), aside.as_ref(), against.as_ref(), desired, current, &pools),
        served: served(&pools, current.or(desired)),
        current_terms: terms.filter(|_| current.is_some()),
        candidate: desired.filter(|desired| current != Some(*desired)),
        current,
        pools,
    }
}

/// The current revision was verified for another base than the present one.
fn stranded(current: Digest, verified: Option<Digest>, base: Option<Digest>) -> Option<Forbidden> {
    let (current, verified, base) = (current.short(), verified?, base?);
    let message = format!("revision {current} was verified for the base {verified}, this base is {base}");
    Some(Forbidden { reason: Reason::BaseMismatch.to_string(), message })
}

/// What the name meant before stays a moment longer: gateways hear of the change a little later than pods.
fn retiring(
    observed: &Observed,
    status: &LoraAdapterStatus,
    promoted: Option<Digest>,
    served: bool,
) -> Option<RetiringRevision> {
    // What was withdrawn goes at once.
    let before = status.current_revision.filter(|_| served);
    if let (Some(_), Some(digest), Some(Terms { uri, base_digest })) = (promoted, before, Terms::of_current(status)) {
        let until = Timestamp::from_second(observed.now_s.saturating_add(RETIRING_S)).ok()?;
        return Some(RetiringRevision { digest, uri, base_digest, until: Time(until) });
    }
    // One that shall stay for longer than that is not the operator's, however much clocks differ.
    let in_time = |old: &RetiringRevision| {
        let left_s = old.until.0.as_second().saturating_sub(observed.now_s);
        (1..=RETIRING_S.saturating_mul(4)).contains(&left_s)
    };
    status.retiring.clone().filter(|old| served && in_time(old))
}

/// What the pools saw; of a pool that has not looked yet, what it saw before.
fn pools(observed: &Observed) -> Vec<PoolPlacement> {
    let before = observed.adapter.status.as_ref().map(|status| status.pools.as_slice()).unwrap_or_default();
    let entry = |pool: &super::PoolSeen| match pool.looked {
        true => pool.seen.clone(),
        false => before.iter().find(|entry| entry.name == pool.name).cloned(),
    };
    observed.pools.iter().filter(|pool| pool.selects).filter_map(entry).collect()
}

/// Whether what is served now must no longer be.
fn withdrawn(standing: &Standing, status: &LoraAdapterStatus, forbidden: bool) -> bool {
    match standing {
        Standing::Barred(barred) if barred.cause == Cause::NameConflict => true,
        // The same bytes are judged otherwise: the policy or the base changed.
        Standing::Refused { same_files: true, .. } if status.digest == status.current_revision => true,
        // New content that is refused does not take away the old one, a policy that forbids the old one does.
        _ => forbidden,
    }
}

/// Every pool that serves at all holds it on each pod that takes traffic, and there is one. A pool none of whose pods takes
/// traffic and says what it holds, because they cannot start for instance or are no engines, holds up nobody else's.
fn held_everywhere(pools: &[PoolPlacement], digest: &Digest) -> bool {
    let mut serving = pools.iter().filter(|pool| serves(pool) && answers(pool)).peekable();
    serving.peek().is_some() && serving.all(|pool| pool.held.contains(digest))
}

/// A pod of it that takes traffic says what it holds. Gateways send nothing to one that does not.
fn answers(pool: &PoolPlacement) -> bool {
    let unreachable = Cause::PodUnreachable.to_string();
    let silent =
        |placement: &PlacementStatus| placement.last_error.as_ref().is_some_and(|error| error.code == unreachable);
    !pool.held.is_empty() || pool.placements.iter().any(|placement| placement.traffic && !silent(placement))
}

fn serves(pool: &PoolPlacement) -> bool {
    !pool.held.is_empty() || pool.placements.iter().any(|placement| placement.traffic)
}

fn served(pools: &[PoolPlacement], digest: Option<Digest>) -> Option<String> {
    let of_pool = |pool: &PoolPlacement| {
        let of_digest = || pool.placements.iter().filter(|placement| Some(placement.digest) == digest);
        let ready = of_digest().filter(|placement| placement.ready).count();
        format!("{ready}/{} {}", of_digest().count(), pool.name)
    };
    let with_pods = pools.iter().filter(|pool| !pool.placements.is_empty());
    let text = with_pods.map(of_pool).collect::<Vec<_>>().join(", ");
    (!text.is_empty()).then(|| text.chars().take(SERVED_CHARACTERS_MAX).collect())
}

/// Reason, message, and whether somebody must act.
type Obstacle = (String, String, bool);

fn state(
    observed: &Observed,
    obstacle: Option<&Obstacle>,
    aside: Option<&Obstacle>,
    against: Option<&Forbidden>,
    desired: Option<Digest>,
    current: Option<Digest>,
    pools: &[PoolPlacement],
) -> Vec<Stated> {
    use ConditionStatus::{False, True};
    use ConditionType::{Available, Placed, Ready, Reconciling, RolledOut, Stalled};
    let placed = placed(observed, obstacle.is_some(), desired, pools);
    let rolled_out = rolled_out(&placed, desired, current, pools);
    let available = available(current, against, pools);
    let (mut ready, stalled) = ready(obstacle, &placed, &rolled_out, desired, pools);
    // What is wrong with the source is worth a word to those who look at one line only.
    if let Some((reason, message, _)) = aside.filter(|(reason, ..)| *reason != Cause::InProgress.to_string()) {
        ready.message = format!("{}; its source: {reason}: {message}", ready.message);
    }
    let flag = |type_, on: bool| {
        Stated::new(
            type_,
            if on { True } else { False },
            &ready.reason,
            if on { ready.message.clone() } else { String::new() },
        )
    };
    // Pools that shall have no pods are as they shall be.
    let rests = ready.reason == Cause::NoReadyPod.to_string()
        && observed.pools.iter().filter(|pool| pool.selects).all(|pool| pool.idle);
    let reconciling = flag(Reconciling, !ready.is_true() && !stalled && !rests);
    let stalled = flag(Stalled, stalled);
    debug_assert_eq!(
        [placed.type_, rolled_out.type_, available.type_, ready.type_],
        [Placed, RolledOut, Available, Ready]
    );
    vec![placed, rolled_out, available, ready, reconciling, stalled]
}

/// Pods were told to hold the spec's revision, and have room for it.
fn placed(observed: &Observed, obstructed: bool, desired: Option<Digest>, pools: &[PoolPlacement]) -> Stated {
    use ConditionStatus::{False, True, Unknown};
    let said = |status, reason: &str, message: &str| Stated::new(ConditionType::Placed, status, reason, message);
    if obstructed {
        return said(Unknown, &Cause::Waiting.to_string(), "");
    }
    if !observed.pools.iter().any(|pool| pool.selects) {
        let base = &observed.adapter.spec.base_model_ref.name;
        let message = format!("no ServingPool of the base '{base}' selects it");
        return said(False, &Cause::NoPool.to_string(), &message);
    }
    let is = |pool: &&PoolPlacement, cause: Cause| pool.reason == cause.to_string();
    if let Some(pool) = pools.iter().find(|pool| is(pool, Cause::CapacityExceeded)) {
        return said(False, &pool.reason, &in_pool(pool));
    }
    let untold = |pool: &&PoolPlacement| {
        let told = pool.placements.iter().any(|placement| Some(placement.digest) == desired);
        is(pool, Cause::CredentialsMissing) && !told
    };
    if let Some(pool) = pools.iter().find(untold) {
        return said(False, &pool.reason, &in_pool(pool));
    }
    match pools.iter().find(|pool| is(pool, Cause::Waiting)) {
        None if !pools.is_empty() => said(True, &Cause::Succeeded.to_string(), ""),
        _ => said(Unknown, &Cause::InProgress.to_string(), ""),
    }
}

/// The served name means the spec's revision.
fn rolled_out(placed: &Stated, desired: Option<Digest>, current: Option<Digest>, pools: &[PoolPlacement]) -> Stated {
    use ConditionStatus::{False, True, Unknown};
    let said = |status, reason: &str, message: String| Stated::new(ConditionType::RolledOut, status, reason, message);
    if let Some(desired) = desired.filter(|desired| current == Some(*desired)) {
        return match pools.iter().find(|pool| serves(pool) && !pool.held.contains(&desired)) {
            Some(pool) => said(False, &pool.reason, in_pool(pool)),
            None => said(True, &Cause::Succeeded.to_string(), format!("the name means {desired}")),
        };
    }
    if !placed.is_true() {
        return said(if desired.is_some() { False } else { Unknown }, &Cause::Waiting.to_string(), String::new());
    }
    let behind = || pools.iter().filter(|pool| pool.reason != Cause::Succeeded.to_string());
    match behind().find(|pool| serves(pool)).or_else(|| behind().next()) {
        Some(pool) => said(False, &pool.reason, in_pool(pool)),
        None => said(False, &Cause::InProgress.to_string(), String::new()),
    }
}

/// The name answers, from some revision.
fn available(current: Option<Digest>, against: Option<&Forbidden>, pools: &[PoolPlacement]) -> Stated {
    let answers =
        |placement: &PlacementStatus| placement.traffic && placement.ready && Some(placement.digest) == current;
    let held = pools.iter().flat_map(|pool| &pool.placements).any(answers);
    let of_current = |placement: &&PlacementStatus| placement.traffic && Some(placement.digest) == current;
    let mut errors = pools.iter().flat_map(|pool| &pool.placements).filter(of_current).filter_map(|placement| {
        let error = placement.last_error.as_ref()?;
        Some(format!("pod {}: {}: {}", placement.pod, error.code, error.message))
    });
    if let (false, Some(Forbidden { reason, message })) = (held, against) {
        return Stated::new(ConditionType::Available, ConditionStatus::False, reason, message.clone());
    }
    let (status, cause, message) = match (held, current, errors.next()) {
        (true, ..) => (ConditionStatus::True, Cause::Succeeded, String::new()),
        (false, None, _) => (ConditionStatus::False, Cause::Waiting, "no revision is served yet".to_owned()),
        (false, Some(_), Some(error)) => (ConditionStatus::False, Cause::LoadFailed, error),
        (false, Some(_), None) => {
            (ConditionStatus::False, Cause::NoReadyPod, "no pod that takes traffic holds it".to_owned())
        }
    };
    Stated::new(ConditionType::Available, status, cause, message)
}

/// The spec's revision is fully served; else the first thing that is in the way, and whether somebody must act.
fn ready(
    obstacle: Option<&Obstacle>,
    placed: &Stated,
    rolled_out: &Stated,
    desired: Option<Digest>,
    pools: &[PoolPlacement],
) -> (Stated, bool) {
    let not =
        |reason: &str, message: String| Stated::new(ConditionType::Ready, ConditionStatus::False, reason, message);
    if let Some((reason, message, stalled)) = obstacle {
        return (not(reason, message.clone()), *stalled);
    }
    for earlier in [placed, rolled_out] {
        if !earlier.is_true() {
            let stalled = earlier.reason == Cause::CapacityExceeded.to_string();
            return (not(&earlier.reason, earlier.message.clone()), stalled);
        }
    }
    let holds = |pool: &&PoolPlacement| desired.is_some_and(|desired| pool.held.contains(&desired));
    let serving = || pools.iter().filter(|pool| serves(pool));
    if let Some(pool) = serving().find(|pool| !holds(pool)) {
        return (not(&pool.reason, in_pool(pool)), false);
    }
    if serving().next().is_none() {
        let pool = pools.iter().find(|pool| !pool.placements.is_empty());
        let (reason, message) = pool.map_or_else(
            || (Cause::NoReadyPod.to_string(), "no pool has a pod that takes traffic".to_owned()),
            |pool| (pool.reason.clone(), in_pool(pool)),
        );
        return (not(&reason, message), false);
    }
    let mut message = format!("served by {}", served(pools, desired).unwrap_or_default());
    // Not as the spec asks: a floor that a pod has no room for, for instance.
    if let Some(pool) = serving().find(|pool| !pool.message.is_empty()) {
        message = format!("{message}; {}", in_pool(pool));
    }
    (Stated::new(ConditionType::Ready, ConditionStatus::True, Cause::Succeeded, message), false)
}

fn in_pool(pool: &PoolPlacement) -> String {
    format!("pool {}: {}", pool.name, pool.message)
}
