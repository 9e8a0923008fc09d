//! Conditions are made anew on each pass and keep the time of their last transition.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use lorafleet_crds::condition::{ConditionStatus, ConditionType, find};

/// Longest message of a condition, in characters, as the schema has it.
const MESSAGE_CHARACTERS_MAX: usize = 1024;

/// One condition as a plan states it: what, why in one word, why for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stated {
    pub type_: ConditionType,
    pub status: ConditionStatus,
    pub reason: String,
    pub message: String,
}

impl Stated {
    pub fn new(
        type_: ConditionType,
        status: ConditionStatus,
        reason: impl ToString,
        message: impl Into<String>,
    ) -> Self {
        Self { type_, status, reason: reason.to_string(), message: message.into() }
    }

    pub fn is_true(&self) -> bool {
        self.status == ConditionStatus::True
    }
}

impl std::fmt::Display for Stated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={} {}", self.type_, self.status, self.reason)?;
        if self.message.is_empty() { Ok(()) } else { write!(f, ": {}", self.message) }
    }
}

/// The status's list: in the order stated, with `lastTransitionTime` kept where the status did not change.
pub fn conditions(old: &[Condition], stated: &[Stated], generation: Option<i64>, now: Timestamp) -> Vec<Condition> {
    stated
        .iter()
        .map(|new| {
            let status = new.status.to_string();
            let kept = find(old, new.type_).filter(|old| old.status == status);
            Condition {
                type_: new.type_.to_string(),
                status,
                reason: new.reason.clone(),
                message: new.message.chars().take(MESSAGE_CHARACTERS_MAX).collect(),
                last_transition_time: kept.map_or(Time(whole_seconds(now)), |old| old.last_transition_time.clone()),
                observed_generation: generation,
            }
        })
        .collect()
}

/// The API keeps whole seconds; what we write must equal what we read.
fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// Conditions whose status or reason differs from before: what an Event is worth.
pub fn transitions<'a>(old: &'a [Condition], new: &'a [Condition]) -> impl Iterator<Item = &'a Condition> {
    new.iter().filter(|condition| {
        !old.iter()
            .any(|old| old.type_ == condition.type_ && old.status == condition.status && old.reason == condition.reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_moves_with_the_status_alone() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let said = |status, reason: &str| [Stated::new(ConditionType::Ready, status, reason, "")];
        let first = conditions(&[], &said(ConditionStatus::False, "Loading"), Some(1), at(10));
        let second = conditions(&first, &said(ConditionStatus::False, "LoadFailed"), Some(1), at(20));
        let third = conditions(&second, &said(ConditionStatus::True, "Succeeded"), Some(1), at(30));
        let times: Vec<_> = [&first, &second, &third].map(|list| list[0].last_transition_time.0.as_second()).into();
        assert_eq!(times, [10, 10, 30]);
        assert_eq!(transitions(&first, &second).count(), 1);
        assert_eq!(transitions(&third, &third).count(), 0);
    }
}
