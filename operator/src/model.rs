//! The model controller: resolves a base model and pins what it found.
//!
//! Start here: one pass is observe, plan, apply (start a read), status.

mod plan;
mod read;

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use lorafleet_crds::BaseModel;
use lorafleet_crds::condition::ConditionStatus;

use crate::conditions::{conditions, deleting};
use crate::context::{ApiError, Context};
use crate::status::REFUSED_FOR;

pub use plan::{Facts, Observed, Order, Outcome, Plan, plan};

/// Owner of the fields that this controller sets.
pub const MANAGER: &str = "lorafleet-model";

/// One pass over one base model.
pub async fn reconcile(base: Arc<BaseModel>, context: Arc<Context>) -> Result<Action, ApiError> {
    let started = Instant::now();
    let result = pass(&base, &context).await;
    context.measured("model", started, &result);
    result
}

async fn pass(base: &Arc<BaseModel>, context: &Arc<Context>) -> Result<Action, ApiError> {
    let old = base.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if let Some(conditions) = deleting(base.meta(), old, ConditionStatus::Unknown, Timestamp::now()) {
        let mut status = base.status.clone().unwrap_or_default();
        status.conditions = conditions;
        context.write_status(base.as_ref(), MANAGER, &status).await?;
        return Ok(Action::await_change());
    }
    let observed = observe(base, context);
    let plan = plan(&observed, &context.limits);
    if let Some(order) = plan.read.clone() {
        read::start(base, order, context);
    }
    if let Some(order) = plan.look.clone() {
        read::look(base, order, context);
    }
    let mut status = plan.status;
    status.observed_generation = base.metadata.generation;
    status.conditions = conditions(old, &plan.stated, base.metadata.generation, Timestamp::now());
    if !context.write_status(base.as_ref(), MANAGER, &status).await? {
        return Ok(Action::requeue(REFUSED_FOR));
    }
    Ok(plan.again_in_ms.map_or_else(Action::await_change, |wait_ms| Action::requeue(Duration::from_millis(wait_ms))))
}

fn observe(base: &BaseModel, context: &Context) -> Observed {
    let fingerprint = plan::fingerprint(base);
    let uid = base.uid().unwrap_or_default();
    let judged = base.status.as_ref().and_then(|status| status.source_listing.as_ref());
    let (job, recheck) = (context.model_jobs.state(&uid, &fingerprint), context.model_rechecks.of(&uid, judged));
    Observed { base: base.clone(), job, recheck, source_caps: context.settings.source_caps.clone() }
}
