//! Objects of S3 and of stores that speak its language.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_credential_types::provider::{self, ProvideCredentials, future};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextMut;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, ConfigBag, Intercept, Region, ResponseChecksumValidation, RuntimeComponents,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::{ByteStream, DateTime, SdkBody};
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use lorafleet_artifact::{SourceUri, check_file_name};

use crate::access::{Access, Credentials, ReadLimits};
use crate::error::{ErrorKind, SourceError};
use crate::listing::{FileInfo, Listing, Version, bounded};

/// Where neither the access nor the surroundings name a region; stores that are not AWS do not care.
const REGION_DEFAULT: &str = "us-east-1";
/// How long keys that were read from a folder are used before they are read again.
const KEYS_FRESH: Duration = Duration::from_secs(300);

pub(crate) async fn client(access: &Access, limits: &ReadLimits) -> Result<Client, SourceError> {
    let endpoint = access.endpoint.clone().or_else(|| endpoint_of_surroundings(&access.credentials));
    check_endpoint(&access.prefix, endpoint.as_deref())?;
    let http = aws_smithy_http_client::Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).build_https();
    let timeouts = TimeoutConfig::builder().connect_timeout(limits.connect).read_timeout(limits.answer).build();
    let retries = RetryConfig::standard().with_max_attempts(limits.attempts).with_initial_backoff(limits.backoff);
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http)
        .timeout_config(timeouts)
        .retry_config(retries)
        // A stream's stall is watched by `Download`, which goes on where it was cut.
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    loader = match (&access.region, &access.endpoint) {
        (Some(region), _) => loader.region(Region::new(region.clone())),
        (None, Some(_)) => loader.region(Region::from_static(REGION_DEFAULT)),
        // Not the machine's metadata service: where there is none, asking takes seconds.
        (None, None) => loader.region(
            RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new())
                .or_else(ProfileFileRegionProvider::new())
                .or_else(Region::from_static(REGION_DEFAULT)),
        ),
    };
    loader = match &access.credentials {
        Credentials::Ambient => loader,
        Credentials::Static { access_key_id, secret_access_key, session_token } => {
            let token = session_token.clone();
            let keys = aws_credential_types::Credentials::new(access_key_id, secret_access_key, token, None, "static");
            loader.credentials_provider(keys)
        }
        Credentials::Dir(path) => loader.credentials_provider(KeyFolder { path: path.clone() }),
    };
    let shared = loader.load().await;
    let mut config = aws_sdk_s3::config::Builder::from(&shared)
        // Everything is verified by its SHA-256 in the end.
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = endpoint {
        config = config.endpoint_url(endpoint).force_path_style(true);
    }
    Ok(Client::from_conf(config.build()))
}

/// AWS's own variables, for whoever uses the surroundings' keys. The SDK reads them too, but would address buckets by host.
fn endpoint_of_surroundings(credentials: &Credentials) -> Option<String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let ambient = matches!(credentials, Credentials::Ambient);
    ambient.then(|| variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"))).flatten()
}

fn check_endpoint(prefix: &SourceUri, endpoint: Option<&str>) -> Result<(), SourceError> {
    let Some(endpoint) = endpoint else { return Ok(()) };
    let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    if host.is_some_and(|host| !host.is_empty() && !host.starts_with('/')) {
        return Ok(());
    }
    let message = format!("the endpoint '{endpoint}' of the source prefix '{prefix}' is no http:// or https:// URL");
    Err(SourceError::new(ErrorKind::Misconfigured, message))
}

/// Keys in a folder, as a mounted Secret is one.
#[derive(Debug)]
struct KeyFolder {
    path: PathBuf,
}

impl KeyFolder {
    async fn read(&self) -> provider::Result {
        let id = read_key(&self.path, "access-key-id").await?;
        let secret = read_key(&self.path, "secret-access-key").await?;
        let token = self.path.join("session-token");
        let token = match tokio::fs::try_exists(&token).await {
            Ok(true) => Some(read_key(&self.path, "session-token").await?),
            _ => None,
        };
        let until = SystemTime::now() + KEYS_FRESH;
        Ok(aws_credential_types::Credentials::new(id, secret, token, Some(until), "folder"))
    }
}

async fn read_key(folder: &Path, name: &str) -> Result<String, provider::error::CredentialsError> {
    let path = folder.join(name);
    let text = tokio::fs::read_to_string(&path).await.map_err(|error| {
        provider::error::CredentialsError::not_loaded(format!("reading {}: {error}", path.display()))
    })?;
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}

impl ProvideCredentials for KeyFolder {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.read())
    }
}

/// Everything but the bytes of objects: listings and errors are read whole before they are understood.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Of a listing in all.
const LISTING_TIME_MAX: Duration = Duration::from_secs(60);

/// Bounds what a store may answer.
#[derive(Debug)]
struct Bounded {
    /// What is good comes as a stream, which its reader bounds.
    errors_only: bool,
}

impl Intercept for Bounded {
    fn name(&self) -> &'static str {
        "Bounded"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let answer = context.response_mut();
        if !(self.errors_only && answer.status().is_success()) {
            let body = std::mem::replace(answer.body_mut(), SdkBody::empty());
            *answer.body_mut() = SdkBody::from_body_1_x(http_body_util::Limited::new(body, ANSWER_BYTES_MAX));
        }
        Ok(())
    }
}

pub(crate) async fn list(client: &Client, uri: &SourceUri, limits: &ReadLimits) -> Result<Listing, SourceError> {
    match tokio::time::timeout(LISTING_TIME_MAX, list_pages(client, uri, limits)).await {
        Ok(listing) => listing,
        Err(_) => {
            let message = format!("listing '{uri}' did not end within {LISTING_TIME_MAX:?}");
            Err(SourceError::new(ErrorKind::Timeout, message))
        }
    }
}

async fn list_pages(client: &Client, uri: &SourceUri, limits: &ReadLimits) -> Result<Listing, SourceError> {
    let path = uri.path();
    // The slash keeps `adapters/10` out of `adapters/1`, the delimiter keeps deeper folders out.
    let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
    let (mut files, mut entries) = (Vec::new(), 0);
    let mut token = None;
    loop {
        let page = client
            .list_objects_v2()
            .bucket(uri.authority())
            .prefix(&prefix)
            .delimiter("/")
            .set_continuation_token(token.clone())
            .customize()
            .interceptor(Bounded { errors_only: false })
            .send()
            .await
            .map_err(|error| failed("listing", uri, error))?;
        for object in page.contents() {
            let Some(name) = object.key().and_then(|key| key.strip_prefix(prefix.as_str())) else { continue };
            // The folder's own marker has no name; what cannot be a plain name is no file of an adapter or a model.
            if check_file_name(name).is_err() {
                continue;
            }
            let bytes = object.size().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
            files.push(FileInfo {
                name: name.to_owned(),
                bytes,
                version: version(object.e_tag(), object.last_modified()),
            });
        }
        // A page holds folders as well, and many of them may stand before the first file.
        let here = page.contents().len() + page.common_prefixes().len();
        entries += here;
        bounded(uri, files.len(), entries, limits)?;
        let next = page.next_continuation_token().filter(|_| page.is_truncated() == Some(true));
        match next {
            None => break,
            Some(next) if here == 0 || token.as_deref() == Some(next) => {
                let message = format!("listing '{uri}': a page leads nowhere (an empty one, or the same once more)");
                return Err(SourceError::new(ErrorKind::Unavailable, message));
            }
            Some(next) => token = Some(next.to_owned()),
        }
    }
    if files.is_empty() && !path.is_empty() {
        return single(client, uri).await;
    }
    Ok(Listing { uri: uri.clone(), files, single: false })
}

/// The URI as one object.
async fn single(client: &Client, uri: &SourceUri) -> Result<Listing, SourceError> {
    let head = client.head_object().bucket(uri.authority()).key(uri.path()).send().await;
    let head = head.map_err(|error| failed("looking for", uri, error))?;
    let bytes = head.content_length().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
    let name = uri.segments().last().cloned().unwrap_or_default();
    let file = FileInfo { name, bytes, version: version(head.e_tag(), head.last_modified()) };
    Ok(Listing { uri: uri.clone(), files: vec![file], single: true })
}

/// The body of a part of one file, if it is still the listed one.
pub(crate) async fn get(
    client: &Client,
    listing: &Listing,
    file: &FileInfo,
    range: Range<u64>,
) -> Result<ByteStream, SourceError> {
    let uri = if listing.single { listing.uri.clone() } else { listing.uri.join(&file.name)? };
    let whole = range == (0..file.bytes);
    let part = (!whole).then(|| format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
    let answer = client
        .get_object()
        .bucket(uri.authority())
        .key(uri.path())
        .set_range(part)
        .set_if_match(file.version.tag.clone())
        .customize()
        .interceptor(Bounded { errors_only: true })
        .send()
        .await
        .map_err(|error| failed("reading", &uri, error))?;
    let now = version(answer.e_tag(), answer.last_modified());
    if file.version.contradicts(&now) {
        let was = &file.version;
        let message = format!("'{uri}' changed while it was read: version {was}, now {now}");
        return Err(SourceError::new(ErrorKind::Changed, message));
    }
    let wanted = range.end - range.start;
    if answer.content_length().is_some_and(|length| u64::try_from(length) != Ok(wanted)) {
        let length = answer.content_length().unwrap_or(0);
        let message = format!("'{uri}' changed while it was read: {wanted} bytes were asked for, {length} came");
        return Err(SourceError::new(ErrorKind::Changed, message));
    }
    Ok(answer.body)
}

fn version(tag: Option<&str>, modified: Option<&DateTime>) -> Version {
    Version { tag: tag.map(str::to_owned), modified_s: modified.map(DateTime::secs) }
}

/// What went wrong, by what the store answered. A store names its errors; what answers without such a name speaks another
/// language than S3's.
fn failed<E>(doing: &str, uri: &SourceUri, error: SdkError<E>) -> SourceError
where
    E: std::error::Error + ProvideErrorMetadata + Send + Sync + 'static,
{
    let status = error.raw_response().map(|response| response.status().as_u16());
    let code = error.code().map(str::to_owned);
    let kind = match &error {
        SdkError::TimeoutError(_) => ErrorKind::Timeout,
        SdkError::DispatchFailure(failure) if failure.is_timeout() => ErrorKind::Timeout,
        // No connection was tried: the keys could not be found or read.
        SdkError::DispatchFailure(failure) if failure.is_user() => ErrorKind::Misconfigured,
        SdkError::ConstructionFailure(_) => ErrorKind::Misconfigured,
        // It broke off.
        SdkError::ResponseError(_) => ErrorKind::Unavailable,
        _ => kind_of_answer(code.as_deref(), status),
    };
    let said = match (code.as_deref().map(short), status, error.message().map(short)) {
        (Some(code), Some(status), Some(message)) if message != code => {
            format!(" (the store says {code}, HTTP {status}: {message})")
        }
        (Some(code), Some(status), _) => format!(" (the store says {code}, HTTP {status})"),
        (None, Some(status), _) if matches!(error, SdkError::ServiceError(_)) => {
            format!(" (HTTP {status}, and no answer of an S3 store)")
        }
        (None, Some(status), _) => format!(" (HTTP {status})"),
        _ => String::new(),
    };
    let pointer = error.raw_response().and_then(pointer).unwrap_or_default();
    let failed = SourceError::new(kind, format!("{doing} '{uri}'{said}{pointer}"));
    // What the store itself said stands in the message already.
    if code.is_some() {
        return failed;
    }
    failed.because(error.into_source().unwrap_or_else(|error| Box::new(error)))
}

fn kind_of_answer(code: Option<&str>, status: Option<u16>) -> ErrorKind {
    match (code, status) {
        (Some("NoSuchBucket" | "NoSuchKey" | "NotFound"), _) => ErrorKind::NotFound,
        (Some("PreconditionFailed"), _) | (_, Some(412 | 416)) => ErrorKind::Changed,
        // Keys that were good once; the other answers with 400 are to what cannot work.
        (Some("ExpiredToken" | "InvalidToken" | "TokenRefreshRequired"), _) | (_, Some(401 | 403)) => {
            ErrorKind::Forbidden
        }
        // Not this region, not this bucket's name, not this door.
        (_, Some(301 | 302 | 307 | 308 | 400 | 405)) | (None, Some(200 | 404)) => ErrorKind::Misconfigured,
        (Some(_), Some(404)) => ErrorKind::NotFound,
        _ => ErrorKind::Unavailable,
    }
}

/// Characters of a store's words that are repeated.
const WORDS_CHARACTERS_MAX: usize = 300;

/// A store's words in one line.
fn short(words: &str) -> String {
    words.chars().map(|word| if word.is_control() { ' ' } else { word }).take(WORDS_CHARACTERS_MAX).collect()
}

/// Where the store says that the bucket is, or what asks should go.
fn pointer(answer: &HttpResponse) -> Option<String> {
    let header = |name| answer.headers().get(name).map(short);
    let region = header("x-amz-bucket-region").map(|region| format!("; the bucket is in the region '{region}'"));
    region.or_else(|| header("location").map(|place| format!("; it points to '{place}'")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// As a bucket of AWS is written down by one who relies on the default.
    #[tokio::test]
    async fn a_bucket_without_a_region_has_the_default_one() {
        let credentials = Credentials::Static {
            access_key_id: "id".to_owned(),
            secret_access_key: "key".to_owned(),
            session_token: None,
        };
        let access = |region: Option<&str>| Access {
            prefix: "s3://bucket/adapters".parse().unwrap(),
            endpoint: None,
            region: region.map(str::to_owned),
            credentials: credentials.clone(),
        };
        let region = async |access: &Access| {
            let client = client(access, &ReadLimits::default()).await.unwrap();
            client.config().region().map(ToString::to_string)
        };
        assert_eq!(region(&access(Some("eu-west-1"))).await.as_deref(), Some("eu-west-1"));
        let surroundings = std::env::var("AWS_REGION").or_else(|_| std::env::var("AWS_DEFAULT_REGION"));
        let expected = surroundings.unwrap_or_else(|_| "us-east-1".to_owned());
        assert_eq!(region(&access(None)).await, Some(expected));
    }
}
