//! The whole judgement over an adapter, fed with bytes as they arrive.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::Digest;
use crate::base::BaseShape;
use crate::config::AdapterConfig;
use crate::digest_of_files;
use crate::fit::{Fitted, fit};
use crate::gguf::HeaderError;
use crate::policy::{Claims, Policy, Traits};
use crate::reason::{Reason, Refusal, excerpt};
use crate::safetensors::{Safetensors, SafetensorsLimits};
use crate::scan::Scan;

pub const CONFIG_FILE: &str = "adapter_config.json";
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Judges the names in an adapter's folder. Files that PEFT does not load (a README, a tokenizer) are nobody's matter.
///
/// # Errors
/// NotFound for an empty folder, UnsupportedFeature for pickled or sharded weights, Malformed if a file is missing.
pub fn check_folder<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(), Refusal> {
    let names: Vec<&str> = names.into_iter().collect();
    if names.is_empty() {
        return Err(Refusal::new(Reason::NotFound, "the source does not exist or holds no files"));
    }
    if !names.contains(&CONFIG_FILE) {
        return Err(Refusal::malformed(format!("the source holds no {CONFIG_FILE}")));
    }
    if names.contains(&WEIGHTS_FILE) {
        return Ok(());
    }
    let weights = |name: &&&str| name.starts_with("adapter_model") || name.starts_with("pytorch_model");
    match names.iter().find(weights) {
        Some(name) if name.ends_with(".safetensors") => Err(Refusal::unsupported(format!(
            "the weights are in '{}': only a single {WEIGHTS_FILE} is supported",
            excerpt(name, 200)
        ))),
        Some(name) => Err(Refusal::unsupported(format!(
            "the weights are only there as '{}', which may run code when it is read: {WEIGHTS_FILE} is needed",
            excerpt(name, 200)
        ))),
        None => Err(Refusal::malformed(format!("the source holds no {WEIGHTS_FILE}"))),
    }
}

/// An adapter under judgement. Give it the weights file from the first byte to the last, in pieces of any size; it
/// refuses as early as it can and holds no more than the header.
///
/// Beginning and the piece that ends the header may take some hundred milliseconds where the configuration asks for it:
/// neither belongs on a thread on which others wait.
#[derive(Debug)]
pub struct Verification {
    base: BaseShape,
    policy: Policy,
    claims: Claims,
    config: AdapterConfig,
    config_sha256: [u8; 32],
    weights_bytes: u64,
    taken_bytes: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Header(Vec<u8>),
    Data(Box<Data>),
}

#[derive(Debug)]
struct Data {
    header: Safetensors,
    declared_base: Option<Digest>,
    fitted: Fitted,
    scan: Scan,
}

/// An adapter that may be served.
#[derive(Clone, Debug)]
pub struct Verified {
    pub digest: Digest,
    pub config: AdapterConfig,
    pub header: Safetensors,
    pub fitted: Fitted,
    /// The base that it says it was made for.
    pub declared_base: Option<Digest>,
    pub weights_bytes: u64,
}

impl Verified {
    /// What any policy judges of it.
    pub fn traits(&self) -> Traits {
        Traits::new(&self.fitted, self.declared_base, self.weights_bytes)
    }
}

impl Verification {
    /// # Errors
    /// Everything that configuration, claims and size alone decide.
    pub fn begin(
        config: &[u8],
        weights_bytes: u64,
        claims: Claims,
        base: &BaseShape,
        policy: &Policy,
    ) -> Result<Self, Refusal> {
        policy.check_claims(&claims)?;
        let parsed = AdapterConfig::parse(config)?;
        policy.check_size(weights_bytes)?;
        if weights_bytes == 0 {
            return Err(Refusal::malformed(format!("{WEIGHTS_FILE} is empty")));
        }
        Ok(Self {
            base: base.clone(),
            policy: policy.clone(),
            claims,
            config: parsed,
            config_sha256: Sha256::digest(config).into(),
            weights_bytes,
            taken_bytes: 0,
            stage: Stage::Header(Vec::new()),
        })
    }

    /// # Errors
    /// As soon as a piece shows that the adapter cannot be served.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), Refusal> {
        self.taken_bytes = self.taken_bytes.saturating_add(piece.len() as u64);
        if self.taken_bytes > self.weights_bytes {
            let (have, want) = (self.taken_bytes, self.weights_bytes);
            return Err(Refusal::malformed(format!("{WEIGHTS_FILE} goes on: {have} bytes, announced were {want}")));
        }
        match &mut self.stage {
            Stage::Data(data) => data.scan.push(piece),
            Stage::Header(bytes) => {
                bytes.extend_from_slice(piece);
                match Safetensors::parse(bytes, self.weights_bytes, &SafetensorsLimits::adapter()) {
                    Err(HeaderError::Incomplete { .. }) => Ok(()),
                    Err(HeaderError::Refused(refusal)) => Err(refusal),
                    Ok(header) => {
                        let bytes = std::mem::take(bytes);
                        self.enter_data(header, &bytes)
                    }
                }
            }
        }
    }

    fn enter_data(&mut self, header: Safetensors, bytes: &[u8]) -> Result<(), Refusal> {
        let declared_base = self.claims.base(&header)?;
        self.policy.check_base(declared_base)?;
        let fitted = fit(&self.config, &header, &self.base)?;
        self.policy.check_fitted(&fitted)?;
        let mut scan = Scan::new(&fitted, header.data_start);
        scan.push(bytes)?;
        self.stage = Stage::Data(Box::new(Data { header, declared_base, fitted, scan }));
        Ok(())
    }

    /// The judgement over the whole.
    ///
    /// # Errors
    /// Malformed if bytes are missing, NoEffect, DigestMismatch.
    pub fn finish(self) -> Result<Verified, Refusal> {
        let (have, want) = (self.taken_bytes, self.weights_bytes);
        let Stage::Data(data) = self.stage else {
            return Err(Refusal::malformed(format!("{WEIGHTS_FILE} ends in its header, after {have} bytes")));
        };
        if have != want {
            return Err(Refusal::malformed(format!("{WEIGHTS_FILE} ends after {have} bytes, announced were {want}")));
        }
        let Data { header, declared_base, fitted, scan } = *data;
        let weights_sha256 = scan.finish(&fitted)?;
        let files = [(CONFIG_FILE.to_owned(), self.config_sha256), (WEIGHTS_FILE.to_owned(), weights_sha256)];
        let digest = digest_of_files(&BTreeMap::from(files));
        match self.claims.digest {
            Some(claimed) if claimed != digest => {
                let message = format!("the adapter's digest is {digest}, expected was {claimed}");
                Err(Refusal { found: Some(digest), ..Refusal::new(Reason::DigestMismatch, message) })
            }
            _ => Ok(Verified { digest, config: self.config, header, fitted, declared_base, weights_bytes: want }),
        }
    }

    /// Whether the header is still to come: what follows it costs nothing but the reading.
    pub fn is_in_header(&self) -> bool {
        matches!(self.stage, Stage::Header(_))
    }
}
