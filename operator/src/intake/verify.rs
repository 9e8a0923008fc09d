//! Reads an adapter once, in the background: header first, then every byte, holding no more than the header.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use lorafleet_artifact::{CONFIG_FILE, Reason, WEIGHTS_FILE};
use lorafleet_crds::{LoraAdapter, SourceFile};
use lorafleet_source::{Listing, Progress, ReadAdapter, Sources, read_adapter};

use super::gate::Order;
use super::observed::{Facts, Outcome};
use crate::context::Context;
use crate::job::{Fault, FaultKind};
use crate::recheck::listing;
use crate::source::{ReadEnd, looked, source_file};

/// Starts the read; the controller is called again when it ends.
pub(super) fn start(adapter: &Arc<LoraAdapter>, order: Order, context: &Arc<Context>) {
    let (lane, uid) = (order.door.lane(), adapter.uid().unwrap_or_default());
    let fingerprint = order.fingerprint.clone();
    let progress = Arc::new(Progress::default());
    let (shared, counted) = (context.clone(), progress.clone());
    context.adapter_rechecks.forget(&uid);
    let ring_now = ring(adapter, context);
    let tell = move |_| ring_now();
    context.intake_jobs.start(lane, &uid, &fingerprint, progress, tell, move || async move {
        let ended = read(&order, &counted, &shared).await;
        let word = match &ended {
            Ok(Outcome::Verified(_)) => "verified",
            Ok(Outcome::Refused { reason, .. }) => reason,
            Err(_) => "fault",
        };
        shared.metrics.reads.with_label_values(&["intake", word]).inc();
        ended
    });
}

/// Starts a look at a source that was judged before: one listing.
pub(super) fn look(adapter: &Arc<LoraAdapter>, order: Order, context: &Arc<Context>) {
    let (lane, uid) = (order.door.lane(), adapter.uid().unwrap_or_default());
    let judged = adapter.status.as_ref().and_then(|status| status.source_listing.clone());
    let shared = context.clone();
    context.adapter_rechecks.look(lane, &uid, judged, ring(adapter, context), move || async move {
        let listing = shared.open_doors.list(&order.door, &order.uri, &shared).await;
        let word = if listing.is_ok() { "ok" } else { "error" };
        shared.metrics.looks.with_label_values(&["intake", word]).inc();
        looked(listing.map(|listing| files(&listing)))
    });
}

fn ring(adapter: &Arc<LoraAdapter>, context: &Context) -> impl Fn() + Send + Sync + 'static {
    let (reference, bells) = (ObjectRef::from_obj(adapter.as_ref()), context.bells.clone());
    move || bells.ring_intake(reference.clone())
}

async fn read(order: &Order, progress: &Progress, context: &Context) -> Result<Outcome, Fault> {
    let (doors, door) = (&context.open_doors, &order.door);
    let (sources, fresh) = doors.enter(door, context).await?;
    let ended = read_through(&sources, order, progress).await;
    let Err(fault) = ended else { return ended };
    doors.close(door, &sources);
    if fresh || fault.kind != FaultKind::AccessDenied {
        return Err(fault);
    }
    // The Secret may have been changed since that door was opened.
    let (sources, _) = doors.enter(door, context).await?;
    read_through(&sources, order, progress).await
}

async fn read_through(sources: &Sources, order: &Order, progress: &Progress) -> Result<Outcome, Fault> {
    let listed = match sources.list(&order.uri).await {
        Ok(listing) => files(&listing),
        Err(error) => return ended(error.into(), order, &[]),
    };
    let read = read_adapter(sources, &order.uri, order.claims, &order.shape, &order.policy, false, progress).await;
    match read {
        Ok(read) => Ok(Outcome::Verified(Box::new(facts(&read, listed)))),
        Err(error) => ended(error.into(), order, &listed),
    }
}

/// Other files than those whose digest is pinned are changed ones, whatever else is wrong with them.
pub(crate) fn ended(end: ReadEnd, order: &Order, files: &[SourceFile]) -> Result<Outcome, Fault> {
    let (reason, message, digest) = match end {
        ReadEnd::Fault(fault) => return Err(fault),
        ReadEnd::Refused { reason, message, digest } => (reason, message, digest),
    };
    let same_files = !order.pinned_files.is_empty() && files == order.pinned_files;
    let (mismatch, changed) = (Reason::DigestMismatch.as_str(), Reason::SourceChanged.as_str());
    let (reason, message) = match order.pinned && !same_files {
        true if reason == mismatch => (changed.to_owned(), message),
        true => (changed.to_owned(), format!("other files than before, and they are refused: {reason}: {message}")),
        false => (reason, message),
    };
    Ok(Outcome::Refused { reason, message, same_files, listing: listing(files), digest })
}

/// The adapter's files as the store names their versions. The read itself holds the store to what it lists.
fn files(listing: &Listing) -> Vec<SourceFile> {
    [CONFIG_FILE, WEIGHTS_FILE].iter().filter_map(|name| listing.file(name)).map(source_file).collect()
}

fn facts(read: &ReadAdapter, files: Vec<SourceFile>) -> Facts {
    let verified = &read.verified;
    Facts {
        digest: verified.digest,
        traits: verified.traits(),
        alpha: verified.config.alpha,
        size_bytes: files.iter().map(|file| file.size_bytes).sum(),
        files,
    }
}
