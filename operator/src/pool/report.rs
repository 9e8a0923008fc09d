//! What a pod reported, and what that takes of the room that all reports share.

use std::ops::Deref;
use std::sync::Arc;

use lorafleet_crds::wire::{AdapterReport, Report};
use lorafleet_listen::{Full, Room, Share};
use serde::{Deserialize, Deserializer};

/// Reports this small need no room: there are as many as there are pods.
pub(super) const FREE_BYTES: u64 = 16 << 10;
/// What the allocator adds to a text.
const TEXT_BYTES: usize = 32;

/// A report with its share of the room, which is free again with the last clone.
#[derive(Clone, Debug)]
pub struct Held(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    report: Report,
    share: Option<Share>,
}

impl Held {
    /// # Errors
    /// If the room has not so much left.
    pub(super) fn new(report: Report, room: &Room) -> Result<Self, Full> {
        let mut share = room.share();
        share.grow(bytes(&report).saturating_sub(FREE_BYTES))?;
        Ok(Self(Arc::new(Inner { report, share: Some(share) })))
    }

    /// This report with the holdings of another one, which it says have not changed. They are moved, not copied, unless a
    /// pass still works with the other one.
    ///
    /// # Errors
    /// The other one again, if the room has not so much left.
    pub(super) fn with_holdings_of(report: Report, known: Self, room: &Room) -> Result<Self, (Full, Self)> {
        let complete = |adapters, aliases| Report { adapters, aliases, unchanged: false, ..report };
        match Arc::try_unwrap(known.0) {
            Ok(Inner { report: known, share }) => {
                let report = complete(known.adapters, known.aliases);
                Ok(Self(Arc::new(Inner { report, share })))
            }
            Err(known) => {
                let report = complete(known.report.adapters.clone(), known.report.aliases.clone());
                Self::new(report, room).map_err(|full| (full, Self(known)))
            }
        }
    }
}

/// What it takes in memory, roughly.
fn bytes(report: &Report) -> u64 {
    let text = |text: &String| text.capacity() + TEXT_BYTES;
    let adapter = |adapter: &AdapterReport| {
        let error = adapter.last_error.as_ref();
        let error = error.map_or(0, |error| text(&error.message) + text(&error.kind) + text(&error.code) + TEXT_BYTES);
        text(&adapter.name) + text(&adapter.namespace) + error
    };
    // Nodes of the map are half full at worst.
    let alias = 2 * (size_of::<String>() + size_of::<lorafleet_artifact::Digest>());
    let adapters: usize = report.adapters.iter().map(adapter).sum();
    let aliases: usize = report.aliases.keys().map(|name| text(name) + alias).sum();
    (size_of::<Report>() + report.adapters.capacity() * size_of::<AdapterReport>() + adapters + aliases) as u64
}

impl Deref for Held {
    type Target = Report;

    fn deref(&self) -> &Report {
        &self.0.report
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.0.report == other.0.report
    }
}

/// Written down by a test: outside of any room.
impl From<Report> for Held {
    fn from(report: Report) -> Self {
        Self(Arc::new(Inner { report, share: None }))
    }
}

impl<'de> Deserialize<'de> for Held {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Report::deserialize(deserializer).map(Self::from)
    }
}
