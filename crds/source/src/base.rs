//! A base model from a store: its digest and its shape.

use std::collections::BTreeMap;

use lorafleet_artifact::gguf::{Gguf, GgufLimits};
use lorafleet_artifact::{
    BaseFormat, BaseShape, Digest, HeaderError, HuggingFaceConfig, Refusal, Safetensors, SafetensorsLimits, SourceUri,
    base_files, digest_of_files,
};
use sha2::{Digest as _, Sha256};

use crate::access::Sources;
use crate::adapter::{AdapterError, Progress};
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing};

/// Why a base could not be had: the same two sides as for an adapter.
pub type BaseError = AdapterError;

/// Bytes of a header that are asked for first. Most headers fit.
const HEADER_BYTES_FIRST: u64 = 256 << 10;
/// `config.json` of a base is some kilobytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What is known of a base after reading it once.
#[derive(Clone, Debug)]
pub struct ReadBase {
    /// SHA-256 over its sorted config, tokenizer and weight files; `None` if only the shape was asked for.
    pub digest: Option<Digest>,
    pub format: BaseFormat,
    pub shape: BaseShape,
    /// Of all its files.
    pub bytes: u64,
    /// The folder, with those files of it that are the base.
    pub listing: Listing,
}

/// Reads the headers of a base, and with `whole` also every byte for its digest.
///
/// # Errors
/// Refused if the files are no base that is understood; Source for the way to them.
pub async fn read_base(
    sources: &Sources,
    uri: &SourceUri,
    whole: bool,
    progress: &Progress,
) -> Result<ReadBase, BaseError> {
    let mut listing = sources.list(uri).await?;
    let (format, chosen) = base_files(listing.names()).map_err(|refusal| listing.refused(refusal))?;
    listing.files.retain(|file| chosen.contains(&file.name));
    let bytes = listing.files.iter().map(|file| file.bytes).sum();
    progress.start(bytes);
    let shape = match format {
        BaseFormat::Gguf => gguf_shape(sources, &listing).await?,
        BaseFormat::Safetensors => folder_shape(sources, &listing).await?,
    };
    let digest = if whole { Some(digest(sources, &listing, progress).await?) } else { None };
    Ok(ReadBase { digest, format, shape, bytes, listing })
}

async fn gguf_shape(sources: &Sources, listing: &Listing) -> Result<BaseShape, BaseError> {
    let file = listing.files.first().ok_or_else(|| missing(listing, "*.gguf"))?;
    let header = header(sources, listing, file, |bytes| Gguf::parse(bytes, file.bytes, &GgufLimits::default())).await?;
    Ok(BaseShape::from_gguf(&header)?)
}

async fn folder_shape(sources: &Sources, listing: &Listing) -> Result<BaseShape, BaseError> {
    let config = listing.file("config.json").ok_or_else(|| missing(listing, "config.json"))?;
    let config = sources.read(listing, config, 0..config.bytes.min(CONFIG_BYTES_MAX)).await?;
    let shape = BaseShape::from_config(&HuggingFaceConfig::parse(&config)?)?;
    let mut headers = Vec::new();
    for file in listing.files.iter().filter(|file| file.name.ends_with(".safetensors")) {
        let limits = SafetensorsLimits::default();
        headers.push(header(sources, listing, file, |bytes| Safetensors::parse(bytes, file.bytes, &limits)).await?);
    }
    shape.check_tensors(&headers)?;
    Ok(shape)
}

/// Reads as much of a file as its header needs.
async fn header<T>(
    sources: &Sources,
    listing: &Listing,
    file: &FileInfo,
    parse: impl Fn(&[u8]) -> Result<T, HeaderError>,
) -> Result<T, BaseError> {
    let in_file = |refusal: Refusal| Refusal::new(refusal.reason, format!("{}: {}", file.name, refusal.message));
    let mut wanted = HEADER_BYTES_FIRST.min(file.bytes);
    loop {
        let bytes = sources.read(listing, file, 0..wanted).await?;
        match parse(&bytes) {
            Ok(header) => return Ok(header),
            Err(HeaderError::Refused(refusal)) => return Err(in_file(refusal).into()),
            // At least double, so that a header of many small steps takes few reads.
            Err(HeaderError::Incomplete { bytes }) => wanted = bytes.max(wanted.saturating_mul(2)).min(file.bytes),
        }
    }
}

async fn digest(sources: &Sources, listing: &Listing, progress: &Progress) -> Result<Digest, SourceError> {
    let mut sums = BTreeMap::new();
    for file in &listing.files {
        let mut hasher = Sha256::new();
        let mut download = sources.open(listing, file, 0..file.bytes)?;
        while let Some(piece) = download.next().await? {
            hasher.update(&piece);
            progress.add(piece.len());
        }
        sums.insert(file.name.clone(), hasher.finalize().into());
    }
    Ok(digest_of_files(&sums))
}

fn missing(listing: &Listing, name: &str) -> SourceError {
    SourceError::new(ErrorKind::NotFound, format!("'{}' holds no {name}", listing.uri))
}
