//! Reads a base once, in the background.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use lorafleet_artifact::{BaseFormat, base_files};
use lorafleet_crds::{BaseModel, SourceFile, WeightFormat};
use lorafleet_source::{Listing, Progress, ReadBase, read_base};

use super::plan::{Facts, Order, Outcome};
use crate::context::Context;
use crate::job::{Fault, FaultKind};
use crate::recheck::listing;
use crate::source::{ReadEnd, looked, open, source_file};

/// Files that a status names, as its schema has it.
const FILES_MAX: usize = 256;

/// Starts the read; the controller is called again when it ends.
pub(super) fn start(base: &Arc<BaseModel>, order: Order, context: &Arc<Context>) {
    let (lane, uid) = (order.door.lane(), base.uid().unwrap_or_default());
    let fingerprint = order.fingerprint.clone();
    let progress = Arc::new(Progress::default());
    let (shared, counted) = (context.clone(), progress.clone());
    context.model_rechecks.forget(&uid);
    let ring_now = ring(base, context);
    let tell = move |_| ring_now();
    context.model_jobs.start(lane, &uid, &fingerprint, progress, tell, move || async move {
        let ended = read(&order, &counted, &shared).await;
        let word = match &ended {
            Ok(Outcome::Read(_)) => "verified",
            Ok(Outcome::Refused { reason, .. }) => reason,
            Err(_) => "fault",
        };
        shared.metrics.reads.with_label_values(&["model", word]).inc();
        ended
    });
}

/// Starts a look at a source that was judged before: one listing.
pub(super) fn look(base: &Arc<BaseModel>, order: Order, context: &Arc<Context>) {
    let (lane, uid) = (order.door.lane(), base.uid().unwrap_or_default());
    let judged = base.status.as_ref().and_then(|status| status.source_listing.clone());
    let shared = context.clone();
    context.model_rechecks.look(lane, &uid, judged, ring(base, context), move || async move {
        let listing = shared.open_doors.list(&order.door, &order.uri, &shared).await;
        let word = if listing.is_ok() { "ok" } else { "error" };
        shared.metrics.looks.with_label_values(&["model", word]).inc();
        looked(listing.map(|listing| files(&listing)))
    });
}

fn ring(base: &Arc<BaseModel>, context: &Context) -> impl Fn() + Send + Sync + 'static {
    let (reference, bells) = (ObjectRef::from_obj(base.as_ref()), context.bells.clone());
    move || bells.ring_model(reference.clone())
}

/// The files that are the base, of those that lie there.
fn files(listing: &Listing) -> Vec<SourceFile> {
    // A folder that holds no base has no files of one: whoever reads it is refused with the reason.
    let chosen = base_files(listing.names()).map(|(_, chosen)| chosen).unwrap_or_default();
    listing.files.iter().filter(|file| chosen.contains(&file.name)).map(source_file).take(FILES_MAX).collect()
}

async fn read(order: &Order, progress: &Progress, context: &Context) -> Result<Outcome, Fault> {
    let sources = open(&order.door, context).await?;
    let listed = match sources.list(&order.uri).await {
        Ok(listing) => files(&listing),
        Err(error) => return ended(error.into(), &[]),
    };
    match read_base(&sources, &order.uri, true, progress).await {
        Ok(found) => judge(order, found, &listed),
        Err(error) => ended(error.into(), &listed),
    }
}

fn ended(end: ReadEnd, files: &[SourceFile]) -> Result<Outcome, Fault> {
    match end {
        ReadEnd::Fault(fault) => Err(fault),
        ReadEnd::Refused { reason, message, .. } => Ok(Outcome::Refused { reason, message, listing: listing(files) }),
    }
}

fn judge(order: &Order, found: ReadBase, files: &[SourceFile]) -> Result<Outcome, Fault> {
    let refused = |reason: &str, message: String| {
        ended(ReadEnd::Refused { reason: reason.to_owned(), message, digest: None }, files)
    };
    let (word, fits) = match found.format {
        BaseFormat::Gguf => ("gguf", order.format != WeightFormat::Safetensors),
        BaseFormat::Safetensors => ("safetensors", order.format != WeightFormat::Gguf),
    };
    if !fits {
        let hint =
            if word == "gguf" { "" } else { " (to take a GGUF file that lies beside them, name the file in the uri)" };
        return refused(
            "Malformed",
            format!("'{}' holds {word} weights, spec.format asks for the other{hint}", order.uri),
        );
    }
    let Some(digest) = found.digest else {
        return Err(Fault { kind: FaultKind::Unavailable, message: "the read gave no digest".to_owned() });
    };
    if let Some((expected, reason)) = order.expected.filter(|(expected, _)| *expected != digest) {
        return refused(reason.as_str(), format!("the digest of '{}' is {digest}, expected was {expected}", order.uri));
    }
    let files = found.listing.files.iter().map(source_file).take(FILES_MAX).collect();
    Ok(Outcome::Read(Box::new(Facts { digest, shape: found.shape, size_bytes: found.bytes, files })))
}
