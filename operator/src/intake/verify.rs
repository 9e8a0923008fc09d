//! Reads an adapter once, in the background: header first, then every byte, holding no more than the header.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use lorafleet_artifact::{CONFIG_FILE, Reason, WEIGHTS_FILE};
use lorafleet_crds::{LoraAdapter, SourceFile};
use lorafleet_source::{Progress, ReadAdapter, Sources, read_adapter};

use super::gate::{Order, mismatch_reason};
use super::observed::{Facts, Outcome};
use crate::context::Context;
use crate::job::Fault;
use crate::source::{ReadEnd, open, source_file, too_slow};

/// Starts the read; the controller is called again when it ends.
pub(super) fn start(adapter: &Arc<LoraAdapter>, order: Order, context: &Arc<Context>) {
    let reference = ObjectRef::from_obj(adapter.as_ref());
    let (uid, fingerprint) = (adapter.uid().unwrap_or_default(), order.fingerprint.clone());
    let (shared, bells) = (context.clone(), context.bells.clone());
    let work = async move {
        let ended = read(&order, &shared).await;
        let word = match &ended {
            Ok(Outcome::Verified(_)) => "verified",
            Ok(Outcome::Refused { reason, .. }) => reason,
            Err(_) => "fault",
        };
        shared.metrics.reads.with_label_values(&["intake", word]).inc();
        ended
    };
    context.intake_jobs.start(&adapter.namespace().unwrap_or_default(), &uid, &fingerprint, work, move || {
        bells.ring_intake(reference)
    });
}

async fn read(order: &Order, context: &Context) -> Result<Outcome, Fault> {
    let sources = open(&order.door, context).await?;
    let files = match files(&sources, order).await {
        Ok(files) => files,
        Err(end) => return ended(end, false),
    };
    let same_files = !order.pinned_files.is_empty() && files == order.pinned_files;
    let progress = Progress::default();
    let limit = context.limits.read_timeout_of(files.iter().map(|file| file.size_bytes).sum());
    let read = read_adapter(&sources, &order.uri, order.claims, &order.shape, &order.policy, false, &progress);
    let Ok(read) = tokio::time::timeout(limit, read).await else { return Err(too_slow(limit)) };
    match read {
        Ok(read) => Ok(Outcome::Verified(Box::new(facts(&read, files)))),
        Err(error) => match ReadEnd::from(error) {
            ReadEnd::Refused { reason, message } if reason == Reason::DigestMismatch.as_str() => {
                ended(ReadEnd::Refused { reason: mismatch_reason(order).to_string(), message }, same_files)
            }
            end => ended(end, same_files),
        },
    }
}

fn ended(end: ReadEnd, same_files: bool) -> Result<Outcome, Fault> {
    match end {
        ReadEnd::Fault(fault) => Err(fault),
        ReadEnd::Refused { reason, message } => Ok(Outcome::Refused { reason, message, same_files }),
    }
}

/// The adapter's files as the store names their versions. The read itself holds the store to what it lists.
async fn files(sources: &Sources, order: &Order) -> Result<Vec<SourceFile>, ReadEnd> {
    let listing = sources.list(&order.uri).await?;
    Ok([CONFIG_FILE, WEIGHTS_FILE].iter().filter_map(|name| listing.file(name)).map(source_file).collect())
}

fn facts(read: &ReadAdapter, files: Vec<SourceFile>) -> Facts {
    let verified = &read.verified;
    let kinds = verified.fitted.kinds();
    Facts {
        digest: verified.digest,
        rank: verified.fitted.rank_max(),
        ranks: kinds.iter().map(|(kind, rank)| (kind.name().to_owned(), *rank)).collect(),
        alpha: verified.config.alpha,
        size_bytes: files.iter().map(|file| file.size_bytes).sum(),
        files,
    }
}
