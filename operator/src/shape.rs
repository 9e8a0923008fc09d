//! A base's shape in its status, and back: what adapters are verified against.

use lorafleet_artifact::{Architecture, BaseShape};
use lorafleet_crds::BaseModelStatus;

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
}
