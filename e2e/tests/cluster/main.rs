//! What holds on a real control plane, one behaviour per file. Files `own_*` look into a node or start clusters of their own;
//! all others run in any cluster.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Once;

use lorafleet_e2e::guard;
use lorafleet_e2e::world::World;

mod apply_to_answer;
mod one_batch;
mod long_prompt;
mod openai_client;
mod refusals;
mod changed_content;
mod followed_policy;
mod deleted_adapter;
mod failed_load;
mod pod_gone;
mod pool_deleted;
mod refused_pool;
mod rights;
mod engine_restarts;
mod operator_killed;
mod two_operators;
mod scaling;
mod two_namespaces;
mod api_keys;
mod missing_keys;
mod rotated_keys;
mod foreign_object;
mod refused_change;
mod refused_status;
mod own_api_server_away;
mod own_crd_rules;
mod own_leaves_nothing;
mod own_ended_from_outside;
mod traces;
mod policy;

/// The cluster that most tests share.
fn world() -> &'static World {
    guarded();
    World::shared().unwrap()
}

/// From now on all that this process starts ends with it, clusters too.
fn guarded() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| guard::start(Path::new(env!("CARGO_BIN_EXE_xtask")), guard::Run::Tests).unwrap());
}
