//! Reads a base once, in the background.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use lorafleet_artifact::BaseFormat;
use lorafleet_crds::{BaseModel, WeightFormat};
use lorafleet_source::{Progress, ReadBase, read_base};

use super::plan::{Facts, Order, Outcome};
use crate::context::Context;
use crate::job::{Fault, FaultKind};
use crate::source::{ReadEnd, open, source_file, too_slow};

/// Starts the read; the controller is called again when it ends.
pub(super) fn start(base: &Arc<BaseModel>, order: Order, context: &Arc<Context>) {
    let reference = ObjectRef::from_obj(base.as_ref());
    let (uid, fingerprint) = (base.uid().unwrap_or_default(), order.fingerprint.clone());
    let (shared, bells) = (context.clone(), context.bells.clone());
    let work = async move {
        let ended = read(&order, &shared).await;
        let word = match &ended {
            Ok(Outcome::Read(_)) => "verified",
            Ok(Outcome::Refused { reason, .. }) => reason,
            Err(_) => "fault",
        };
        shared.metrics.reads.with_label_values(&["model", word]).inc();
        ended
    };
    context
        .model_jobs
        .start(&base.namespace().unwrap_or_default(), &uid, &fingerprint, work, move || bells.ring_model(reference));
}

async fn read(order: &Order, context: &Context) -> Result<Outcome, Fault> {
    let sources = open(&order.door, context).await?;
    let bytes: u64 = match sources.list(&order.uri).await {
        Ok(listing) => listing.files.iter().map(|file| file.bytes).sum(),
        // The read says what is wrong.
        Err(_) => 0,
    };
    let limit = context.limits.read_timeout_of(bytes);
    let progress = Progress::default();
    let read = tokio::time::timeout(limit, read_base(&sources, &order.uri, true, &progress)).await;
    let found = match read.map_err(|_| too_slow(limit))? {
        Ok(found) => found,
        Err(error) => {
            return match ReadEnd::from(error) {
                ReadEnd::Fault(fault) => Err(fault),
                ReadEnd::Refused { reason, message } => Ok(Outcome::Refused { reason, message }),
            };
        }
    };
    judge(order, found)
}

fn judge(order: &Order, found: ReadBase) -> Result<Outcome, Fault> {
    let refused = |reason: &str, message: String| Ok(Outcome::Refused { reason: reason.to_owned(), message });
    let (word, fits) = match found.format {
        BaseFormat::Gguf => ("gguf", order.format != WeightFormat::Safetensors),
        BaseFormat::Safetensors => ("safetensors", order.format != WeightFormat::Gguf),
    };
    if !fits {
        return refused("Malformed", format!("'{}' holds {word} weights, spec.format asks for the other", order.uri));
    }
    let Some(digest) = found.digest else {
        return Err(Fault { kind: FaultKind::Unavailable, message: "the read gave no digest".to_owned() });
    };
    if let Some((expected, reason)) = order.expected.filter(|(expected, _)| *expected != digest) {
        return refused(reason.as_str(), format!("the digest of '{}' is {digest}, expected was {expected}", order.uri));
    }
    let files = found.listing.files.iter().map(source_file).collect();
    Ok(Outcome::Read(Box::new(Facts { digest, shape: found.shape, size_bytes: found.bytes, files })))
}
