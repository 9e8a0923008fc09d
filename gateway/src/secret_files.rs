//! Reading mounted Secrets, again and again: a key that is rotated or withdrawn counts within seconds, without a restart.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use tokio::sync::watch;

use crate::keys::{CLIENTS_MAX, ENTRY_BYTES_MAX, Keys};
use crate::metrics::Metrics;
use crate::vital::Vital;

/// Time between two readings.
const PERIOD: Duration = Duration::from_secs(2);
const ENGINE_KEY_BYTES_MAX: usize = 4 << 10;

/// Reads the API keys' folder now, and keeps what it says in the channel. Fails only if it cannot be read at the start:
/// later the last keys stay.
pub async fn watch_api_keys(
    folder: PathBuf,
    namespace: String,
    metrics: Arc<Metrics>,
    vital: &Vital,
) -> io::Result<watch::Receiver<Arc<Keys>>> {
    let mut entries = read_folder(folder.clone()).await?;
    let (sender, receiver) = watch::channel(Arc::new(parse(&entries, &namespace, &metrics)));
    vital.spawn("API keys", async move {
        while !sender.is_closed() {
            tokio::time::sleep(PERIOD).await;
            match read_folder(folder.clone()).await {
                Ok(now) if now == entries => {}
                Ok(now) => {
                    sender.send_replace(Arc::new(parse(&now, &namespace, &metrics)));
                    entries = now;
                }
                Err(error) => {
                    tracing::error!(folder = %folder.display(), %error, "the API keys cannot be read: the last ones stay");
                }
            }
        }
    });
    Ok(receiver)
}

/// Reads the engines' key now, and keeps `Authorization` for it in the channel.
pub async fn watch_engine_key(file: PathBuf, vital: &Vital) -> io::Result<watch::Receiver<Option<HeaderValue>>> {
    let mut sent = authorization(&read_engine_key(file.clone()).await?)?;
    let (sender, receiver) = watch::channel(Some(sent.clone()));
    vital.spawn("engine key", async move {
        while !sender.is_closed() {
            tokio::time::sleep(PERIOD).await;
            match read_engine_key(file.clone()).await.and_then(|now| authorization(&now)) {
                Ok(now) if now == sent => {}
                Ok(now) => {
                    tracing::info!("the engines' key has changed");
                    sender.send_replace(Some(now.clone()));
                    sent = now;
                }
                Err(error) => tracing::error!(file = %file.display(), %error, "the engines' key cannot be read"),
            }
        }
    });
    Ok(receiver)
}

fn parse(entries: &BTreeMap<String, Vec<u8>>, namespace: &str, metrics: &Metrics) -> Keys {
    let (keys, errors) = Keys::parse(entries, namespace);
    for error in &errors {
        tracing::error!(%error, "an entry of the API keys does not count");
    }
    tracing::info!(clients = keys.len(), bad_entries = errors.len(), "API keys read");
    metrics.clients.set(i64::try_from(keys.len()).unwrap_or(i64::MAX));
    metrics.bad_key_entries.set(i64::try_from(errors.len()).unwrap_or(i64::MAX));
    keys
}

/// The first key of the file is sent. While keys are rotated others follow, one a line, which engines take as well.
fn authorization(keys: &[u8]) -> io::Result<HeaderValue> {
    let mut keys = keys.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let key = keys.find(|key| !key.is_empty()).ok_or_else(|| invalid("the file holds no key"))?;
    let value = [b"Bearer ".as_slice(), key].concat();
    let mut value =
        HeaderValue::from_bytes(&value).map_err(|_| invalid("the key has characters that no header may have"))?;
    value.set_sensitive(true);
    Ok(value)
}

async fn read_engine_key(file: PathBuf) -> io::Result<Vec<u8>> {
    in_background(move || read_bounded(&file, ENGINE_KEY_BYTES_MAX)).await
}

async fn read_folder(folder: PathBuf) -> io::Result<BTreeMap<String, Vec<u8>>> {
    in_background(move || read_entries(&folder)).await
}

async fn in_background<T: Send + 'static>(read: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
}

/// Entries by file name. A mounted Secret's own links (`..data`) are passed over; each entry is a link to a file.
fn read_entries(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut entries = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("..") || !fs::metadata(entry.path())?.is_file() {
            continue;
        }
        if entries.len() > CLIENTS_MAX {
            return Err(invalid(&format!("more than {CLIENTS_MAX} entries")));
        }
        // One byte more than allowed, so that too large an entry is seen as such.
        entries.insert(name, read_up_to(&entry.path(), ENTRY_BYTES_MAX + 1)?);
    }
    Ok(entries)
}

fn read_bounded(file: &Path, bytes_max: usize) -> io::Result<Vec<u8>> {
    let bytes = read_up_to(file, bytes_max + 1)?;
    if bytes.len() > bytes_max {
        return Err(invalid(&format!("the file is above the limit of {bytes_max} bytes")));
    }
    Ok(bytes)
}

fn read_up_to(file: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    fs::File::open(file)?.take(bytes as u64).read_to_end(&mut read)?;
    Ok(read)
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_of_the_file_is_sent() {
        for (file, sent) in [
            (&b"one"[..], Some("Bearer one")),
            (b"one\n", Some("Bearer one")),
            (b"\n \r\n one \r\ntwo\n", Some("Bearer one")),
            (b"two\none", Some("Bearer two")),
            (b"", None),
            (b" \n\n", None),
            (b"o\x01ne\ntwo", None),
        ] {
            let value = authorization(file).ok();
            assert_eq!(value.as_ref().map(|value| value.to_str().unwrap()), sent, "{file:?}");
        }
    }
}
