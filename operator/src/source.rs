//! From what a spec says about a source to a reader of it: the entry that allows it, and its credentials.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};
use lorafleet_artifact::{Digest, Reason, Scheme, SourceUri};
use lorafleet_crds::condition::Cause;
use lorafleet_crds::{SourceFile, StoreAccess, names};
use lorafleet_source::{
    Access, AdapterError, Credentials, ErrorKind, FileInfo, Listing, ReadLimits, SourceError, Sources,
};

use crate::context::Context;
use crate::hash::short_hash;
use crate::job::{Fault, FaultKind, Lane};
use crate::settings::Limits;

/// How to reach a source, as an entry of a spec says it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Door {
    /// Namespace of the Secret.
    pub namespace: String,
    pub prefix: String,
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub secret: Option<String>,
}

impl Door {
    /// Where reads through it wait.
    pub fn lane(&self) -> Lane {
        Lane { namespace: self.namespace.clone(), door: short_hash(self) }
    }

    pub fn new(namespace: &str, prefix: &str, access: &StoreAccess) -> Self {
        let StoreAccess { endpoint, region, credentials_secret_ref } = access.clone();
        Self {
            namespace: namespace.to_owned(),
            prefix: prefix.to_owned(),
            endpoint,
            region,
            secret: credentials_secret_ref.map(|secret| secret.name),
        }
    }

    /// All of it but the prefix: another one that is reached in the same way shows the same.
    pub fn store(&self) -> impl serde::Serialize {
        let Self { namespace, prefix: _, endpoint, region, secret } = self;
        (namespace, endpoint, region, secret)
    }
}

/// Doors that stay open for a while: many sources lie behind the same one.
#[derive(Default)]
pub struct OpenDoors(Mutex<HashMap<Door, (Instant, Arc<Sources>)>>);

/// How long a door stays open: a Secret that was changed counts after that at the latest, or after the first fault.
const DOOR_OPEN: Duration = Duration::from_secs(60);

impl OpenDoors {
    fn lock(&self) -> MutexGuard<'_, HashMap<Door, (Instant, Arc<Sources>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader for what is behind this door, and whether it was opened just now.
    pub async fn enter(&self, door: &Door, context: &Context) -> Result<(Arc<Sources>, bool), Fault> {
        if let Some(known) = self.known(door) {
            return Ok((known, false));
        }
        let sources = Arc::new(open(door, context).await?);
        self.lock().insert(door.clone(), (Instant::now(), sources.clone()));
        Ok((sources, true))
    }

    /// The files of a source. A fault closes the door.
    pub async fn list(&self, door: &Door, uri: &SourceUri, context: &Context) -> Result<Listing, ReadEnd> {
        let (sources, _) = self.enter(door, context).await.map_err(ReadEnd::Fault)?;
        let listing = sources.list(uri).await;
        if listing.is_err() {
            self.close(door, &sources);
        }
        Ok(listing?)
    }

    fn known(&self, door: &Door) -> Option<Arc<Sources>> {
        let mut doors = self.lock();
        doors.retain(|_, (since, _)| since.elapsed() < DOOR_OPEN);
        doors.get(door).map(|(_, sources)| sources.clone())
    }

    /// Unless somebody has opened it anew meanwhile.
    pub fn close(&self, door: &Door, sources: &Arc<Sources>) {
        self.lock().retain(|other, (_, known)| other != door || !Arc::ptr_eq(known, sources));
    }
}

/// Files as they are now, for a look; none if whoever reads the source will be refused: he says why.
///
/// # Errors
/// A fault that passes by itself says nothing of the source.
pub fn looked(listed: Result<Vec<SourceFile>, ReadEnd>) -> Result<Option<Vec<SourceFile>>, Fault> {
    match listed {
        Ok(files) => Ok(Some(files)),
        Err(ReadEnd::Fault(fault)) if !stalls(fault.kind) => Err(fault),
        Err(_) => Ok(None),
    }
}

/// Why a source is not read at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    pub cause: Cause,
    pub message: String,
}

/// The URI in its one normal form, if this version reads its scheme.
pub fn readable(uri: &str) -> Result<SourceUri, Closed> {
    let closed = |cause, message| Closed { cause, message };
    let uri: SourceUri =
        uri.parse().map_err(|refusal: lorafleet_artifact::Refusal| closed(Cause::SourceForbidden, refusal.message))?;
    if uri.scheme() != Scheme::S3 {
        let scheme = uri.scheme().as_str();
        return Err(closed(
            Cause::UnsupportedSource,
            format!("'{uri}': this version reads s3:// sources, not {scheme}://"),
        ));
    }
    Ok(uri)
}

/// Whether the cluster's caps leave a source open that is reached in this way. A prefix says nothing without the store that it is
/// in: whoever runs a store chooses the names of its buckets.
pub fn within_caps(uri: &SourceUri, access: &StoreAccess, caps: &[String]) -> Result<(), Closed> {
    if caps.is_empty() || caps.iter().any(|cap| opens(cap, uri, access.endpoint.as_deref())) {
        return Ok(());
    }
    let at = access.endpoint.as_ref().map(|endpoint| format!(" at {endpoint}")).unwrap_or_default();
    let message = format!("'{uri}'{at} is beyond the cluster's source caps: {}", caps.join(", "));
    Err(Closed { cause: Cause::SourceForbidden, message })
}

/// A cap is a prefix, and behind an `@` the endpoint of its store; without one it is AWS. One that cannot be read opens nothing.
fn opens(cap: &str, uri: &SourceUri, endpoint: Option<&str>) -> bool {
    let (prefix, store) = ["@http://", "@https://"]
        .iter()
        .find_map(|mark| cap.find(mark))
        .and_then(|at| Some((cap.get(..at)?, Some(cap.get(at + 1..)?))))
        .unwrap_or((cap, None));
    let same_store = match (store, endpoint) {
        (None, None) => true,
        (Some(store), Some(endpoint)) => {
            store.trim_end_matches('/').eq_ignore_ascii_case(endpoint.trim_end_matches('/'))
        }
        _ => false,
    };
    same_store && prefix.parse().is_ok_and(|prefix: SourceUri| uri.is_within(&prefix))
}

/// A reader for what is behind one door. The Secret is read now, so that a changed one counts at the next attempt.
pub async fn open(door: &Door, context: &Context) -> Result<Sources, Fault> {
    let missing = |message: String| Fault { kind: FaultKind::CredentialsMissing, message };
    let prefix: SourceUri =
        door.prefix.parse().map_err(|refusal: lorafleet_artifact::Refusal| missing(refusal.message))?;
    let credentials = match &door.secret {
        None if door.endpoint.is_some() => {
            let message = format!("'{prefix}' has an endpoint of its own: it needs a credentialsSecretRef");
            return Err(missing(message));
        }
        // The operator's own identity is nobody's to borrow, but where the cluster's owner said so.
        None if context.settings.source_caps.is_empty() && !context.settings.allow_ambient_credentials => {
            let message = format!(
                "'{prefix}' needs a credentialsSecretRef: the operator lends its own identity only with --allow-ambient-credentials or within a --source-cap"
            );
            return Err(missing(message));
        }
        None => Credentials::Ambient,
        Some(name) => credentials(&door.namespace, name, context).await?,
    };
    let access = Access { prefix, endpoint: door.endpoint.clone(), region: door.region.clone(), credentials };
    // Between two turns a read rests, and its time is no fault of the store's: its pace is held in each turn instead.
    let limits = ReadLimits { bytes_per_second_min: 0, interruptions: u32::MAX, ..ReadLimits::default() };
    Ok(Sources::new([access], limits))
}

async fn credentials(namespace: &str, name: &str, context: &Context) -> Result<Credentials, Fault> {
    let missing = |message: String| Fault { kind: FaultKind::CredentialsMissing, message };
    let secret = Api::<Secret>::namespaced(context.client.clone(), namespace)
        .get_opt(name)
        .await
        .map_err(|error| Fault {
            kind: FaultKind::Unavailable,
            message: format!("reading the Secret '{name}': {error}"),
        })?
        .ok_or_else(|| missing(format!("there is no Secret '{name}'")))?;
    let entry = |entry: &str| {
        let bytes = secret.data.as_ref()?.get(entry)?.0.clone();
        String::from_utf8(bytes).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let wanted = |key: &str| entry(key).ok_or_else(|| missing(format!("the Secret '{name}' has no entry '{key}'")));
    Ok(Credentials::Static {
        access_key_id: wanted(names::ACCESS_KEY_ID_ENTRY)?,
        secret_access_key: wanted(names::SECRET_ACCESS_KEY_ENTRY)?,
        session_token: entry(names::SESSION_TOKEN_ENTRY),
    })
}

/// What ended a read: a fault of the way, which is tried again, or a final answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadEnd {
    Fault(Fault),
    Refused {
        reason: String,
        message: String,
        /// Of what was read to the end.
        digest: Option<Digest>,
    },
}

impl From<AdapterError> for ReadEnd {
    fn from(error: AdapterError) -> Self {
        match error {
            AdapterError::Source(error) => error.into(),
            // Somebody may still put it there.
            AdapterError::Refused(refusal) if refusal.reason == Reason::NotFound => {
                Self::Fault(Fault { kind: FaultKind::NotFound, message: refusal.message })
            }
            AdapterError::Refused(refusal) => {
                Self::Refused { reason: refusal.reason.to_string(), message: refusal.message, digest: refusal.found }
            }
        }
    }
}

impl From<SourceError> for ReadEnd {
    fn from(error: SourceError) -> Self {
        let message = error.to_string();
        let fault = |kind| Self::Fault(Fault { kind, message: message.clone() });
        match error.kind {
            ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Changed => fault(FaultKind::Unavailable),
            ErrorKind::NotFound => fault(FaultKind::NotFound),
            ErrorKind::Forbidden => fault(FaultKind::AccessDenied),
            ErrorKind::Misconfigured => fault(FaultKind::Misconfigured),
            ErrorKind::NotAllowed | ErrorKind::TooLarge | ErrorKind::Unsupported => {
                Self::Refused { reason: error.kind.as_str().to_owned(), message, digest: None }
            }
        }
    }
}

/// The cause that a condition names for a fault.
pub fn cause(kind: FaultKind) -> Cause {
    match kind {
        FaultKind::Unavailable => Cause::SourceUnavailable,
        FaultKind::NotFound => Cause::SourceNotFound,
        FaultKind::AccessDenied => Cause::AccessDenied,
        FaultKind::CredentialsMissing => Cause::CredentialsMissing,
        FaultKind::Misconfigured => Cause::SourceMisconfigured,
    }
}

/// Whether a fault stays until somebody does something.
pub fn stalls(kind: FaultKind) -> bool {
    kind != FaultKind::Unavailable
}

/// Whose source it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Adapter,
    Base,
}

/// A fault for people: what to do about one that somebody must mend. It may be mended at the source, where nobody tells us:
/// it is looked for again.
pub fn words(fault: &Fault, whose: Whose) -> String {
    let Fault { kind, message } = fault;
    let (what, place) = match whose {
        Whose::Adapter => ("adapter", "the base's entry of adapterPolicy.allowedSources"),
        Whose::Base => ("base", "spec.source"),
    };
    let said = match kind {
        FaultKind::Unavailable => return message.clone(),
        FaultKind::NotFound => format!("there is no {what}: {message}"),
        FaultKind::AccessDenied => format!("{message}; look at the keys of {place}, and at what they allow"),
        FaultKind::CredentialsMissing => message.clone(),
        FaultKind::Misconfigured => format!("{message}; look at the bucket, and at endpoint and region of {place}"),
    };
    format!("{said}; tried again every {} s", Limits::DEFAULT.retry_absent.as_secs())
}

/// What is said of a source that is being read, or that waits behind so many others.
pub fn reading(before: usize) -> String {
    match before {
        0 => "reading the source".to_owned(),
        1 => "waits for its turn to be read: 1 read of its namespace came before it".to_owned(),
        _ => format!("waits for its turn to be read: {before} reads of its namespace came before it"),
    }
}

/// A file as a status names it, within the lengths of its schema: a store may choose any.
pub fn source_file(file: &FileInfo) -> SourceFile {
    let version = file.version.to_string().chars().take(1024).collect();
    SourceFile { name: file.name.chars().take(255).collect(), size_bytes: file.bytes, version: Some(version) }
}

/// The word that asks to resolve a source again, as a status can keep it: a long one by its hash.
pub fn resolve_at(object: &impl ResourceExt) -> Option<String> {
    let word = object.annotations().get(names::RESOLVE_AT_ANNOTATION)?;
    Some(if word.chars().count() <= 256 { word.clone() } else { short_hash(word) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_names_a_prefix_in_one_store() {
        let check = |cap: &str, uri: &str, endpoint: &str, open: bool| {
            let endpoint = (!endpoint.is_empty()).then(|| endpoint.to_owned());
            let access = StoreAccess { endpoint, ..StoreAccess::default() };
            let judged = within_caps(&uri.parse().unwrap(), &access, &[cap.to_owned()]);
            assert_eq!(judged.is_ok(), open, "{cap} {uri} {access:?}");
        };
        check("s3://adapters/", "s3://adapters/team/x", "", true);
        check("s3://adapters/team", "s3://adapters/team-b", "", false);
        // A store of one's own has a bucket of any name.
        check("s3://adapters/", "s3://adapters/team/x", "http://mine:9000", false);
        let cap = "s3://adapters/@https://s3.example:9000";
        check(cap, "s3://adapters/team/x", "https://s3.example:9000", true);
        check(cap, "s3://adapters/team/x", "https://S3.Example:9000/", true);
        check(cap, "s3://adapters/team/x", "http://s3.example:9000", false);
        check(cap, "s3://adapters/team/x", "https://s3.example:9000.mine", false);
        check(cap, "s3://adapters/team/x", "", false);
        check(cap, "s3://other/x", "https://s3.example:9000", false);
        check("s3://adapters@http://s3", "s3://adapters/x", "http://s3/", true);
        check("nonsense", "s3://adapters/x", "", false);
        check("s3://adapters/@ftp://s3", "s3://adapters/x", "", false);
        assert_eq!(within_caps(&"s3://a/b".parse().unwrap(), &StoreAccess::default(), &[]), Ok(()));
    }

    #[tokio::test]
    async fn an_endpoint_that_is_none_is_no_matter_of_keys() {
        let prefix: SourceUri = "s3://adapters/team".parse().unwrap();
        let credentials = Credentials::Static {
            access_key_id: "id".to_owned(),
            secret_access_key: "key".to_owned(),
            session_token: None,
        };
        let access =
            Access { prefix: prefix.clone(), endpoint: Some("s3.example:9000".to_owned()), region: None, credentials };
        let error = Sources::new([access], ReadLimits::default()).list(&prefix).await.unwrap_err();
        let ReadEnd::Fault(fault) = ReadEnd::from(error) else { panic!("it is not final") };
        assert_eq!(cause(fault.kind), Cause::SourceMisconfigured);
        let said = words(&fault, Whose::Base);
        assert!(
            said.starts_with("the endpoint 's3.example:9000' of the source prefix 's3://adapters/team' is no"),
            "{said}"
        );
        assert!(
            said.ends_with("look at the bucket, and at endpoint and region of spec.source; tried again every 30 s")
        );
    }
}
