//! Names: what clients ask for, what our objects are called, and how they are labelled.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use lorafleet_artifact::Digest;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest served name, in characters.
pub const SERVED_NAME_LENGTH_MAX: usize = 128;

/// Digits of a digest that may follow `@` in a `model`.
pub const VERSION_DIGITS_MIN: usize = 12;
pub const VERSION_DIGITS_MAX: usize = 64;

/// Label of every object of a pool; its value is the pool's name.
pub const POOL_LABEL: &str = "lorafleet.dev/pool";
/// Kubernetes' recommended labels, as far as we set them.
pub const NAME_LABEL: &str = "app.kubernetes.io/name";
pub const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";
/// Value of `managed-by` on everything that the operator makes.
pub const MANAGED_BY: &str = "lorafleet-operator";
/// Value of `component` on engine pods.
pub const ENGINE_COMPONENT: &str = "engine";
/// Value of `component` on gateway pods.
pub const GATEWAY_COMPONENT: &str = "gateway";

/// Annotation of `BaseModel` and `LoraAdapter`: a change of its value resolves the source again.
pub const RESOLVE_AT_ANNOTATION: &str = "lorafleet.dev/resolve-at";

/// Entries of the Secret [`engine_keys`].
pub const ADMIN_KEY_ENTRY: &str = "admin-key";
pub const API_KEY_ENTRY: &str = "api-key";

/// Entries of a credentials Secret.
pub const ACCESS_KEY_ID_ENTRY: &str = "access-key-id";
pub const SECRET_ACCESS_KEY_ENTRY: &str = "secret-access-key";
pub const SESSION_TOKEN_ENTRY: &str = "session-token";

/// Deployment, headless Service and ConfigMap of a pool's engine pods.
pub fn engine(pool: &str) -> String {
    format!("{pool}-engine")
}

/// Deployment, Service, ServiceAccount and RoleBinding of a pool's gateway.
pub fn gateway(pool: &str) -> String {
    format!("{pool}-gateway")
}

/// Secret with the keys of a pool's engine pods.
pub fn engine_keys(pool: &str) -> String {
    format!("{pool}-engine-keys")
}

/// The name that means one version and no other: `<name>@<digest12>`.
pub fn versioned(name: &str, digest: &Digest) -> String {
    format!("{name}@{}", digest.short())
}

/// Name and version of a `model`: what stands before and after its last `@`.
pub fn asked(model: &str) -> (&str, Option<&str>) {
    match model.rsplit_once('@') {
        Some((name, version)) => (name, Some(version)),
        None => (model, None),
    }
}

/// The first hex digits of the digest that a version asks for, with or without `sha256:` before them. `None` if they are
/// too few, too many, or no lower-case hex digits.
pub fn version_digits(version: &str) -> Option<&str> {
    let digits = version.strip_prefix("sha256:").unwrap_or(version);
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let good = (VERSION_DIGITS_MIN..=VERSION_DIGITS_MAX).contains(&digits.len()) && digits.bytes().all(hex);
    good.then_some(digits)
}

/// What clients put into `model`: letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit.
///
/// Neither `@` (which separates the digest) nor `/` (which separates the namespace) can be part of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdapterName(String);

/// Why a text is not an [`AdapterName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("a name has 1 to {SERVED_NAME_LENGTH_MAX} characters, '{0}' has {1}")]
    Length(String, usize),
    #[error("a name has only letters, digits, '-', '_' and '.', and begins and ends with a letter or digit: '{0}'")]
    Characters(String),
}

impl AdapterName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for AdapterName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shown = || text.chars().take(SERVED_NAME_LENGTH_MAX).collect::<String>();
        let length = text.chars().count();
        if length == 0 || length > SERVED_NAME_LENGTH_MAX {
            return Err(NameError::Length(shown(), length));
        }
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let outer = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = text.as_bytes();
        if !bytes.iter().copied().all(inner) || !outer(bytes.first()) || !outer(bytes.last()) {
            return Err(NameError::Characters(shown()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for AdapterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for AdapterName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for AdapterName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for AdapterName {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "AdapterName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "minLength": 1,
            "maxLength": SERVED_NAME_LENGTH_MAX,
            "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_the_beginning_of_a_digest() {
        let whole = "0123456789ab".repeat(5) + "cdef";
        assert_eq!(asked("team/support@0123"), ("team/support", Some("0123")));
        assert_eq!((asked("a@b@c"), asked("a"), asked("@")), (("a@b", Some("c")), ("a", None), ("", Some(""))));
        for good in ["0123456789ab", "0123456789abc", &whole] {
            assert_eq!(version_digits(good), Some(good));
            assert_eq!(version_digits(&format!("sha256:{good}")), Some(good));
        }
        for bad in ["", "0123456789a", "0123456789aB", "0123456789ag", "sha512:0123456789ab", &format!("{whole}0")] {
            assert_eq!(version_digits(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_name_is_a_name_and_nothing_else() {
        let long = "a".repeat(SERVED_NAME_LENGTH_MAX);
        for good in ["a", "support", "Team.support-v2_x", "7b", &long] {
            assert_eq!(good.parse::<AdapterName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        let longer = "a".repeat(SERVED_NAME_LENGTH_MAX + 1);
        for bad in ["", "-a", "a-", ".", "a@b", "a/b", "a b", "ä", "a\0", "../a", &longer] {
            assert!(bad.parse::<AdapterName>().is_err(), "{bad:?} is taken for a name");
        }
    }
}
