//! What holds on a real control plane, one behaviour per file. Files `own_*` look into a node or start clusters of their own;
//! all others run in any cluster.

mod apply_to_answer;
mod one_batch;
mod long_prompt;
mod openai_client;
mod refusals;
mod changed_content;
mod followed_policy;
mod deleted_adapter;
mod engine_restarts;
mod operator_killed;
mod two_operators;
mod scaling;
mod two_namespaces;
mod api_keys;
mod missing_keys;
mod foreign_object;
mod refused_object;
mod refused_status;
mod own_api_server_away;
mod own_crd_rules;
mod own_leaves_nothing;
mod own_ended_from_outside;
mod traces;
mod policy;
