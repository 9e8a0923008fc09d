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

use crate::conditions::conditions;
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
    if adapter.meta().deletion_timestamp.is_some() {
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
        let old = adapter.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        status.observed_generation = adapter.metadata.generation;
        status.conditions = conditions(old, &plan.stated, adapter.metadata.generation, Timestamp::now());
        if adapter.status.as_ref() != Some(&status) {
            if !context.write_status(adapter.as_ref(), MANAGER, old, &status).await? {
                return Ok(Action::requeue(REFUSED_FOR));
            }
            context.tell(adapter.as_ref(), old, &status.conditions).await;
        }
    }
    Ok(plan.again_in_ms.map_or_else(Action::await_change, |wait_ms| Action::requeue(Duration::from_millis(wait_ms))))
}
