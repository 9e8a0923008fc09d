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
    /// It takes as much as its parts are known to, and never less than the text that it was read from: whatever else it holds
    /// stood there too.
    ///
    /// # Errors
    /// If the room has not so much left.
    pub(super) fn new(report: Report, text_bytes: usize, room: &Room) -> Result<Self, Full> {
        let mut share = room.share();
        share.grow(bytes(&report).max(text_bytes as u64).saturating_sub(FREE_BYTES))?;
        Ok(Self(Arc::new(Inner { report, share: Some(share) })))
    }

    /// Whether its pod and pool may hold what it takes.
    pub(super) fn is_within_its_part(&self) -> bool {
        self.0.share.as_ref().is_none_or(Share::is_within_its_part)
    }

    /// This report with the holdings of another one, which it says have not changed. They are moved, not copied, unless a
    /// pass still works with the other one.
    ///
    /// # Errors
    /// The other one again, if the room has not so much left.
    pub(super) fn with_holdings_of(
        report: Report,
        text_bytes: usize,
        known: Self,
        room: &Room,
    ) -> Result<Self, (Full, Self)> {
        let complete = |adapters, aliases| Report { adapters, aliases, unchanged: false, ..report };
        match Arc::try_unwrap(known.0) {
            // What is new of it is small, else it is another report altogether.
            Ok(Inner { report: known, share }) if text_bytes as u64 <= FREE_BYTES => {
                let report = complete(known.adapters, known.aliases);
                Ok(Self(Arc::new(Inner { report, share })))
            }
            Ok(known) => {
                let report = complete(known.report.adapters.clone(), known.report.aliases.clone());
                Self::new(report, text_bytes, room).map_err(|full| (full, Self(Arc::new(known))))
            }
            Err(known) => {
                let report = complete(known.report.adapters.clone(), known.report.aliases.clone());
                Self::new(report, text_bytes, room).map_err(|full| (full, Self(known)))
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
