//! Which pod answers a request. Pure: chance comes in as `draw`, time as `now_ms`.
//!
//! A score is the expected number of milliseconds until the first token, so pods are compared in one unit whatever the
//! estimate behind it is: waiting prompt tokens, rows already running, and the way of the adapter to the compute units.
//! The lowest of two random candidates and the holder wins. The holder is the pod where the adapter is nearest to the
//! compute units, so that an adapter keeps its home while that is not overloaded; two random ones keep gateways that see
//! the same second-old reports from all choosing the same pod.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::{AdapterState, Role, Tier};

use crate::resolve::Target;
use crate::view::{FleetView, PodReport, PodView};

/// A report older than this no longer says what the pod holds: such a pod is asked only if no other can answer.
pub const REPORT_AGE_MS_MAX: u64 = 5_000;
/// Pods that an error message names; the rest are counted.
const PODS_EXPLAINED_MAX: usize = 3;

/// What a decision needs to know of one request.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    pub target: &'a Target,
    /// Estimate from the body's length.
    pub prompt_tokens: u64,
    /// Pods that have already failed this request.
    pub excluded: &'a BTreeSet<String>,
    /// Requests of this gateway under way, by pod.
    pub outstanding: &'a BTreeMap<String, u32>,
    /// Uniformly random bits.
    pub draw: u64,
}

/// Where a request goes, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub pod: String,
    pub address: SocketAddr,
    /// Expected milliseconds until the first token.
    pub score: f64,
    /// The pods that were compared, the chosen one first.
    pub reasons: Vec<Reason>,
}

/// One compared pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Reason {
    pub pod: String,
    pub score: f64,
    /// Nearest copy of the adapter; `None` for the base.
    pub tier: Option<Tier>,
    pub load_ms: f64,
    pub queue_ms: f64,
    /// Holds the nearest copy of all candidates.
    pub holder: bool,
    pub doubt: Doubt,
}

/// Why a pod is asked only if no better one can answer. Ordered: the later, the worse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    #[default]
    None,
    /// Its report is old, or the last question had no answer.
    Stale,
    /// It serves another base than the one that its `BaseModel` has pinned: the pool is on its way from one to the other.
    /// While it is, what was served goes on being served.
    OtherBase,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:.1} ms = queue {:.1} + load {:.1}", self.pod, self.score, self.queue_ms, self.load_ms)?;
        if let Some(tier) = self.tier {
            write!(f, " from {tier:?}")?;
        }
        if self.holder {
            write!(f, ", holder")?;
        }
        match self.doubt {
            Doubt::None => Ok(()),
            Doubt::Stale => write!(f, ", stale report"),
            Doubt::OtherBase => write!(f, ", other base"),
        }
    }
}

/// No pod can answer now. The name is known, so another attempt later may succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{target} is ready on no pod{}", explained(pods))]
pub struct NowhereReady {
    pub target: Target,
    /// Every pod, with what stands in the way.
    pub pods: Vec<(String, Unfit)>,
}

/// Why a pod cannot answer a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    NotReady,
    Draining,
    /// It has not been reached since it appeared.
    NoReport(Option<String>),
    /// Its base weights have an adapter merged in.
    Merged(Digest),
    NotHeld,
    Loading,
    Failed(String),
    Retiring,
    /// It has failed this very request.
    Tried,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::NotReady => write!(f, "the pod is not ready"),
            Unfit::Draining => write!(f, "the pod is draining"),
            Unfit::NoReport(None) => write!(f, "no report yet"),
            Unfit::NoReport(Some(error)) => write!(f, "no report: {error}"),
            Unfit::Merged(digest) => write!(f, "dedicated to {}", digest.short()),
            Unfit::NotHeld => write!(f, "not placed there"),
            Unfit::Loading => write!(f, "still loading"),
            Unfit::Failed(error) => write!(f, "failed to load: {error}"),
            Unfit::Retiring => write!(f, "being unloaded"),
            Unfit::Tried => write!(f, "failed this request"),
        }
    }
}

/// First approximations of what a step and a copy cost, until the pods measure them.
struct Costs {
    prefill_ms_per_token: f64,
    ms_per_running: f64,
    ms_per_waiting: f64,
}

const COSTS: Costs = Costs { prefill_ms_per_token: 0.2, ms_per_running: 1.0, ms_per_waiting: 5.0 };

/// Start of a copy in milliseconds, and bytes per millisecond after it.
const fn copy_cost(tier: Tier) -> (f64, f64) {
    match tier {
        Tier::Device => (0.0, f64::INFINITY),
        Tier::Host => (0.1, 10_000_000.0),
        Tier::Disk => (1.0, 1_000_000.0),
        Tier::Source => (20.0, 200_000.0),
    }
}

/// The pod for a request, or what stands in the way on every pod.
pub fn route(view: &FleetView, request: &RouteRequest<'_>, now_ms: u64) -> Result<Choice, NowhereReady> {
    let mut fit = Vec::new();
    let mut unfit = Vec::new();
    for (name, pod) in &view.pods {
        match examine(view, name, pod, request, now_ms) {
            Ok(candidate) => fit.push(candidate),
            Err(why) => unfit.push((name.clone(), why)),
        }
    }
    let least_doubt = fit.iter().map(|candidate| candidate.doubt).min().unwrap_or_default();
    fit.retain(|candidate| candidate.doubt == least_doubt);
    let mut compared = shortlist(fit, request);
    compared.sort_by(|a, b| a.score.total_cmp(&b.score).then_with(|| b.holder.cmp(&a.holder)));
    let best = compared.first().and_then(|best| Some((best.clone(), view.pods.get(&best.pod)?.address)));
    match best {
        Some((best, address)) => Ok(Choice { pod: best.pod, address, score: best.score, reasons: compared }),
        None => Err(NowhereReady { target: request.target.clone(), pods: unfit }),
    }
}

/// Two random candidates and the holder, each once.
fn shortlist(mut fit: Vec<Reason>, request: &RouteRequest<'_>) -> Vec<Reason> {
    let home = |candidate: &Reason| rendezvous(request.target, &candidate.pod);
    let nearest = |a: &(usize, &Reason), b: &(usize, &Reason)| {
        a.1.load_ms.total_cmp(&b.1.load_ms).then(home(b.1).cmp(&home(a.1)))
    };
    let Some(holder) = fit.iter().enumerate().min_by(nearest).map(|(index, _)| index) else {
        return fit;
    };
    let count = fit.len() as u64;
    let draws = [request.draw & 0xffff_ffff, request.draw >> 32].map(|half| (half % count) as usize);
    let mut index = 0;
    fit.retain_mut(|candidate| {
        candidate.holder = index == holder;
        let keep = candidate.holder || draws.contains(&index);
        index += 1;
        keep
    });
    fit
}

/// Whether the pod can answer, and what it would cost there.
fn examine(
    view: &FleetView,
    name: &str,
    pod: &PodView,
    request: &RouteRequest<'_>,
    now_ms: u64,
) -> Result<Reason, Unfit> {
    if request.excluded.contains(name) {
        return Err(Unfit::Tried);
    }
    let held = pod.report.as_deref().map(|report| held(report, request.target));
    // A pod that says why it cannot load something says more than its readiness does.
    match held {
        Some(Err(why)) => return Err(why),
        _ if !pod.ready => return Err(Unfit::NotReady),
        _ => {}
    }
    let (Some(report), Some(Ok(held))) = (pod.report.as_deref(), held) else {
        return Err(Unfit::NoReport(pod.poll_error.clone()));
    };
    let (tier, load_ms) = match held {
        Some((tier, bytes)) => {
            let (start_ms, bytes_per_ms) = copy_cost(tier);
            (Some(tier), start_ms + bytes as f64 / bytes_per_ms)
        }
        None => (None, 0.0),
    };
    let sent_since = request.outstanding.get(name).copied().unwrap_or(0).saturating_sub(report.outstanding_then);
    let waiting = f64::from(report.load.waiting.saturating_add(sent_since));
    let tokens = report.load.waiting_tokens.saturating_add(request.prompt_tokens) as f64;
    let queue_ms = tokens * COSTS.prefill_ms_per_token
        + waiting * COSTS.ms_per_waiting
        + f64::from(report.load.running) * COSTS.ms_per_running;
    Ok(Reason {
        pod: name.to_owned(),
        score: queue_ms + load_ms,
        tier,
        load_ms,
        queue_ms,
        holder: false,
        doubt: if view.base_digest.is_some_and(|pinned| pinned != report.base_digest) {
            Doubt::OtherBase
        } else if pod.poll_error.is_some() || now_ms.saturating_sub(report.received_ms) > REPORT_AGE_MS_MAX {
            Doubt::Stale
        } else {
            Doubt::None
        },
    })
}

/// Tier and size of what the target needs in this pod; `None` if it needs nothing beside the pod's own weights.
fn held(report: &PodReport, target: &Target) -> Result<Option<(Tier, u64)>, Unfit> {
    if report.draining {
        return Err(Unfit::Draining);
    }
    match (target, &report.role) {
        (Target::Base { .. }, Role::Shared) => Ok(None),
        (Target::Base { .. }, Role::Merged(merged)) => Err(Unfit::Merged(*merged)),
        (Target::Adapter { digest, .. }, Role::Merged(merged)) if merged != digest => Err(Unfit::Merged(*merged)),
        (Target::Adapter { name, digest }, _) => {
            let holding = report.holding(name, digest).ok_or(Unfit::NotHeld)?;
            match holding.state {
                AdapterState::Ready => Ok(Some((holding.tier, holding.bytes))),
                AdapterState::Loading => Err(Unfit::Loading),
                AdapterState::Draining => Err(Unfit::Retiring),
                AdapterState::Failed => {
                    let error = holding.last_error.clone();
                    Err(Unfit::Failed(error.unwrap_or_else(|| "the pod gives no reason".to_owned())))
                }
            }
        }
    }
}

/// A stable preference between pods that are equally near, different for each target (FNV-1a with a final mix).
fn rendezvous(target: &Target, pod: &str) -> u64 {
    let version: &[u8] = match target {
        Target::Base { .. } => &[],
        Target::Adapter { digest, .. } => digest.as_bytes(),
    };
    let bytes = target.name().bytes().chain(version.iter().copied()).chain(pod.bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 33)
}

fn explained(pods: &[(String, Unfit)]) -> String {
    if pods.is_empty() {
        return ": the pool has no pods".to_owned();
    }
    let named: Vec<String> = pods.iter().take(PODS_EXPLAINED_MAX).map(|(pod, why)| format!("{pod}: {why}")).collect();
    let more = pods.len().saturating_sub(PODS_EXPLAINED_MAX);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!(" ({}{more})", named.join("; "))
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
