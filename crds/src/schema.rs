//! Schemas of types that know nothing of schemars.

use schemars::{Schema, SchemaGenerator, json_schema};

/// A source as [`lorafleet_artifact::SourceUri`] reads it: a plain bucket, host or claim, and no empty segment.
pub(crate) const SOURCE_PATTERN: &str = r"^(s3|https|hf|pvc)://[A-Za-z0-9._:-]+(/[^\s\p{Cc}/?#\\]+)*/?$";

/// No step upwards, also for whoever decodes what nothing here does.
pub(crate) const NO_DOTS: &str =
    "!self.lowerAscii().replace('%2e', '.').split('/').exists(segment, segment == '..' || segment == '.')";

pub(crate) const NOTHING_HIDDEN: &str = "!self.lowerAscii().matches('%(2f|5c|0[0-9a-f]|1[0-9a-f]|7f)')";

pub(crate) const NOTHING_HIDDEN_SAID: &str =
    "no segment may hide a slash, a backslash or a control character behind a '%'";

/// Scheme, host and port of a store.
pub(crate) const ENDPOINT_PATTERN: &str = r"^https?://([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?/?$";

/// What the key of a label may be.
const LABEL_KEY_PATTERN: &str =
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// What the value of a label may be.
const LABEL_VALUE_PATTERN: &str = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";

/// A [`lorafleet_artifact::Digest`] as text.
pub(crate) fn digest(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": DIGEST_PATTERN, "maxLength": 71 })
}

/// The same, where it may be absent.
pub(crate) fn optional_digest(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": DIGEST_PATTERN, "maxLength": 71, "nullable": true })
}

/// Digests that count as one base.
pub(crate) fn digests(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "x-kubernetes-list-type": "set",
        "items": { "type": "string", "pattern": DIGEST_PATTERN, "maxLength": 71 },
    })
}

/// The ranks that each kind of module has.
pub(crate) fn ranks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {
            "type": "array",
            "maxItems": 256,
            "x-kubernetes-list-type": "atomic",
            "items": { "type": "integer", "format": "int32", "minimum": 1 },
        },
    })
}

/// Kubernetes conditions: one per type, each owned by the writer that set it.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": { "type": "string", "maxLength": 64 },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "reason": { "type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$" },
                "message": { "type": "string", "maxLength": 1024 },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
            },
        },
    })
}

/// Labels that an object must carry, as in every Kubernetes selector.
pub(crate) fn optional_label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "type": "object",
                "maxProperties": 16,
                "additionalProperties": { "type": "string", "maxLength": 63, "pattern": LABEL_VALUE_PATTERN },
            },
            "matchExpressions": {
                "type": "array",
                "maxItems": 16,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "x-kubernetes-validations": [{
                        "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
                        "message": "In and NotIn need values, Exists and DoesNotExist have none",
                    }],
                    "properties": {
                        "key": { "type": "string", "maxLength": 317, "pattern": LABEL_KEY_PATTERN },
                        "operator": { "type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"] },
                        "values": {
                            "type": "array",
                            "maxItems": 64,
                            "x-kubernetes-list-type": "atomic",
                            "items": { "type": "string", "maxLength": 63, "pattern": LABEL_VALUE_PATTERN },
                        },
                    },
                },
            },
        },
    })
}

/// A count or a percentage, as a Deployment takes them.
pub(crate) fn optional_count_or_percentage(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "nullable": true,
        "maxLength": 4,
        "pattern": "^([0-9]|[1-9][0-9]|100)%$",
        "x-kubernetes-validations": [{
            "rule": "type(self) == string || (self >= 0 && self <= 1000)",
            "message": "expected pods from 0 to 1000, or a percentage from 0% to 100%",
        }],
    })
}

/// What a container asks for and may have at most. Claims of dynamic resources are left out: they belong to a pod that names
/// them, and a pool's pods name none.
pub(crate) fn optional_resources(_: &mut SchemaGenerator) -> Schema {
    let amounts = json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": { "x-kubernetes-int-or-string": true, "pattern": QUANTITY_PATTERN },
    });
    json_schema!({
        "type": "object",
        "nullable": true,
        "description": "What each container asks for (`requests`) and may have at most (`limits`), as in every pod.",
        "properties": { "limits": amounts, "requests": amounts },
    })
}

/// As Kubernetes writes amounts: `100m`, `1Gi`, `2e3`.
const QUANTITY_PATTERN: &str = r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$";

const DIGEST_PATTERN: &str = "^sha256:[0-9a-f]{64}$";
