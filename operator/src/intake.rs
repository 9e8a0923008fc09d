//! The intake controller: decides whether an adapter may be served, and says where it is.
//!
//! Start here: one pass is observe, plan, apply (start a read), status. It is the one writer of an adapter's status.

mod gate;
mod judge;
mod observe;
mod observed;
mod plan;
mod rollout;
mod verify;

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::runtime::controller::Action;
use lorafleet_crds::LoraAdapter;
use lorafleet_crds::condition::ConditionStatus;

use crate::conditions::{conditions, deleting};
use crate::context::{ApiError, Context};
use crate::status::REFUSED_FOR;

pub use gate::{Gate, Order, gate};
pub use observed::{Facts, Observed, Outcome, PoolSeen};
pub use plan::{Plan, plan};
#[cfg(test)]
pub(crate) use verify::ended;

/// Owner of the fields that this controller sets.
pub const MANAGER: &str = "lorafleet-intake";

/// One pass over one adapter.
pub async fn reconcile(adapter: Arc<LoraAdapter>, context: Arc<Context>) -> Result<Action, ApiError> {
    let started = Instant::now();
    let result = pass(&adapter, &context).await;
    context.measured("intake", started, &result);
    result
}

async fn pass(adapter: &Arc<LoraAdapter>, context: &Arc<Context>) -> Result<Action, ApiError> {
    let old = adapter.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if let Some(conditions) = deleting(adapter.meta(), old, ConditionStatus::False, Timestamp::now()) {
        // Pods drop it, and gateways do not know it any more.
        let mut status = adapter.status.clone().unwrap_or_default();
        (status.conditions, status.pools, status.served) = (conditions, Vec::new(), None);
        context.write_status(adapter.as_ref(), MANAGER, &status).await?;
        return Ok(Action::await_change());
    }
    let observed = observe::observe(adapter, context);
    let plan = plan(&observed, &context.limits);
    if let Some(order) = plan.read.clone() {
        verify::start(adapter, order, context);
    }
    if let Some(order) = plan.look.clone() {
        verify::look(adapter, order, context);
    }
    if let Some(mut status) = plan.status {
        status.observed_generation = adapter.metadata.generation;
        status.conditions = conditions(old, &plan.stated, adapter.metadata.generation, Timestamp::now());
        if !context.write_status(adapter.as_ref(), MANAGER, &status).await? {
            return Ok(Action::requeue(REFUSED_FOR));
        }
    }
    Ok(plan.again_in_ms.map_or_else(Action::await_change, |wait_ms| Action::requeue(Duration::from_millis(wait_ms))))
}
