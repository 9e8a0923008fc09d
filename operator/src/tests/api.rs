//! The API server's side of a status: what comes of a write where somebody else has written too.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::golden::merge;
use crate::owned::{difference, says};

/// Lists that are maps, and by what.
const MAPS: [(&str, &str); 3] = [("conditions", "type"), ("pools", "name"), ("revisions", "digest")];

/// Writes a status as the operator does, over what stands; `owned` is what it has applied before. Returns what stands then, and
/// the number of writes.
pub(super) fn write<S>(standing: Option<&S>, owned: &mut Value, wanted: &S) -> (Option<S>, u32)
where
    S: Serialize + DeserializeOwned + PartialEq + Clone,
{
    if says(standing, wanted) {
        return (standing.cloned(), 0);
    }
    let (standing, wanted) = (serde_json::to_value(standing).unwrap(), serde_json::to_value(wanted).unwrap());
    let mut left = apply(&standing, owned, &wanted);
    *owned = wanted.clone();
    let surplus = difference(&left, &wanted);
    let writes = 1 + u32::from(surplus.is_some());
    if let Some(surplus) = surplus {
        merge(&mut left, surplus);
    }
    (Some(serde_json::from_value(left).unwrap()), writes)
}

/// Server-side apply: what its owner leaves out goes, and what others have added stays.
fn apply(standing: &Value, owned: &Value, applied: &Value) -> Value {
    let (Value::Object(there), Value::Object(new)) = (standing, applied) else { return applied.clone() };
    let mut left = new.clone();
    for (field, value) in there {
        let (owned, map) = (&owned[field.as_str()], MAPS.iter().find(|(list, _)| list == field));
        match (left.get_mut(field), map) {
            (Some(new), Some((_, key))) => {
                let has = |list: &Value, entry: &Value| {
                    list.as_array().into_iter().flatten().any(|other| other[*key] == entry[*key])
                };
                let others = value.as_array().into_iter().flatten();
                let others: Vec<Value> =
                    others.filter(|entry| !has(new, entry) && !has(owned, entry)).cloned().collect();
                new.as_array_mut().unwrap().extend(others);
            }
            (Some(new), None) => *new = apply(value, owned, new),
            (None, _) if owned.is_null() => drop(left.insert(field.clone(), value.clone())),
            (None, _) => {}
        }
    }
    Value::Object(left)
}
