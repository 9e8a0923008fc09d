//! What the pool's status says of a plan and of what came of it.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType, find, is_true};
use lorafleet_crds::wire::AdapterState;
use lorafleet_crds::{AdapterCounts, LoraAdapterStatus, ServingPoolStatus, names};

use super::apply::Applied;
use super::observed::{DeploymentSeen, Observed, PodSeen};
use super::plan::{AdapterStep, Plan, PodAction, Reasoned, Verdict, keys_lacking, selector_fault};
use crate::build::engine_selector;
use crate::conditions::{Stated, conditions};

/// How soon to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Something is under way.
    Busy,
    /// Something fails, and is tried again.
    Failing,
    /// Nothing is to be done.
    Settled,
}

pub fn status(observed: &Observed, plan: &Plan, applied: &Applied, now: Timestamp) -> (ServingPoolStatus, Pace) {
    let (stated, pace) = stated(observed, plan, applied);
    let old = observed.pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let rests = pace == Pace::Busy && lasts(old, &stated, now) && !engines_alone_tell(observed, plan);
    let pace = if rests { Pace::Failing } else { pace };
    let generation = observed.pool.metadata.generation;
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let status = ServingPoolStatus {
        observed_generation: generation,
        replicas: count(observed.pods.iter().filter(|pod| !pod.deleting).count()),
        ready_replicas: count(serving(observed, plan).count()),
        desired_replicas: observed.pool.spec.replicas,
        selector: Some(engine_selector(&observed.pool)),
        adapters: counts(observed, plan),
        conditions: conditions(old, &stated, generation, now),
    };
    (status, pace)
}

/// How long pods may take to start before they are looked at less often. What Kubernetes sees of them is watched anyway.
const SOON: SignedDuration = SignedDuration::from_secs(60);

/// Whether the pool's pods have not got ready for longer than that.
fn lasts(old: &[Condition], stated: &[Stated], now: Timestamp) -> bool {
    let start = [Cause::PodsNotReady, Cause::NoReadyPod, Cause::GatewayNotReady].map(|cause| cause.to_string());
    let waits = |stated: &Stated| stated.type_ == ConditionType::Ready && start.contains(&stated.reason);
    let since = find(old, ConditionType::Ready).filter(|ready| ready.status == "False");
    stated.iter().any(waits) && since.is_some_and(|ready| now.duration_since(ready.last_transition_time.0) > SOON)
}

/// Whether something is under way that only asking shows: an engine starts, or loads what it was told to hold.
fn engines_alone_tell(observed: &Observed, plan: &Plan) -> bool {
    let loads = |pod: &PodSeen| {
        let adapters = pod.report().map(|report| report.adapters.as_slice()).unwrap_or_default();
        adapters.iter().any(|adapter| adapter.state == AdapterState::Loading)
    };
    let told = plan.pods.iter().any(|step| matches!(step.action, PodAction::Put { .. }));
    told || observed.pods.iter().any(|pod| !pod.deleting && (pod.starting || loads(pod)))
}

/// Pods that take traffic and serve the right base, as far as they can be asked.
fn serving<'a>(observed: &'a Observed, plan: &'a Plan) -> impl Iterator<Item = &'a PodSeen> {
    let refused = |pod: &PodSeen| {
        plan.pods.iter().any(|step| step.pod == pod.name && matches!(step.action, PodAction::Refuse(_)))
    };
    observed.pods.iter().filter(move |pod| {
        let answers = pod.report().is_some() || observed.keys_lack.is_some();
        pod.takes_traffic() && answers && !refused(pod)
    })
}

fn counts(observed: &Observed, plan: &Plan) -> AdapterCounts {
    let statuses: HashMap<_, _> = observed
        .adapters
        .iter()
        .filter_map(|adapter| Some((adapter.metadata.uid.as_deref()?, adapter.status.as_ref()?)))
        .collect();
    let count = |wanted: &dyn Fn(&AdapterStep, &LoraAdapterStatus) -> bool| {
        let is = |step: &&AdapterStep| statuses.get(step.uid.as_str()).is_some_and(|status| wanted(step, status));
        u32::try_from(plan.adapters.iter().filter(is).count()).unwrap_or(u32::MAX)
    };
    let failing = [Cause::LoadFailed, Cause::CapacityExceeded].map(|cause| cause.to_string());
    AdapterCounts {
        total: u32::try_from(plan.adapters.len()).unwrap_or(u32::MAX),
        ready: count(&|step, status| status.digest.is_some_and(|digest| step.seen.held.contains(&digest))),
        failed: count(&|step, status| {
            // Of those that intake refused, the pool never heard of a version.
            let refused = step.verdict == Verdict::NotVerified && is_true(&status.conditions, ConditionType::Stalled);
            refused || failing.contains(&step.seen.reason)
        }),
    }
}

fn stated(observed: &Observed, plan: &Plan, applied: &Applied) -> (Vec<Stated>, Pace) {
    use ConditionStatus::{False, True};
    let placed = placed(plan, applied, keys_lacking(observed).as_ref());
    let available = available(observed, plan);
    let ready = ready(observed, plan, applied, available.as_ref().err());
    let said = |type_, result: &Result<String, Reasoned>| match result {
        Ok(message) => Stated::new(type_, True, Cause::Succeeded, message.clone()),
        Err(why) => Stated::new(type_, False, why.cause, why.message.clone()),
    };
    let pace = match (&ready, &placed) {
        (Ok(_), Ok(_)) => Pace::Settled,
        (Err(why), _) | (Ok(_), Err(why)) if is_failure(why.cause) => Pace::Failing,
        _ => Pace::Busy,
    };
    // A pool never stalls by itself: whatever is in the way may go away without a change of its spec.
    let reconciling = match &ready {
        Ok(_) => Stated::new(ConditionType::Reconciling, False, Cause::Succeeded, ""),
        Err(why) => Stated::new(ConditionType::Reconciling, True, why.cause, why.message.clone()),
    };
    let stated = vec![
        said(ConditionType::Placed, &placed),
        said(ConditionType::Available, &available),
        said(ConditionType::Ready, &ready),
        reconciling,
        Stated::new(ConditionType::Stalled, False, Cause::Succeeded, ""),
    ];
    (stated, pace)
}

fn is_failure(cause: Cause) -> bool {
    !matches!(
        cause,
        Cause::Loading
            | Cause::Waiting
            | Cause::InProgress
            | Cause::PodsNotReady
            | Cause::NoReadyPod
            | Cause::GatewayNotReady
    )
}

/// Every adapter has its place and every pod knows of it.
fn placed(plan: &Plan, applied: &Applied, keys: Option<&Reasoned>) -> Result<String, Reasoned> {
    if let Some(blocked) = &plan.blocked {
        return Err(blocked.clone());
    }
    if let Some(why) = keys {
        return Err(why.clone());
    }
    if let Some((pod, why)) = applied.untold.first() {
        return Err(Reasoned::new(why.cause, format!("pod {pod} did not take its placement: {}", why.message)));
    }
    for step in &plan.pods {
        match &step.action {
            PodAction::Refuse(why) => {
                return Err(Reasoned::new(why.cause, format!("pod {}: {}", step.pod, why.message)));
            }
            PodAction::Put { .. } => {
                return Err(Reasoned::new(Cause::Loading, format!("pod {} was told what to hold", step.pod)));
            }
            PodAction::Keep | PodAction::Wait(_) => {}
        }
    }
    for adapter in &plan.adapters {
        if let Verdict::Placed { refused: Some(why), .. } = &adapter.verdict {
            return Err(Reasoned::new(why.cause, format!("adapter {}: {}", adapter.name, why.message)));
        }
    }
    let failed = plan.adapters.iter().find(|adapter| adapter.seen.reason == Cause::LoadFailed.to_string());
    if let Some(adapter) = failed {
        return Err(Reasoned::new(Cause::LoadFailed, format!("adapter {}: {}", adapter.name, adapter.seen.message)));
    }
    let loading = plan.adapters.iter().find(|adapter| adapter.seen.reason == Cause::Loading.to_string());
    if let Some(adapter) = loading {
        return Err(Reasoned::new(Cause::Loading, format!("adapter {}: {}", adapter.name, adapter.seen.message)));
    }
    Ok(String::new())
}

/// Somebody answers: an engine pod and a gateway pod.
fn available(observed: &Observed, plan: &Plan) -> Result<String, Reasoned> {
    if observed.pool.spec.replicas == 0 {
        return Err(Reasoned::new(Cause::NoReadyPod, "spec.replicas is 0"));
    }
    if serving(observed, plan).next().is_none() {
        if let Some(blocked) = &plan.blocked {
            return Err(blocked.clone());
        }
        return Err(pods_not_ready(observed, plan, Cause::NoReadyPod, "no engine pod takes traffic yet".to_owned()));
    }
    if observed.pool.spec.gateway.replicas > 0 && observed.gateway.ready == 0 {
        return Err(gateways_not_ready(observed, "no gateway pod takes traffic yet".to_owned()));
    }
    Ok(String::new())
}

/// All pods are of the present template and take traffic. Adapters speak for themselves.
fn ready(
    observed: &Observed,
    plan: &Plan,
    applied: &Applied,
    unavailable: Option<&Reasoned>,
) -> Result<String, Reasoned> {
    // What could not be written explains the pods that are missing, and not the other way round. A pool that shall have no pods
    // is ready without any.
    let keys = keys_lacking(observed).or_else(|| api_keys(observed).err());
    let unavailable = unavailable.filter(|_| observed.pool.spec.replicas > 0);
    if let Some(why) = plan.blocked.as_ref().or(applied.unwritten.as_ref()).or(keys.as_ref()).or(unavailable) {
        return Err(why.clone());
    }
    let refused = plan.pods.iter().find_map(|step| match &step.action {
        PodAction::Refuse(why) => Some(Reasoned::new(why.cause, format!("pod {}: {}", step.pod, why.message))),
        _ => None,
    });
    if let Some(why) = refused {
        return Err(why);
    }
    if let Some(fault) = selector_fault(&observed.pool.spec.adapter_selector) {
        return Err(Reasoned::new(Cause::SelectorInvalid, fault));
    }
    let desired = observed.pool.spec.replicas;
    let serving = u32::try_from(serving(observed, plan).count()).unwrap_or(u32::MAX);
    let behind = lacks(observed, applied, &names::engine(&observed.pool.name_any()), &observed.engine, desired);
    if serving < desired || behind.is_some() {
        let also = behind.map(|behind| format!(", {behind}")).unwrap_or_default();
        let message = format!("{serving} of {desired} engine pods take traffic{also}");
        return Err(pods_not_ready(observed, plan, Cause::PodsNotReady, message));
    }
    let (gateways, gateway) = (observed.pool.spec.gateway.replicas, &observed.gateway);
    let behind = lacks(observed, applied, &names::gateway(&observed.pool.name_any()), gateway, gateways);
    if gateway.ready < gateways || behind.is_some() {
        let also = behind.map(|behind| format!(", {behind}")).unwrap_or_default();
        return Err(gateways_not_ready(
            observed,
            format!("{} of {gateways} gateway pods take traffic{also}", gateway.ready),
        ));
    }
    let left = observed.pods.iter().filter(|pod| !pod.deleting).count();
    let message = match (desired, left, serving) {
        (0, 0, _) => "scaled to 0".to_owned(),
        (0, left, _) => {
            return Err(Reasoned::new(Cause::PodsNotReady, format!("spec.replicas is 0, {left} engine pods are left")));
        }
        (_, _, 1) => "1 engine pod takes traffic".to_owned(),
        (..) => format!("{serving} engine pods take traffic"),
    };
    Ok(message + &of_base(observed).unwrap_or_default())
}

/// What is wrong with the base, though pods go on with what they have of it.
fn of_base(observed: &Observed) -> Option<String> {
    let conditions = &observed.base.as_ref()?.status.as_ref()?.conditions;
    let ready = find(conditions, ConditionType::Ready).filter(|ready| ready.status == "False")?;
    let name = &observed.pool.spec.base_model_ref.name;
    Some(format!("; the BaseModel '{name}' is not ready: {}: {}", ready.reason, ready.message))
}

/// What a Deployment lacks of what it shall be. What was written to it and is not seen yet counts.
fn lacks(observed: &Observed, applied: &Applied, name: &str, seen: &DeploymentSeen, desired: u32) -> Option<String> {
    let key = format!("Deployment/{name}");
    let before = || observed.children.get(&key)?.applied.as_ref();
    let written = applied.written.get(&key).or_else(before).and_then(|written| written.generation);
    if written.is_some_and(|generation| seen.generation < generation) {
        return Some("a change of their template has just been written".to_owned());
    }
    seen.behind(desired)
}

/// Gateways read the clients' keys from a Secret that must be there when they start.
fn api_keys(observed: &Observed) -> Result<(), Reasoned> {
    match &observed.pool.spec.gateway.api_keys_secret_ref {
        Some(secret) if observed.api_keys_missing => Err(Reasoned::new(
            Cause::CredentialsMissing,
            format!(
                "there is no Secret '{}', which gateway.apiKeysSecretRef names: gateways that run go on with the keys that they have, or without any if they had none, and new ones do not start",
                secret.name
            ),
        )),
        _ => Ok(()),
    }
}

/// The counts, and why there are no more pods, or the first pod that says why it does not run.
fn pods_not_ready(observed: &Observed, plan: &Plan, cause: Cause, message: String) -> Reasoned {
    if let Some(trouble) = &observed.engine.trouble {
        return Reasoned::new(cause, format!("{message}; {trouble}"));
    }
    let waits = plan.pods.iter().filter_map(|step| match &step.action {
        PodAction::Wait(why) if why.cause != Cause::Waiting => Some((&step.pod, why)),
        _ => None,
    });
    let not_ready = |pod: &str| observed.pods.iter().any(|seen| seen.name == pod && !seen.takes_traffic());
    match waits.into_iter().find(|(pod, _)| not_ready(pod)) {
        Some((pod, why)) => Reasoned::new(cause, format!("{message}; pod {pod}: {}", why.message)),
        None => Reasoned::new(cause, message),
    }
}

fn gateways_not_ready(observed: &Observed, message: String) -> Reasoned {
    let trouble = observed.gateway.trouble.as_ref().map(|trouble| format!("; {trouble}")).unwrap_or_default();
    Reasoned::new(Cause::GatewayNotReady, message + &trouble)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::plan::plan;
    use super::*;

    const NOW_S: i64 = 1_900_000_000;

    /// A pool whose first pod serves and reports this, and whose `Ready` has been false for so long.
    fn observed(revision: &str, adapters: Value, other: Value, for_s: i64) -> Observed {
        let mut world: Value = serde_norway::from_str(include_str!("../tests/pool/world.yaml")).unwrap();
        let report = json!({
            "bootId": "boot", "generation": 1, "revision": revision, "ready": true, "draining": false, "role": "shared",
            "base": { "name": "smollm2", "digest": world["base"]["status"]["digest"], "maxModelTokens": 1 },
            "budgets": lorafleet_crds::wire::Budgets::default(), "load": lorafleet_crds::wire::Load::default(),
            "adapters": adapters, "aliases": {},
        });
        let served = json!({ "name": "p0", "ready": true, "address": "10.0.0.1", "answer": { "report": report } });
        let since = Timestamp::from_second(NOW_S - for_s).unwrap().to_string();
        let ready = json!({
            "type": "Ready", "status": "False", "reason": "PodsNotReady", "message": "", "lastTransitionTime": since,
        });
        world["pool"]["status"] = json!({ "conditions": [ready] });
        world["keysExist"] = json!(true);
        world["pods"] = json!([served, other]);
        world["gateway"] = json!({ "observed": true, "pods": 1, "updated": 1, "ready": 1 });
        serde_json::from_value(world).unwrap()
    }

    fn pace(observed: &Observed) -> Pace {
        status(observed, &plan(observed), &Applied::default(), Timestamp::from_second(NOW_S).unwrap()).1
    }

    #[test]
    fn what_kubernetes_tells_of_is_not_asked_for_twice_a_second_for_ever() {
        let told = observed("other", json!([]), json!({ "name": "p1" }), 0);
        let PodAction::Put { placement, .. } = &plan(&told).pods[0].action else { panic!("it is told nothing") };
        let trouble = json!({ "reason": "ErrImagePull" });
        let loading = json!([{
            "name": "a", "digest": told.base.as_ref().unwrap().status.as_ref().unwrap().digest, "state": "Loading",
            "tier": "Source", "pinned": true, "rank": 0, "bytes": 0, "leases": 0, "waiting": 0, "loads": 0, "evictions": 0,
        }]);
        let (knows, none) = (placement.revision.as_str(), json!([]));
        for (revision, adapters, other, for_s, expected) in [
            (knows, &none, json!({ "trouble": trouble }), 60, Pace::Busy),
            (knows, &none, json!({ "trouble": trouble }), 61, Pace::Failing),
            (knows, &none, json!({}), 61, Pace::Failing),
            // Whether an engine has started, has heard and has loaded is told by itself alone.
            (knows, &none, json!({ "starting": true }), 86_400, Pace::Busy),
            (knows, &none, json!({ "starting": true, "trouble": trouble }), 86_400, Pace::Busy),
            (knows, &none, json!({ "starting": true, "deleting": true }), 86_400, Pace::Failing),
            ("other", &none, json!({ "trouble": trouble }), 86_400, Pace::Busy),
            (knows, &loading, json!({ "trouble": trouble }), 86_400, Pace::Busy),
        ] {
            let mut other = other;
            other["name"] = json!("p1");
            let case = format!("{revision} {adapters} {other} {for_s}");
            assert_eq!(pace(&observed(revision, adapters.clone(), other, for_s)), expected, "{case}");
        }
    }
}
