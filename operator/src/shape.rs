//! What was found of a base in its status: its shape, which adapters are verified against, and the seal over all of it.

use lorafleet_artifact::{Architecture, BaseShape};
use lorafleet_crds::{BaseModel, BaseModelStatus};

use crate::hash::short_hash;

/// The fields that describe the shape.
pub fn to_status(shape: &BaseShape) -> BaseModelStatus {
    let BaseShape { architecture, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied, parameters } = shape;
    BaseModelStatus {
        architecture: Some(match architecture {
            Architecture::Llama => "llama".to_owned(),
        }),
        parameters: Some(*parameters),
        layers: Some(*layers),
        hidden_size: Some(*hidden),
        feed_forward_size: Some(*ffn),
        attention_heads: Some(*heads),
        key_value_heads: Some(*kv_heads),
        head_size: Some(*head_dim),
        vocabulary_size: Some(*vocab),
        tied_embeddings: Some(*tied),
        ..BaseModelStatus::default()
    }
}

/// The shape that the fields describe; `None` if one is missing or the architecture is none that is known.
pub fn from_status(status: &BaseModelStatus) -> Option<BaseShape> {
    Some(BaseShape {
        architecture: match status.architecture.as_deref()? {
            "llama" => Architecture::Llama,
            _ => return None,
        },
        layers: status.layers?,
        hidden: status.hidden_size?,
        heads: status.attention_heads?,
        kv_heads: status.key_value_heads?,
        head_dim: status.head_size?,
        ffn: status.feed_forward_size?,
        vocab: status.vocabulary_size?,
        tied: status.tied_embeddings?,
        parameters: status.parameters?,
    })
}

/// Names all that was found of a base.
pub fn seal(status: &BaseModelStatus) -> String {
    short_hash(&BaseModelStatus {
        observed_generation: None,
        resolved_for: None,
        source_listing: None,
        seal: None,
        conditions: Vec::new(),
        ..status.clone()
    })
}

/// What was found of a base, unless somebody else has written to it since. What no operator has sealed is of an older one.
pub fn found(base: &BaseModel) -> Option<&BaseModelStatus> {
    base.status.as_ref().filter(|status| status.seal.as_ref().is_none_or(|known| *known == seal(status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_survives_its_status() {
        let shape = BaseShape {
            architecture: Architecture::Llama,
            layers: 30,
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            ffn: 1536,
            vocab: 49152,
            tied: true,
            parameters: 134_515_008,
        };
        assert_eq!(from_status(&to_status(&shape)), Some(shape));
        assert_eq!(from_status(&BaseModelStatus::default()), None);
    }
    #[test]
    fn what_somebody_else_writes_breaks_the_seal() {
        let base = |change: serde_json::Value| {
            let mut status = BaseModelStatus {
                digest: Some(lorafleet_artifact::Digest::from_bytes([7; 32])),
                layers: Some(2),
                size_bytes: Some(10),
                ..BaseModelStatus::default()
            };
            status.seal = Some(seal(&status));
            let mut status = serde_json::to_value(status).unwrap();
            status.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            let source = serde_json::json!({ "source": { "uri": "s3://models/m" } });
            let mut base = BaseModel::new("base", serde_json::from_value(source).unwrap());
            base.status = Some(serde_json::from_value(status).unwrap());
            base
        };
        let other = lorafleet_artifact::Digest::from_bytes([8; 32]);
        for (change, believed) in [
            (serde_json::json!({}), true),
            // What is no finding, and a status of an operator that sealed none.
            (serde_json::json!({ "observedGeneration": 7, "resolvedFor": "x", "sourceListing": "y" }), true),
            (serde_json::json!({ "seal": null, "layers": 3 }), true),
            (serde_json::json!({ "digest": other }), false),
            (serde_json::json!({ "layers": 3 }), false),
            (serde_json::json!({ "vocabularySize": 3 }), false),
            (serde_json::json!({ "seal": "x" }), false),
        ] {
            assert_eq!(found(&base(change.clone())).is_some(), believed, "{change}");
        }
    }
}
