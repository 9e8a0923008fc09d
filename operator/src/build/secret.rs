//! The keys between gateway, operator and engine.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use lorafleet_crds::{ServingPool, names};

use super::metadata;

/// The keys of one pool's engine pods.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    pub admin: String,
    pub api: String,
}

/// Keys are never printed.
impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    /// Two new keys of 32 random bytes each.
    ///
    /// # Errors
    /// If the system has no randomness to give.
    pub fn random() -> Result<Self, getrandom::Error> {
        Ok(Self { admin: random_key()?, api: random_key()? })
    }

    /// What the Secret holds: of each entry the first line. While keys are rotated others follow, which engines take as well.
    ///
    /// # Errors
    /// The name of the first entry that is missing, empty or no text.
    pub fn read(secret: &Secret) -> Result<Self, &'static str> {
        let first = |name: &str| {
            let bytes = &secret.data.as_ref()?.get(name)?.0;
            let mut keys = std::str::from_utf8(bytes).ok()?.lines().map(str::trim);
            keys.find(|key| !key.is_empty()).map(str::to_owned)
        };
        let entry = |name: &'static str| first(name).ok_or(name);
        Ok(Self { admin: entry(names::ADMIN_KEY_ENTRY)?, api: entry(names::API_KEY_ENTRY)? })
    }
}

/// The Secret of a pool with these keys.
pub fn keys_secret(pool: &ServingPool, keys: &Keys) -> Secret {
    let entry = |name: &str, key: &str| (name.to_owned(), ByteString(key.as_bytes().to_vec()));
    Secret {
        metadata: metadata(pool, names::engine_keys(&pool.name_any()), names::ENGINE_COMPONENT),
        type_: Some("Opaque".to_owned()),
        data: Some([entry(names::ADMIN_KEY_ENTRY, &keys.admin), entry(names::API_KEY_ENTRY, &keys.api)].into()),
        ..Secret::default()
    }
}

fn random_key() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_of_an_entry_is_the_one_that_is_sent() {
        let read = |admin: &str, api: &str| {
            let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
            let data = [(names::ADMIN_KEY_ENTRY, bytes(admin)), (names::API_KEY_ENTRY, bytes(api))];
            let data = data.map(|(name, bytes)| (name.to_owned(), bytes)).into();
            Keys::read(&Secret { data: Some(data), ..Secret::default() }).map(|keys| (keys.admin, keys.api))
        };
        let keys = |admin: &str, api: &str| Ok((admin.to_owned(), api.to_owned()));
        assert_eq!(read("a", "b\n"), keys("a", "b"));
        assert_eq!(read("a\nold", "\r\n b \r\nold\n"), keys("a", "b"));
        assert_eq!(read("a", " \n\n"), Err(names::API_KEY_ENTRY));
        assert_eq!(read("", "b"), Err(names::ADMIN_KEY_ENTRY));
    }
}
