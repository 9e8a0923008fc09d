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

/// Paths of all numbers of a spec that may be larger than any type holds, so that who watches could not read the object.
fn endless(schema: &Value, path: &str, found: &mut Vec<String>) {
    let number = schema["type"] == "integer" || schema["type"] == "number";
    // Kubernetes' own types of 64 bits are as wide as the API's numbers.
    if number && schema["maximum"].is_null() && schema["format"] != "int64" {
        found.push(format!("{path}: maximum"));
    }
    // Amounts are kept as text.
    let bounded = schema["pattern"].as_str().is_some_and(|pattern| pattern.contains("KMGTPE"));
    let amount = bounded || path.ends_with(".divisor");
    if schema["x-kubernetes-int-or-string"] == true && !amount && schema["x-kubernetes-validations"].is_null() {
        found.push(format!("{path}: a rule for its numbers"));
    }
    for below in ["items", "additionalProperties"] {
        if schema[below].is_object() {
            endless(&schema[below], &format!("{path}[]"), found);
        }
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        endless(property, &format!("{path}.{name}"), found);
    }
}

#[test]
fn every_number_of_a_spec_has_a_limit() {
    let mut found = Vec::new();
    for file in lorafleet_crds::crdgen::crd_files().unwrap() {
        let kind: Value = serde_norway::from_str(&file.yaml).unwrap();
        let schema = &kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        endless(schema, &file.name, &mut found);
    }
    assert!(found.is_empty(), "without a limit:\n{}", found.join("\n"));
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
