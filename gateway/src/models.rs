//! The list of models, as OpenAI's clients read it. Pure.

use lorafleet_artifact::Digest;
use serde_json::{Value, json};

use crate::resolve::{Permitted, Target};
use crate::view::FleetView;

/// All models that the client may use and that have a version: the base, then the adapters by name.
pub fn list(view: &FleetView, permitted: &Permitted) -> Value {
    let base = (!view.base.is_empty() && permitted.allows(&view.base))
        .then(|| row(view, &view.base, None, 0, view.base_created_unix_s));
    let adapters = view.adapters.iter().filter(|(name, _)| permitted.allows(name) && **name != view.base);
    let adapters = adapters.filter_map(|(name, adapter)| {
        Some(row(view, name, Some(adapter.current?), adapter.rank, adapter.created_unix_s))
    });
    json!({ "object": "list", "data": base.into_iter().chain(adapters).collect::<Vec<_>>() })
}

/// One model, also at another version than the current one.
pub fn show(view: &FleetView, target: &Target) -> Value {
    match target {
        Target::Base { name } => row(view, name, None, 0, view.base_created_unix_s),
        Target::Adapter { name, digest } => {
            let adapter = view.adapters.get(name);
            let rank = adapter.filter(|adapter| adapter.current == Some(*digest)).map_or(0, |adapter| adapter.rank);
            row(view, name, Some(*digest), rank, adapter.map_or(0, |adapter| adapter.created_unix_s))
        }
    }
}

/// `digest`: of an adapter; `None` for the base.
fn row(view: &FleetView, name: &str, digest: Option<Digest>, rank: u32, created_unix_s: i64) -> Value {
    // The pods say it before its object does, and while the pool moves to another base some of them say the old one.
    let heard_digest = || view.reports().map(|(_, report)| report.base_digest).next();
    let mut row = json!({
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "lorafleet",
        "parent": digest.map(|_| view.base.as_str()),
        "digest": digest.or(view.base_digest).or_else(heard_digest),
    });
    if digest.is_some() && rank > 0 {
        row["rank"] = json!(rank);
    }
    row
}
