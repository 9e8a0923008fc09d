//! What the owner of a base lets adapters be.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::fit::Fitted;
use crate::reason::{Reason, Refusal, excerpt};
use crate::safetensors::{BASE_DIGEST_KEY, Safetensors};

/// Limits of `adapterPolicy` and of an engine's command line. Empty lists and `None` do not limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Policy {
    pub max_rank: Option<u32>,
    pub allowed_ranks: Vec<u32>,
    /// Names as `target_modules` has them: `q_proj`.
    pub allowed_target_modules: Vec<String>,
    /// Of the weights file.
    pub max_adapter_bytes: u64,
    /// Refuse adapters whose digest was not given by who enrols them.
    pub require_digest: bool,
    /// Refuse adapters that do not say which base they were made for.
    pub require_base_digest: bool,
    /// Digests that count as this base. Empty: no claim can be checked, and none is.
    pub identities: Vec<Digest>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            max_rank: None,
            allowed_ranks: Vec::new(),
            allowed_target_modules: Vec::new(),
            max_adapter_bytes: 2 << 30,
            require_digest: false,
            require_base_digest: true,
            identities: Vec::new(),
        }
    }
}

/// What the one who enrols an adapter says about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    pub digest: Option<Digest>,
    /// Goes before what the file itself says.
    pub base_digest: Option<Digest>,
}

/// What a policy judges of an adapter. Kept of one that was read, it lets another policy judge it without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Traits {
    /// The ranks that modules of each kind have, ascending: `q_proj: [8, 16]`.
    pub ranks: BTreeMap<String, Vec<u32>>,
    /// The base that it says it was made for.
    #[serde(default)]
    pub base_digest: Option<Digest>,
    /// Of the weights file.
    pub weights_bytes: u64,
}

impl Traits {
    pub(crate) fn new(fitted: &Fitted, base_digest: Option<Digest>, weights_bytes: u64) -> Self {
        let mut ranks = BTreeMap::<String, Vec<u32>>::new();
        for module in &fitted.modules {
            ranks.entry(module.module.kind.name().to_owned()).or_default().push(module.rank);
        }
        for ranks in ranks.values_mut() {
            ranks.sort_unstable();
            ranks.dedup();
        }
        Self { ranks, base_digest, weights_bytes }
    }

    /// The largest rank of each kind of module.
    pub fn ranks_max(&self) -> BTreeMap<String, u32> {
        let max = |(kind, ranks): (&String, &Vec<u32>)| Some((kind.clone(), ranks.iter().max().copied()?));
        self.ranks.iter().filter_map(max).collect()
    }

    /// The largest rank of any module.
    pub fn rank_max(&self) -> u32 {
        self.ranks.values().flatten().max().copied().unwrap_or_default()
    }
}

impl Policy {
    /// Judges an adapter by what was found in it before: the same verdict as over its bytes. The message may name a kind of
    /// module where the bytes would have named one module.
    ///
    /// # Errors
    /// TooLarge, BaseUnknown, BaseMismatch, RankTooHigh, RankNotAllowed or ModuleNotAllowed.
    pub fn check_traits(&self, traits: &Traits) -> Result<(), Refusal> {
        self.check_size(traits.weights_bytes)?;
        self.check_base(traits.base_digest)?;
        let mut ranks = traits.ranks.iter().flat_map(|(kind, ranks)| ranks.iter().map(move |rank| (kind, *rank)));
        ranks.try_for_each(|(kind, rank)| self.check_module(kind, kind, rank))
    }

    /// # Errors
    /// TooLarge.
    pub fn check_size(&self, weights_bytes: u64) -> Result<(), Refusal> {
        if weights_bytes > self.max_adapter_bytes {
            let limit = self.max_adapter_bytes;
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("adapter_model.safetensors has {weights_bytes} bytes, the limit is {limit}"),
            ));
        }
        Ok(())
    }

    /// # Errors
    /// DigestMismatch if a digest is required and none was given.
    pub fn check_claims(&self, claims: &Claims) -> Result<(), Refusal> {
        if self.require_digest && claims.digest.is_none() {
            return Err(Refusal::new(
                Reason::DigestMismatch,
                "the policy requires a digest (requireDigest), and the adapter was enrolled without one",
            ));
        }
        Ok(())
    }

    /// Judges the base that an adapter says it was made for.
    ///
    /// # Errors
    /// BaseUnknown or BaseMismatch.
    pub fn check_base(&self, declared: Option<Digest>) -> Result<(), Refusal> {
        match declared {
            None if self.require_base_digest => Err(Refusal::new(
                Reason::BaseUnknown,
                format!(
                    "the adapter does not say which base it was made for: neither baseModelDigest nor the metadata key '{BASE_DIGEST_KEY}' is given"
                ),
            )),
            None => Ok(()),
            Some(digest) if self.identities.is_empty() || self.identities.contains(&digest) => Ok(()),
            Some(digest) => {
                let known: Vec<String> = self.identities.iter().take(8).map(Digest::to_string).collect();
                Err(Refusal::new(
                    Reason::BaseMismatch,
                    format!("the adapter was made for the base {digest}, this base is {}", known.join(" or ")),
                ))
            }
        }
    }

    /// # Errors
    /// RankTooHigh, RankNotAllowed or ModuleNotAllowed; the first module that breaks a limit is named.
    pub fn check_fitted(&self, fitted: &Fitted) -> Result<(), Refusal> {
        fitted.modules.iter().try_for_each(|module| {
            self.check_module(&module.module.to_string(), module.module.kind.name(), module.rank)
        })
    }

    /// The same where only the largest rank of each kind of module is known: it may pass and still be refused when every
    /// module is looked at.
    ///
    /// # Errors
    /// As [`Self::check_fitted`].
    pub fn check_ranks<'a>(&self, ranks: impl IntoIterator<Item = (&'a String, &'a u32)>) -> Result<(), Refusal> {
        ranks.into_iter().try_for_each(|(kind, rank)| self.check_module(kind, kind, *rank))
    }

    fn check_module(&self, name: &str, kind: &str, rank: u32) -> Result<(), Refusal> {
        if let Some(limit) = self.max_rank.filter(|limit| rank > *limit) {
            return Err(Refusal::new(Reason::RankTooHigh, format!("'{name}' has rank {rank}, the limit is {limit}")));
        }
        if !self.allowed_ranks.is_empty() && !self.allowed_ranks.contains(&rank) {
            let allowed = &self.allowed_ranks;
            return Err(Refusal::new(
                Reason::RankNotAllowed,
                format!("'{name}' has rank {rank}, allowed are {allowed:?}"),
            ));
        }
        if !self.allowed_target_modules.is_empty() && !self.allowed_target_modules.iter().any(|name| name == kind) {
            let allowed = excerpt(&self.allowed_target_modules.join(", "), 200);
            return Err(Refusal::new(
                Reason::ModuleNotAllowed,
                format!("the adapter changes '{name}', allowed target modules are {allowed}"),
            ));
        }
        Ok(())
    }
}

impl Claims {
    /// The base that an adapter was made for, as its owner says it, else as the file's metadata does.
    ///
    /// # Errors
    /// Malformed if the metadata says something that is no digest.
    pub fn base(&self, header: &Safetensors) -> Result<Option<Digest>, Refusal> {
        self.base_digest.map_or_else(|| declared_base(header), |digest| Ok(Some(digest)))
    }
}

/// What the file's metadata says about its base.
///
/// # Errors
/// Malformed if it says something that is no digest.
pub fn declared_base(header: &Safetensors) -> Result<Option<Digest>, Refusal> {
    let Some(text) = header.metadata(BASE_DIGEST_KEY) else { return Ok(None) };
    let digest =
        text.parse().map_err(|error| Refusal::malformed(format!("metadata key '{BASE_DIGEST_KEY}': {error}")))?;
    Ok(Some(digest))
}
