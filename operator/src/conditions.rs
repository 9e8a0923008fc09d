//! Conditions are made anew on each pass and keep the time of their last transition.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use lorafleet_crds::condition::{Cause, ConditionStatus, ConditionType, find};
use lorafleet_crds::{BaseModelStatus, LoraAdapterStatus, ServingPoolStatus};

use crate::owned::is_own;

/// Longest message of a condition, in characters, as the schema has it.
const MESSAGE_CHARACTERS_MAX: usize = 1024;

/// A status that has conditions.
pub trait Conditioned {
    fn conditions(&self) -> &[Condition];
}

impl Conditioned for BaseModelStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

impl Conditioned for LoraAdapterStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

impl Conditioned for ServingPoolStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

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

/// What is said of an object that is being deleted and that finalizers hold: nobody looks after it any more. What was said of its
/// content stands; of whether it is placed and answers, it is this `answers` by now.
pub fn deleting(
    meta: &ObjectMeta,
    old: &[Condition],
    answers: ConditionStatus,
    now: Timestamp,
) -> Option<Vec<Condition>> {
    use ConditionType::{Available, Placed, Ready, Reconciling, RolledOut, Stalled};
    meta.deletion_timestamp.as_ref()?;
    let finalizers = meta.finalizers.as_deref().unwrap_or_default();
    let message = format!("it is being deleted, and waits for {}", finalizers.join(", "));
    let said = |type_| Stated::new(type_, answers, Cause::Deleting, message.clone());
    let not = |type_, message: &str| Stated::new(type_, ConditionStatus::False, Cause::Deleting, message);
    let stated =
        [said(Placed), said(RolledOut), said(Available), not(Ready, &message), not(Reconciling, ""), not(Stalled, "")];
    // What others say is theirs to say.
    let mut new: Vec<Condition> = old.iter().filter(|old| is_own(&old.type_)).cloned().collect();
    for condition in conditions(old, &stated, meta.generation, now) {
        match new.iter_mut().find(|old| old.type_ == condition.type_) {
            Some(old) => *old = condition,
            None if condition.type_ == Ready.to_string() => new.push(condition),
            None => {}
        }
    }
    Some(new)
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

    #[test]
    fn what_is_being_deleted_says_so_and_what_it_waits_for() {
        let now = Timestamp::from_second(20).unwrap();
        let meta = |deleted: bool| ObjectMeta {
            deletion_timestamp: deleted.then_some(Time(now)),
            finalizers: Some(vec!["example.com/audit".to_owned(), "foregroundDeletion".to_owned()]),
            ..ObjectMeta::default()
        };
        let types = [ConditionType::Resolved, ConditionType::Available, ConditionType::Ready, ConditionType::Stalled];
        let served = types.map(|type_| Stated::new(type_, ConditionStatus::True, Cause::Succeeded, ""));
        let old = conditions(&[], &served, None, Timestamp::from_second(10).unwrap());
        let words = |old: &[Condition], answers| {
            let new = deleting(&meta(true), old, answers, now).unwrap();
            assert_eq!(deleting(&meta(true), &new, answers, now), Some(new.clone()));
            new.iter().map(|new| format!("{}={} {}", new.type_, new.status, new.reason)).collect::<Vec<_>>()
        };
        assert_eq!(deleting(&meta(false), &old, ConditionStatus::False, now), None);
        let gone =
            ["Resolved=True Succeeded", "Available=False Deleting", "Ready=False Deleting", "Stalled=False Deleting"];
        assert_eq!(words(&old, ConditionStatus::False), gone);
        assert_eq!(words(&old, ConditionStatus::Unknown)[1], "Available=Unknown Deleting");
        assert_eq!(words(&[], ConditionStatus::False), ["Ready=False Deleting"]);
        let new = deleting(&meta(true), &old, ConditionStatus::False, now).unwrap();
        assert_eq!(new[2].message, "it is being deleted, and waits for example.com/audit, foregroundDeletion");
    }
}
