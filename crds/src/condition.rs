//! The vocabulary of conditions: types in the order in which an object passes them, and reasons.
//!
//! Reasons of a refused artifact are [`lorafleet_artifact::Reason`]'s; those here are the control plane's own.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// A condition's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionType {
    /// `LoraAdapter`: the base exists and allows the source.
    SourceAllowed,
    /// `BaseModel`, `LoraAdapter`: the source was read and its digest is known.
    Resolved,
    /// `LoraAdapter`: every byte was read and it fits the base.
    Verified,
    /// `LoraAdapter`, `ServingPool`: pods were told to hold it, and have room for it.
    Placed,
    /// `LoraAdapter`: the alias means the spec's revision.
    RolledOut,
    /// The name answers, from some revision (`LoraAdapter`); some pod takes traffic (`ServingPool`).
    Available,
    /// The spec is fully served.
    Ready,
    /// kstatus: the controller is at work towards the spec.
    Reconciling,
    /// kstatus: it cannot go on before somebody changes something.
    Stalled,
}

impl ConditionType {
    /// All that the operator states, of any kind.
    pub const ALL: [Self; 9] = [
        Self::SourceAllowed,
        Self::Resolved,
        Self::Verified,
        Self::Placed,
        Self::RolledOut,
        Self::Available,
        Self::Ready,
        Self::Reconciling,
        Self::Stalled,
    ];
}

impl fmt::Display for ConditionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A condition's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

impl fmt::Display for ConditionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a condition has its status, where the control plane itself decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Nothing is in the way.
    Succeeded,
    /// An earlier condition is not met yet.
    Waiting,
    /// Work is under way.
    InProgress,
    /// A network or a server fault; tried again by itself.
    SourceUnavailable,
    /// The source says that it has no such object.
    SourceNotFound,
    /// The source refuses the credentials.
    AccessDenied,
    /// What the spec says of the store cannot work: its endpoint, region or bucket.
    SourceMisconfigured,
    /// The Secret with the credentials is missing or lacks an entry.
    CredentialsMissing,
    /// No entry of the base's `allowedSources` allows the source.
    SourceForbidden,
    /// A scheme that this version does not read.
    UnsupportedSource,
    /// The `BaseModel` does not exist.
    BaseNotFound,
    /// The `BaseModel` has no digest yet.
    BaseNotReady,
    /// Another object is served under the name or, where none is, asked for it first; or it is the base's own.
    NameConflict,
    /// The policy wants `spec.digest`.
    DigestRequired,
    /// No `ServingPool` of the base selects the adapter.
    NoPool,
    /// The pool's `adapterSelector` asks for what no label can be.
    SelectorInvalid,
    /// The pool's pods have no room for it.
    CapacityExceeded,
    /// A pod failed to load it.
    LoadFailed,
    /// Pods are loading it.
    Loading,
    /// No pod takes traffic yet.
    NoReadyPod,
    /// Some pods do not take traffic yet.
    PodsNotReady,
    /// A pod serves another base than the `BaseModel`'s digest.
    WrongBase,
    /// The gateway has no ready pod.
    GatewayNotReady,
    /// The API server refused an object that the controller wrote.
    ApplyFailed,
    /// The operator does not understand a field of the object: it is of another version, or a value is beyond all bounds.
    Unreadable,
    /// A pod could not be asked.
    PodUnreachable,
    /// A pod answered, and did not take what it was told.
    PlacementRefused,
    /// The object is being deleted, and some finalizer holds it.
    Deleting,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The condition of this type, if it is set.
pub fn find(conditions: &[Condition], type_: ConditionType) -> Option<&Condition> {
    let name = type_.to_string();
    conditions.iter().find(|condition| condition.type_ == name)
}

/// Whether the condition of this type is True.
pub fn is_true(conditions: &[Condition], type_: ConditionType) -> bool {
    find(conditions, type_).is_some_and(|condition| condition.status == "True")
}
