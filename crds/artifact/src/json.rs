//! JSON objects as they stand in the file: in order, and with every key once.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use crate::reason::excerpt;

/// An object as a list of pairs. A key that stands twice is an error: two readers of such a file may believe two
/// different things.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pairs<V>(pub Vec<(String, V)>);

impl<V> Default for Pairs<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

struct PairsVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for PairsVisitor<V> {
    type Value = Pairs<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            if !seen.insert(key.clone()) {
                return Err(A::Error::custom(format!("key '{}' stands twice", excerpt(&key, 200))));
            }
            pairs.push((key, value));
        }
        Ok(Pairs(pairs))
    }
}
