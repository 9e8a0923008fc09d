//! The pool controller: engine pods, gateway, and what each pod shall hold.
//!
//! Start here: one pass is observe, plan, apply, status.

mod apply;
mod engine;
mod held_up;
mod report;
mod observe;
mod observed;
mod plan;
mod rest;
mod status;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};
use lorafleet_crds::ServingPool;
use lorafleet_crds::condition::ConditionStatus;

use crate::conditions::deleting;
use crate::context::{ApiError, Context};

pub use apply::{Applied, AppliedMemory};
pub use engine::{EngineError, Engines};
pub use observed::{Answer, Applied as AppliedOnce, ChildSeen, DeploymentSeen, Observed, PodSeen, Trouble};
pub use plan::{Plan, PodAction, Reasoned, Revision, Stage, Step, Verdict, plan, selects};
pub use report::Held;
pub use rest::Rests;
pub use status::{Pace, status};

/// Owner of the fields that this controller sets.
pub const MANAGER: &str = "lorafleet-pool";

/// One pass over one pool, unless it rests from the one before.
pub async fn reconcile(pool: Arc<ServingPool>, context: Arc<Context>) -> Result<Action, ApiError> {
    let (uid, started) = (pool.uid().unwrap_or_default(), Instant::now());
    if let Some(left) = context.rests.left(&uid, started) {
        return Ok(Action::requeue(left));
    }
    let result = pass(&pool, &context).await;
    context.rests.begin(&uid, started, Instant::now());
    context.measured("pool", started, &result);
    result
}

async fn pass(pool: &ServingPool, context: &Context) -> Result<Action, ApiError> {
    let old = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if let Some(conditions) = deleting(pool.meta(), old, ConditionStatus::Unknown, Timestamp::now()) {
        let mut status = pool.status.clone().unwrap_or_default();
        status.conditions = conditions;
        context.write_status(pool, MANAGER, &status).await?;
        return Ok(Action::await_change());
    }
    let seen = observe::observe(pool, context).await?;
    let plan = plan(&seen.observed);
    let applied = apply::apply(pool, &seen, &plan, context).await;
    show(pool, &plan, context);
    let (status, pace) = status(&seen.observed, &plan, &applied, Timestamp::now());
    context.write_status(pool, MANAGER, &status).await?;
    Ok(Action::requeue(match pace {
        Pace::Busy => context.limits.pass_busy,
        Pace::Failing => context.limits.pass_failing,
        Pace::Settled => Duration::from_secs(context.settings.heartbeat_s.into()),
    }))
}

/// Hands what was seen of each adapter to the intake controller, which prints it.
fn show(pool: &ServingPool, plan: &Plan, context: &Context) {
    let seen: HashMap<_, _> = plan.adapters.iter().map(|step| (step.uid.clone(), step.seen.clone())).collect();
    let changed = context.sightings.put(&pool.uid().unwrap_or_default(), seen);
    let adapters = context.stores.adapters_of(pool.metadata.namespace.as_deref(), &pool.spec.base_model_ref.name);
    for adapter in adapters.iter().filter(|adapter| changed(&adapter.uid().unwrap_or_default())) {
        context.bells.ring_intake(ObjectRef::from_obj(adapter.as_ref()));
    }
}
