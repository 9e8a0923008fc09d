//! One adapter, seen from outside.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use lorafleet_artifact::{
    AdapterConfig, BaseShape, CONFIG_BYTES_MAX, CONFIG_FILE, Claims, Digest, HALF_BYTES, HeaderError, Outline, Policy,
    Reason, Refusal, Safetensors, SafetensorsLimits, Scheme, WEIGHTS_FILE, check_folder, declared_base,
    digest_of_files,
};
use lorafleet_backend::HostAdapter;
use lorafleet_backend::model::Model;
use lorafleet_source::{AdapterError, FileInfo, Listing, Progress, Sources, read_adapter, read_base};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::everything;
use crate::adapter::{LoadError, check_copies};

const GIB: u64 = 1 << 30;

/// An engine takes such an adapter; the operator does only where somebody has said so.
const UNSTAMPED: &str = "it does not say for which base it was made: unless spec.baseModelDigest says so, a BaseModel refuses it \
    (BaseUnknown) but for requireBaseDigest: false; `lorafleet-engine stamp` writes it in";

/// The base that adapters are judged for.
pub(super) struct Base {
    pub shape: BaseShape,
    pub digest: Digest,
    /// Where its weights can be opened, to compare copies of them.
    path: Option<PathBuf>,
}

impl Base {
    pub(super) async fn read(source: &str) -> anyhow::Result<Self> {
        let (sources, uri) = everything(source)?;
        let read = read_base(&sources, &uri, true, &Progress::default()).await?;
        let digest = read.digest.ok_or_else(|| anyhow::anyhow!("the base '{uri}' has no digest"))?;
        let path = (uri.scheme() == Scheme::File).then(|| PathBuf::from(format!("/{}", uri.path())));
        Ok(Self { shape: read.shape, digest, path })
    }
}

/// What is known of an adapter. Fields are empty where it could not be read so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub source: String,
    pub verdict: Verdict,
    /// Why it is refused: the typed reason and its message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Accepted here, and what may keep it from being served elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The base it says it was made for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_digest: Option<Digest>,
    /// Largest rank.
    pub rank: u64,
    /// Ranks by kind of module.
    pub ranks: BTreeMap<String, Vec<u64>>,
    pub modules: u32,
    pub types: Vec<&'static str>,
    /// Of the weights file.
    pub file_bytes: u64,
    /// Of all A and B as 16-bit floats.
    pub adapter_bytes: u64,
    /// How many such adapters a GiB of device pages holds.
    pub per_gib: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    Accepted,
    Refused,
    /// Well-formed; no base was given to judge it for.
    #[default]
    NotJudged,
}

pub(super) async fn look(source: &str, base: Option<&Base>) -> Facts {
    let mut facts = Facts { source: source.to_owned(), ..Facts::default() };
    let judged = judge(source, base, &mut facts).await;
    match judged {
        Ok(()) if base.is_some() => {
            facts.verdict = Verdict::Accepted;
            facts.note = facts.base_digest.is_none().then(|| UNSTAMPED.to_owned());
        }
        Ok(()) => {}
        Err(error) => {
            facts.verdict = Verdict::Refused;
            facts.reason = Some(error.code().to_owned());
            facts.message = Some(error.to_string());
        }
    }
    facts
}

async fn judge(source: &str, base: Option<&Base>, facts: &mut Facts) -> Result<(), LoadError> {
    let (sources, uri) = everything(source)?;
    let listing = sources.list(&uri).await?;
    outline(&sources, &listing, facts).await?;
    let Some(base) = base else { return Ok(()) };
    // A claim is checked where there is one; to have one at all is the policy of whoever serves it.
    let policy = Policy { require_base_digest: false, identities: vec![base.digest], ..Policy::default() };
    let claims = Claims::default();
    let read = read_adapter(&sources, &uri, claims, &base.shape, &policy, true, &Progress::default()).await?;
    compare_copies(read, base)
}

/// Fills in what the files say of themselves.
async fn outline(sources: &Sources, listing: &Listing, facts: &mut Facts) -> Result<(), AdapterError> {
    check_folder(listing.names())?;
    let (Some(config), Some(weights)) = (listing.file(CONFIG_FILE), listing.file(WEIGHTS_FILE)) else {
        return Err(Refusal::new(Reason::Malformed, "the folder lacks a file of an adapter").into());
    };
    facts.file_bytes = weights.bytes;
    let config = sources.read(listing, config, 0..config.bytes.min(CONFIG_BYTES_MAX)).await?;
    let (header, weights_sha256) = read_weights(sources, listing, weights).await?;
    let config_sha256: [u8; 32] = Sha256::digest(&config).into();
    let files = [(CONFIG_FILE.to_owned(), config_sha256), (WEIGHTS_FILE.to_owned(), weights_sha256)];
    facts.digest = Some(digest_of_files(&BTreeMap::from(files)));
    let outline = Outline::of(&header);
    facts.rank = outline.rank_max();
    facts.adapter_bytes = outline.elements.saturating_mul(HALF_BYTES);
    facts.per_gib = GIB.checked_div(facts.adapter_bytes).unwrap_or(0);
    facts.modules = outline.modules;
    facts.types = outline.types.into_iter().collect();
    facts.ranks = outline.ranks.into_iter().map(|(kind, ranks)| (kind, ranks.into_iter().collect())).collect();
    facts.base_digest = declared_base(&header)?;
    AdapterConfig::parse(&config)?;
    Ok(())
}

/// One pass over the weights file: its header and its SHA-256.
async fn read_weights(
    sources: &Sources,
    listing: &Listing,
    file: &FileInfo,
) -> Result<(Safetensors, [u8; 32]), AdapterError> {
    let mut hasher = Sha256::new();
    let mut head = Vec::new();
    let mut header = None;
    let mut download = sources.open(listing, file, 0..file.bytes)?;
    while let Some(piece) = download.next().await? {
        hasher.update(&piece);
        if header.is_none() {
            head.extend_from_slice(&piece);
            match Safetensors::parse(&head, file.bytes, &SafetensorsLimits::adapter()) {
                Ok(parsed) => header = Some(parsed),
                Err(HeaderError::Incomplete { .. }) => {}
                Err(HeaderError::Refused(refusal)) => return Err(refusal.into()),
            }
        }
    }
    let header =
        header.ok_or_else(|| Refusal::new(Reason::Malformed, format!("{WEIGHTS_FILE} has no whole header")))?;
    Ok((header, hasher.finalize().into()))
}

fn compare_copies(read: lorafleet_source::ReadAdapter, base: &Base) -> Result<(), LoadError> {
    if read.verified.fitted.base_copies.is_empty() {
        return Ok(());
    }
    let model = base.path.as_ref().and_then(|path| Model::open(path).ok()).map(Arc::new);
    let adapter = HostAdapter::of(read.verified, read.bytes.map(|bytes| bytes.weights).unwrap_or_default());
    let tensors = model.as_deref().map(|model| model as &dyn crate::adapter::BaseTensors);
    Ok(check_copies(&adapter, tensors)?)
}
