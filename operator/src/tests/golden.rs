//! Golden transcripts: an observed world as YAML in, the plan and the conditions as text out.
//!
//! A case is laid over `world.yaml` of its folder. `UPDATE_GOLDEN=1` writes the transcripts.

use std::path::{Path, PathBuf};

use k8s_openapi::jiff::Timestamp;
use lorafleet_crds::condition::Cause;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::build::Objects;
use crate::recheck::listing;
use crate::settings::Limits;
use crate::{intake, model, pool};

fn now() -> Timestamp {
    Timestamp::from_second(1_900_000_000).unwrap()
}

#[test]
fn pool_plans() {
    check("pool", |mut case: Value| {
        // `unwritten` is what the API server said to the first object that it refused.
        let unwritten = case.as_object_mut().and_then(|case| case.remove("unwritten"));
        let unwritten = unwritten.map(|said| pool::Reasoned::new(Cause::ApplyFailed, said.as_str().unwrap()));
        let written = case.as_object_mut().and_then(|case| case.remove("written"));
        let written = written.map(|written| serde_json::from_value(written).unwrap()).unwrap_or_default();
        let observed: pool::Observed = serde_json::from_value(case).unwrap();
        let plan = pool::plan(&observed);
        let applied = pool::Applied { unwritten, written, ..pool::Applied::default() };
        let (status, pace) = pool::status(&observed, &plan, &applied, now());
        let counts = status.adapters;
        let mut text = plan.to_string();
        text += &format!(
            "pods {} of {}, adapters {} ready, {} failed of {}; {pace:?}\n",
            status.ready_replicas, status.desired_replicas, counts.ready, counts.failed, counts.total
        );
        for condition in &status.conditions {
            text += &format!("{}={} {} {}\n", condition.type_, condition.status, condition.reason, condition.message);
        }
        text
    });
}

#[test]
fn intake_plans() {
    check("intake", |mut observed: intake::Observed| {
        // `present` stands for the fingerprint that the case itself has.
        let gate = intake::gate(&observed.adapter, observed.base.as_ref(), &observed.rivals, &observed.source_caps);
        let order = gate.ok().map(|gate| gate.order);
        let put = |word: &mut Option<String>, present: &dyn Fn(&intake::Order) -> String| {
            if word.as_deref() == Some("present") {
                *word = order.as_ref().map(present);
            }
        };
        if let Some(status) = &mut observed.adapter.status {
            put(&mut status.verified_for, &|order| order.fingerprint.clone());
            put(&mut status.source_listing, &|order| listing(&order.pinned_files));
            for revision in &mut status.revisions {
                put(&mut revision.verified_for, &|order| order.content.clone());
            }
        }
        intake::plan(&observed, &Limits::DEFAULT).to_string()
    });
}

#[test]
fn model_plans() {
    check("model", |observed: model::Observed| model::plan(&observed, &Limits::DEFAULT).to_string());
}

#[test]
fn objects() {
    check("build", |observed: pool::Observed| {
        let plan = pool::plan(&observed);
        let Objects { config, engine_service, engine, gateway_account, gateway_binding, gateway_service, gateway } =
            *plan.objects.unwrap();
        [
            serde_norway::to_string(&config),
            serde_norway::to_string(&engine_service),
            serde_norway::to_string(&engine),
            serde_norway::to_string(&gateway_account),
            serde_norway::to_string(&gateway_binding),
            serde_norway::to_string(&gateway_service),
            serde_norway::to_string(&gateway),
        ]
        .map(Result::unwrap)
        .join("---\n")
    });
}

fn check<T: DeserializeOwned>(folder: &str, transcript: impl Fn(T) -> String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests").join(folder);
    let world = read(&folder.join("world.yaml"));
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.retain(|path| path.extension().is_some_and(|ending| ending == "yaml") && !path.ends_with("world.yaml"));
    cases.sort();
    assert!(!cases.is_empty());
    let mut wrong = Vec::new();
    for case in cases {
        let mut value = world.clone();
        merge(&mut value, read(&case));
        let observed = serde_json::from_value(value).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
        let text = transcript(observed);
        let golden = case.with_extension("txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&golden, &text).unwrap();
        }
        let expected = std::fs::read_to_string(&golden).unwrap_or_default();
        if expected != text {
            wrong.push(format!("{}\n--- expected\n{expected}--- found\n{text}", case.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap();
    serde_norway::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Objects are merged, everything else replaces; null takes away.
pub(super) fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                if value.is_null() {
                    into.remove(&key);
                } else {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (into, from) => *into = from,
    }
}
