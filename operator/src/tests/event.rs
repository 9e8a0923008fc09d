//! What may happen in the simulation.

use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) enum Event {
    Intake(u8),
    /// It is time to look at a source again.
    LookIsDue(u8),
    LookEnds(u8),
    /// A pass that dies after so many writes.
    Pool(Option<u8>),
    JobEnds(u8),
    Arrives(u8),
    EngineRestarts(u8),
    EngineDown(u8),
    OperatorDies,
    Replace(u8, bool),
    ResolveAgain(u8),
    Delete(u8),
    Create(u8),
    Store(bool),
    MaxRank(u8),
    RequireBaseDigest(bool),
    /// The base is resolved anew, and is another one.
    BaseMoves,
    /// Somebody else writes into a status: a condition of his own, or a pool that is none.
    Others(u8, bool),
    /// Another served name, or none: some want the same one.
    Rename(u8, u8),
    /// What the spec claims to be the digest: nothing, what lies there, or something else.
    Claim(u8, u8),
    /// The watch of the adapters stays behind for so many events.
    Lag(u8),
}

pub(super) fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => any::<u8>().prop_map(Event::Intake),
        3 => any::<u8>().prop_map(Event::LookIsDue),
        3 => any::<u8>().prop_map(Event::LookEnds),
        6 => prop::option::of(0..4_u8).prop_map(Event::Pool),
        4 => any::<u8>().prop_map(Event::JobEnds),
        4 => any::<u8>().prop_map(Event::Arrives),
        1 => any::<u8>().prop_map(Event::EngineRestarts),
        1 => any::<u8>().prop_map(Event::EngineDown),
        1 => Just(Event::OperatorDies),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(adapter, good)| Event::Replace(adapter, good)),
        2 => any::<u8>().prop_map(Event::ResolveAgain),
        1 => any::<u8>().prop_map(Event::Delete),
        1 => any::<u8>().prop_map(Event::Create),
        3 => (any::<u8>(), 0..3_u8).prop_map(|(adapter, name)| Event::Rename(adapter, name)),
        1 => (any::<u8>(), 0..3_u8).prop_map(|(adapter, claim)| Event::Claim(adapter, claim)),
        4 => (1..6_u8).prop_map(Event::Lag),
        1 => any::<bool>().prop_map(Event::Store),
        1 => (2..12_u8).prop_map(Event::MaxRank),
        1 => any::<bool>().prop_map(Event::RequireBaseDigest),
        1 => Just(Event::BaseMoves),
        1 => (any::<u8>(), any::<bool>()).prop_map(|(adapter, condition)| Event::Others(adapter, condition)),
    ]
}
