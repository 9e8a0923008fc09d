//! Schemas of types that know nothing of schemars.

use k8s_openapi::api::core::v1::{EnvVar, Toleration};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

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
        "additionalProperties": { "x-kubernetes-int-or-string": true, "maxLength": 32, "pattern": QUANTITY_PATTERN },
    });
    json_schema!({
        "type": "object",
        "nullable": true,
        "description": "What each container asks for (`requests`) and may have at most (`limits`), as in every pod.",
        "x-kubernetes-validations": [{
            "rule": "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || !quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "message": "something of requests is above the same of limits: no pod can be made",
        }],
        "properties": { "limits": amounts, "requests": amounts },
    })
}

/// Variables of a container, with names that one can have.
pub(crate) fn env(generator: &mut SchemaGenerator) -> Schema {
    let name = json!({ "minLength": 1, "maxLength": 256, "pattern": "^[ -<>-~]+$" });
    let rule = json!([{
        "rule": "!has(self.valueFrom) || !has(self.value) || self.value == ''",
        "message": "a variable has a value or a valueFrom, not both",
    }]);
    let mut schema = bounded(generator.subschema_for::<Vec<EnvVar>>(), 64, &[("name", name)], rule);
    schema.insert("x-kubernetes-list-type".to_owned(), json!("map"));
    schema.insert("x-kubernetes-list-map-keys".to_owned(), json!(["name"]));
    schema
}

/// Taints that pods may be put beside, as a pod can say them.
pub(crate) fn tolerations(generator: &mut SchemaGenerator) -> Schema {
    let operator = json!({ "enum": ["", "Equal", "Exists", "Gt", "Lt"] });
    let effect = json!({ "enum": ["", "NoSchedule", "PreferNoSchedule", "NoExecute"] });
    let rules = json!([
        {
            "rule": "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            "message": "a toleration with the operator Exists has no value",
        },
        {
            "rule": "(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            "message": "a toleration without a key has the operator Exists",
        },
        {
            "rule": "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "message": "tolerationSeconds belong to the effect NoExecute",
        },
    ]);
    bounded(generator.subschema_for::<Vec<Toleration>>(), 32, &[("operator", operator), ("effect", effect)], rules)
}

/// A list of at most so many of Kubernetes' own objects, with what else holds of some of their fields, and rules for each.
fn bounded(mut list: Schema, most: u32, fields: &[(&str, Value)], rules: Value) -> Schema {
    list.insert("maxItems".to_owned(), json!(most));
    if let Some(item) = list.get_mut("items").and_then(Value::as_object_mut) {
        item.insert("x-kubernetes-validations".to_owned(), rules);
        for (name, more) in fields {
            let field = item.get_mut("properties").and_then(|fields| fields.get_mut(name));
            if let (Some(Value::Object(field)), Value::Object(more)) = (field, more) {
                field.extend(more.clone());
            }
        }
    }
    list
}

/// Labels that a node must carry.
pub(crate) fn node_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": { "type": "string", "maxLength": 63, "pattern": LABEL_VALUE_PATTERN },
    })
}

/// A reference without a blank in it.
pub(crate) const IMAGE_PATTERN: &str = r"^\S+$";

/// As Kubernetes writes amounts: `100m`, `1Gi`, `2e3`.
const QUANTITY_PATTERN: &str = r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$";

const DIGEST_PATTERN: &str = "^sha256:[0-9a-f]{64}$";
