//! What a pool needs: a pure function of what was observed.
//!
//! Absent here on purpose: clock, IO, randomness. The plan carries its reasons; status, Events and tests print them.

mod capacity;
mod placement;
mod seen;
mod steps;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use kube::ResourceExt;
use lorafleet_artifact::Digest;
use lorafleet_crds::condition::Cause;
use lorafleet_crds::wire::Placement;
use lorafleet_crds::{LoraAdapter, PoolPlacement, names};

use super::observed::{Observed, PodSeen};
use crate::build::{self, Objects};
use capacity::Kept;
use seen::Holders;

pub use placement::{Revision, Stage, Verdict, selector_fault, selects};
pub(super) use steps::{MISSING, NOT_OWN, TOUCHED, key};

/// What is to be done, and why.
#[derive(Debug)]
pub struct Plan {
    /// Set if the pool cannot have pods now. What it has stays as it is.
    pub blocked: Option<Reasoned>,
    /// The Secret with the keys is to be made.
    pub make_keys: bool,
    /// Objects as they shall be; none while blocked.
    pub objects: Option<Box<Objects>>,
    /// What to do with each of them, by `Kind/name`.
    pub steps: BTreeMap<String, Step>,
    /// Every engine pod, by name.
    pub pods: Vec<PodStep>,
    /// Every adapter that the pool selects.
    pub adapters: Vec<AdapterStep>,
}

/// One word and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoned {
    pub cause: Cause,
    pub message: String,
}

impl Reasoned {
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into() }
    }
}

impl fmt::Display for Reasoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause, self.message)
    }
}

/// What to do with one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is as it shall be.
    Keep,
    Apply {
        hash: String,
        why: &'static str,
    },
}

/// What to do with one engine pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodStep {
    pub pod: String,
    pub action: PodAction,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodAction {
    /// It has been told this already, for this boot.
    Keep,
    /// Tell it this.
    Put { placement: Placement, why: String },
    /// It cannot be told anything now.
    Wait(Reasoned),
    /// It must not be told anything.
    Refuse(Reasoned),
}

/// One adapter in this pool.
#[derive(Clone, Debug)]
pub struct AdapterStep {
    pub name: String,
    /// Of the object.
    pub uid: String,
    pub verdict: Verdict,
    /// What the pods report of it.
    pub seen: PoolPlacement,
}

/// The plan for what was observed.
pub fn plan(observed: &Observed) -> Plan {
    let base_digest = match base_digest(observed) {
        Ok(digest) => digest,
        Err(blocked) => return blocked_plan(observed, blocked),
    };
    let Some(base) = &observed.base else {
        return blocked_plan(observed, Reasoned::new(Cause::BaseNotFound, "the BaseModel is gone"));
    };
    let objects = match build::objects(&observed.pool, base, &base_digest, &observed.defaults) {
        Ok(objects) => objects,
        Err(error) => return blocked_plan(observed, Reasoned::new(Cause::ApplyFailed, error.to_string())),
    };
    let (verdicts, kept) = placement::verdicts(observed);
    let pods = match keys_lacking(observed) {
        Some(why) => waiting(observed, &why),
        None => pod_steps(observed, &base_digest, &verdicts, &kept),
    };
    Plan {
        blocked: None,
        make_keys: !observed.keys_exist,
        steps: steps::objects(observed, &objects),
        objects: Some(Box::new(objects)),
        pods,
        adapters: adapter_steps(observed, verdicts, &kept),
    }
}

/// What to tell the pods: the same to all, but for those with less room.
fn pod_steps(observed: &Observed, base: &Digest, verdicts: &[(&LoraAdapter, Verdict)], kept: &Kept) -> Vec<PodStep> {
    let whole = placement::wanted(verdicts, &HashSet::new());
    let parts: HashMap<_, _> =
        kept.lacking.iter().map(|(pod, lacking)| (pod, placement::wanted(verdicts, lacking))).collect();
    let telling_all = steps::Telling::of(&whole);
    let telling: HashMap<_, _> = parts.iter().map(|(pod, part)| (pod.as_str(), steps::Telling::of(part))).collect();
    let step = |pod: &PodSeen| match kept.out.get(&pod.name) {
        Some(why) => PodStep { pod: pod.name.clone(), action: PodAction::Refuse(why.clone()) },
        None => steps::pod(pod, base, telling.get(pod.name.as_str()).unwrap_or(&telling_all)),
    };
    observed.pods.iter().map(step).collect()
}

/// Pods are only made for a base whose digest is pinned: they must agree with each other on what they serve.
fn base_digest(observed: &Observed) -> Result<Digest, Reasoned> {
    let name = &observed.pool.spec.base_model_ref.name;
    let Some(base) = &observed.base else {
        return Err(Reasoned::new(Cause::BaseNotFound, format!("there is no BaseModel '{name}' in this namespace")));
    };
    let digest = base.status.as_ref().and_then(|status| status.digest);
    digest.ok_or_else(|| Reasoned::new(Cause::BaseNotReady, format!("the BaseModel '{name}' has no digest yet")))
}

/// What runs goes on; nothing new is told.
fn blocked_plan(observed: &Observed, blocked: Reasoned) -> Plan {
    let (verdicts, kept) = placement::verdicts(observed);
    Plan {
        make_keys: false,
        objects: None,
        steps: BTreeMap::new(),
        pods: waiting(observed, &blocked),
        adapters: adapter_steps(observed, verdicts, &kept),
        blocked: Some(blocked),
    }
}

fn waiting(observed: &Observed, why: &Reasoned) -> Vec<PodStep> {
    let step = |pod: &PodSeen| PodStep { pod: pod.name.clone(), action: PodAction::Wait(why.clone()) };
    observed.pods.iter().map(step).collect()
}

/// The Secret with the keys is there and cannot be used: pods can be neither asked nor told anything.
pub(super) fn keys_lacking(observed: &Observed) -> Option<Reasoned> {
    let (entry, name) = (observed.keys_lack.as_ref()?, names::engine_keys(&observed.pool.name_any()));
    let message = format!(
        "the Secret '{name}' has no entry '{entry}', so engine pods cannot be asked what they hold: put it back, or delete the Secret, and the operator makes a new one"
    );
    Some(Reasoned::new(Cause::CredentialsMissing, message))
}

fn adapter_steps(observed: &Observed, verdicts: Vec<(&LoraAdapter, Verdict)>, kept: &Kept) -> Vec<AdapterStep> {
    // A pod that is kept out is no matter of the adapters: the pool says so.
    let (pool, holders) = (observed.pool.name_any(), Holders::of(observed, |pod| !kept.out.contains_key(pod)));
    let step = |(adapter, verdict): (&LoraAdapter, Verdict)| AdapterStep {
        name: adapter.name_any(),
        uid: adapter.uid().unwrap_or_default(),
        seen: match keys_lacking(observed) {
            Some(why) => seen::before(observed, adapter, why),
            None => seen::seen(&pool, &holders, adapter, &verdict),
        },
        verdict,
    };
    verdicts.into_iter().map(step).collect()
}

impl Plan {
    /// Whether it changes anything in any world.
    pub fn is_idle(&self) -> bool {
        let objects = self.steps.values().all(|step| *step == Step::Keep);
        let pods = self.pods.iter().all(|step| !matches!(step.action, PodAction::Put { .. }));
        objects && pods && !self.make_keys
    }
}

/// The transcript that tests and people read.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(blocked) = &self.blocked {
            writeln!(f, "blocked: {blocked}")?;
        }
        if self.make_keys {
            writeln!(f, "make keys")?;
        }
        for (object, step) in &self.steps {
            match step {
                Step::Keep => writeln!(f, "keep {object}")?,
                Step::Apply { why, .. } => writeln!(f, "apply {object}: {why}")?,
            }
        }
        for AdapterStep { name, verdict, seen, .. } in &self.adapters {
            writeln!(f, "adapter {name}: {verdict}; seen {}{}", seen.reason, sentence(&seen.message))?;
            for placement in &seen.placements {
                let ready = if placement.ready { "ready" } else { "not ready" };
                let error = placement.last_error.as_ref().map(|error| format!(", {}: {}", error.code, error.message));
                writeln!(f, "  {} {} {ready}{}", placement.pod, placement.digest.short(), error.unwrap_or_default())?;
            }
        }
        for PodStep { pod, action } in &self.pods {
            match action {
                PodAction::Keep => writeln!(f, "pod {pod}: keep")?,
                PodAction::Wait(why) => writeln!(f, "pod {pod}: wait, {why}")?,
                PodAction::Refuse(why) => writeln!(f, "pod {pod}: refuse, {why}")?,
                PodAction::Put { placement, why } => {
                    writeln!(
                        f,
                        "pod {pod}: put generation {} for boot {}: {why}",
                        placement.generation, placement.boot_id
                    )?;
                    for adapter in &placement.adapters {
                        let base = adapter.base_digest.map(|base| format!(", made for {}", base.short()));
                        let (digest, base) = (adapter.digest.short(), base.unwrap_or_default());
                        writeln!(f, "  {}@{digest} from {}{base}", adapter.name, adapter.uri)?;
                    }
                    for (alias, digest) in &placement.aliases {
                        writeln!(f, "  {alias} -> {}", digest.short())?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn sentence(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}
