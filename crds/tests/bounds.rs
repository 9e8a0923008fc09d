//! What somebody may write is bounded: the API server's cost of every rule hangs on it, and so does what a status may grow to.

use serde_json::Value;

/// Paths of all lists, and of all maps with free keys, that lack their limit.
fn boundless(schema: &Value, path: &str, found: &mut Vec<String>) {
    if schema["type"] == "array" && schema["maxItems"].is_null() {
        found.push(format!("{path}: maxItems"));
    }
    if schema["additionalProperties"].is_object() && schema["maxProperties"].is_null() {
        found.push(format!("{path}: maxProperties"));
    }
    boundless_below(schema, path, found);
}

fn boundless_below(schema: &Value, path: &str, found: &mut Vec<String>) {
    for below in ["items", "additionalProperties"] {
        if schema[below].is_object() {
            boundless(&schema[below], &format!("{path}[]"), found);
        }
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        boundless(property, &format!("{path}.{name}"), found);
    }
}

#[test]
fn every_list_and_map_has_a_limit() {
    let mut found = Vec::new();
    for file in lorafleet_crds::crdgen::crd_files().unwrap() {
        let kind: Value = serde_norway::from_str(&file.yaml).unwrap();
        let schema = &kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        assert!(schema["properties"]["spec"].is_object(), "{} has no schema of a spec", file.name);
        boundless(schema, &file.name, &mut found);
    }
    assert!(found.is_empty(), "without a limit:\n{}", found.join("\n"));
}
