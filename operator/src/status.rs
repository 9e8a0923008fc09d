//! Statuses that the API server refuses: what is written instead, so that no status stays as it was for ever.
//!
//! What is refused is written once more with the API server's words and with less, as much less as it takes; then not again
//! before the status changes or some time has gone by. Pure, but for the memory of what was refused.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::Status as Answer;
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType};
use serde_json::Value;

use crate::conditions::Stated;
use crate::hash::short_hash;

/// How long a refusal stands. The definition of the kind may be another one after that.
pub const REFUSED_FOR: Duration = Duration::from_secs(60);

/// Whether the API server refuses what was sent, however often it is sent: its schema, its rules or its size.
pub fn is_refusal(answer: &Answer) -> bool {
    matches!(answer.code, 400 | 413 | 422)
}

/// What a status says whose whole was refused.
pub fn refused(answer: &Answer) -> [Stated; 3] {
    let message = format!("the API server refused the status: {}", answer.message);
    let said = |type_, status| Stated::new(type_, status, Cause::ApplyFailed, message.clone());
    [
        said(ConditionType::Ready, ConditionStatus::False),
        said(ConditionType::Reconciling, ConditionStatus::False),
        said(ConditionType::Stalled, ConditionStatus::True),
    ]
}

/// Fields that people read and nobody acts on.
const FOR_PEOPLE: [&str; 10] = [
    "adapterBytesPerRank",
    "adapters",
    "alpha",
    "kvBytesPerToken",
    "pools",
    "rank",
    "ranks",
    "served",
    "sizeBytes",
    "targetModules",
];

/// The status with these conditions and with less, to be written one after the other until one is taken: without the fields
/// that the answer names; without those that are for people alone, since pods and gateways act on the others; with nothing.
pub fn reductions(status: &Value, answer: &Answer, conditions: &[Condition]) -> [Value; 3] {
    let causes = answer.details.iter().flat_map(|details| &details.causes);
    let named = |field: &str| {
        let mut path = field.strip_prefix("status.")?.split(['.', '[']);
        path.next().map(str::to_owned)
    };
    let named: Vec<String> = causes.filter_map(|cause| named(&cause.field)).collect();
    let without = |left_out: &dyn Fn(&str) -> bool| {
        let mut kept = status.as_object().cloned().unwrap_or_default();
        kept.retain(|field, _| !left_out(field));
        kept.insert("conditions".to_owned(), serde_json::json!(conditions));
        Value::Object(kept)
    };
    let is_named = |field: &str| named.iter().any(|name| name == field);
    [
        without(&is_named),
        without(&|field| is_named(field) || FOR_PEOPLE.contains(&field)),
        without(&|field| field != "observedGeneration"),
    ]
}

/// Statuses that were refused a moment ago, by uid of the object.
#[derive(Default)]
pub struct Refusals(Mutex<HashMap<String, (String, Instant)>>);

impl Refusals {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, (String, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this very status was refused less than [`REFUSED_FOR`] ago.
    pub fn stands(&self, uid: &str, status: &Value, now: Instant) -> bool {
        let known = self.lock().get(uid).cloned();
        known.is_some_and(|(name, at)| now.duration_since(at) < REFUSED_FOR && name == timeless(status))
    }

    pub fn note(&self, uid: &str, status: &Value, now: Instant) {
        self.lock().insert(uid.to_owned(), (timeless(status), now));
    }

    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Forgets what no longer stands.
    pub fn tidy(&self, now: Instant) {
        self.lock().retain(|_, (_, at)| now.duration_since(*at) < REFUSED_FOR);
    }
}

/// Names a status whenever it is said: times of transitions depend on what is written already.
fn timeless(status: &Value) -> String {
    let mut status = status.clone();
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        condition.as_object_mut().map(|condition| condition.remove("lastTransitionTime"));
    }
    short_hash(&status)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::conditions::conditions;

    fn answer(fields: &[&str]) -> Answer {
        let cause = |field| json!({ "reason": "FieldValueTooLong", "message": "Too long", "field": field });
        let causes: Vec<Value> = fields.iter().map(cause).collect();
        serde_json::from_value(json!({
            "status": "Failure", "code": 422, "reason": "Invalid",
            "message": "LoraAdapter \"a\" is invalid: status.source.resolveAt: Too long",
            "details": { "causes": causes },
        }))
        .unwrap()
    }

    #[test]
    fn what_is_refused_is_left_out_and_said() {
        let status = json!({
            "observedGeneration": 3, "source": { "resolveAt": "x" }, "currentRevision": "sha256:a", "sizeBytes": 7,
            "pools": [{ "name": "chat" }],
            "conditions": [{ "type": "Ready", "status": "True" }, { "type": "Placed", "status": "True" }],
        });
        let now = Timestamp::from_second(10).unwrap();
        let cases: [(&[&str], [&str; 3]); 3] = [
            (
                &["status.source.resolveAt"],
                [
                    "conditions currentRevision observedGeneration pools sizeBytes",
                    "conditions currentRevision observedGeneration",
                    "conditions observedGeneration",
                ],
            ),
            (
                &["status.pools[0].name", "status.sizeBytes"],
                [
                    "conditions currentRevision observedGeneration source",
                    "conditions currentRevision observedGeneration source",
                    "conditions observedGeneration",
                ],
            ),
            // As admission policies and webhooks answer.
            (
                &["<nil>", ""],
                [
                    "conditions currentRevision observedGeneration pools sizeBytes source",
                    "conditions currentRevision observedGeneration source",
                    "conditions observedGeneration",
                ],
            ),
        ];
        for (fields, expected) in cases {
            let answer = answer(fields);
            let said = conditions(&[], &refused(&answer), Some(3), now);
            let written = reductions(&status, &answer, &said);
            let kept = written.each_ref().map(|less| {
                let mut fields: Vec<&str> = less.as_object().unwrap().keys().map(String::as_str).collect();
                fields.sort_unstable();
                fields.join(" ")
            });
            assert_eq!(kept, expected, "{fields:?}");
            for less in written {
                let words = less["conditions"].as_array().unwrap().iter();
                let words: Vec<_> =
                    words.map(|said| format!("{}={} {}", said["type"], said["status"], said["reason"])).collect();
                assert_eq!(
                    words,
                    [
                        r#""Ready"="False" "ApplyFailed""#,
                        r#""Reconciling"="False" "ApplyFailed""#,
                        r#""Stalled"="True" "ApplyFailed""#
                    ]
                );
                let message = less["conditions"][0]["message"].as_str().unwrap();
                assert!(message.ends_with("is invalid: status.source.resolveAt: Too long"), "{message}");
            }
        }
    }

    #[test]
    fn a_refusal_stands_for_a_while_and_for_this_status_alone() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let at = |time: &str, digest: &str| json!({ "digest": digest, "conditions": [{ "type": "Ready", "lastTransitionTime": time }] });
        assert!(!refusals.stands("a", &at("1", "x"), now));
        refusals.note("a", &at("1", "x"), now);
        assert!(refusals.stands("a", &at("2", "x"), now + REFUSED_FOR / 2));
        assert!(!refusals.stands("a", &at("2", "y"), now));
        assert!(!refusals.stands("b", &at("1", "x"), now));
        assert!(!refusals.stands("a", &at("1", "x"), now + REFUSED_FOR));
        refusals.forget("a");
        assert!(!refusals.stands("a", &at("1", "x"), now));
    }
}
