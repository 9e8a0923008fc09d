//! What of a status is the operator's own: all of it, but for conditions of types that it does not know.
//!
//! Server-side apply takes away what its own manager leaves out, and nothing that somebody else has put there. So what stands is
//! compared with what shall stand, and what is too much is taken away by a merge patch. Pure.

use lorafleet_crds::condition::ConditionType;
use serde::Serialize;
use serde_json::{Map, Value};

/// Whether a condition is of a type that the operator states.
pub fn is_own(type_: &str) -> bool {
    ConditionType::ALL.iter().any(|own| own.to_string() == type_)
}

/// Whether the status that stands says what it shall and no more. Conditions of others do not count.
pub fn says<S: Serialize + PartialEq>(standing: Option<&S>, wanted: &S) -> bool {
    standing == Some(wanted)
        || match (serde_json::to_value(standing), serde_json::to_value(wanted)) {
            (Ok(standing), Ok(wanted)) => difference(&standing, &wanted).is_none(),
            // It is written, and that says why it has no JSON.
            _ => false,
        }
}

/// The merge patch that makes the status that stands the one that shall; none if it is. Conditions of others stay in it.
pub fn difference(standing: &Value, wanted: &Value) -> Option<Value> {
    let ((there, stated), (fields, wanted)) = (parts(standing), parts(wanted));
    let mut patch = merge_patch(&there, &fields);
    let (own, others): (Vec<&Value>, Vec<&Value>) =
        stated.iter().partition(|condition| is_own(condition["type"].as_str().unwrap_or_default()));
    // Of a list that is a map by type, the order says nothing.
    if own.len() != wanted.len() || !own.iter().all(|condition| wanted.contains(condition)) {
        let all = wanted.iter().chain(others).cloned().collect();
        patch.insert("conditions".to_owned(), Value::Array(all));
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// The fields, and the conditions.
fn parts(status: &Value) -> (Map<String, Value>, Vec<Value>) {
    let mut fields = status.as_object().cloned().unwrap_or_default();
    let conditions = fields.remove("conditions").and_then(|conditions| conditions.as_array().cloned());
    (fields, conditions.unwrap_or_default())
}

/// RFC 7386: null takes away, objects are merged, everything else replaces.
fn merge_patch(standing: &Map<String, Value>, wanted: &Map<String, Value>) -> Map<String, Value> {
    let gone = standing.keys().filter(|field| !wanted.contains_key(*field)).map(|field| (field.clone(), Value::Null));
    let other = wanted.iter().filter_map(|(field, wanted)| match (standing.get(field), wanted) {
        (Some(standing), wanted) if standing == wanted => None,
        (Some(Value::Object(standing)), Value::Object(wanted)) => {
            Some((field.clone(), Value::Object(merge_patch(standing, wanted))))
        }
        (_, wanted) => Some((field.clone(), wanted.clone())),
    });
    gone.chain(other).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_too_much_is_taken_away_and_conditions_of_others_are_not() {
        let wanted = json!({
            "rank": 8, "ranks": { "q_proj": 8 }, "pools": [{ "name": "chat" }],
            "conditions": [{ "type": "Ready", "status": "True" }, { "type": "Stalled", "status": "False" }],
        });
        let with = |field: &str, value: Value| {
            let mut standing = wanted.clone();
            standing[field] = value;
            standing
        };
        let [ready, stalled] = ["Ready", "Stalled"].map(|type_| {
            wanted["conditions"].as_array().unwrap().iter().find(|condition| condition["type"] == type_).unwrap()
        });
        let foreign = json!({ "type": "BackedUp", "status": "True" });
        for (standing, expected) in [
            (wanted.clone(), None),
            (with("conditions", json!([foreign, stalled, ready])), None),
            (with("candidateRevision", json!("sha256:e")), Some(json!({ "candidateRevision": null }))),
            (with("retiring", json!({ "uri": "x" })), Some(json!({ "retiring": null }))),
            (
                with("pools", json!([{ "name": "chat" }, { "name": "ghost" }])),
                Some(json!({ "pools": [{ "name": "chat" }] })),
            ),
            (with("ranks", json!({ "q_proj": 8, "lies": 1 })), Some(json!({ "ranks": { "lies": null } }))),
            (with("rank", json!(1)), Some(json!({ "rank": 8 }))),
            // One of a type that the operator states on other kinds, or has stated.
            (
                with("conditions", json!([ready, foreign, stalled, { "type": "Placed", "status": "True" }])),
                Some(json!({ "conditions": [ready, stalled, foreign] })),
            ),
            (
                with("conditions", json!([{ "type": "Ready", "status": "False" }, stalled])),
                Some(json!({ "conditions": [ready, stalled] })),
            ),
            (Value::Null, Some(wanted.clone())),
        ] {
            assert_eq!(difference(&standing, &wanted), expected, "{standing}");
        }
    }
}
