use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[track_caller]
fn check(body: &str, model: Option<&str>, ask_usage: bool, expected: &str) {
    let inspected = inspect(body.as_bytes()).unwrap_or_else(|error| panic!("{body}: {error}"));
    let rewritten = rewrite(body.as_bytes(), &inspected, model, ask_usage);
    assert_eq!(String::from_utf8(rewritten).unwrap(), expected);
    serde_json::from_str::<Value>(expected).unwrap();
}

#[test]
fn only_the_model_changes() {
    check(r#"{"model":"a"}"#, None, false, r#"{"model":"a"}"#);
    check(r#"{"model":"a"}"#, Some("a@1"), false, r#"{"model":"a@1"}"#);
    check(
        "{ \"seed\" : 1.50e0,\n\t\"model\"  :\t\"a\" , \"x\":{\"model\":\"b\"}, \"x\":[1 ,2] }\n",
        Some("a@1"),
        false,
        "{ \"seed\" : 1.50e0,\n\t\"model\"  :\t\"a@1\" , \"x\":{\"model\":\"b\"}, \"x\":[1 ,2] }\n",
    );
    check(r#"{"m\u006fdel":"\u0061","n":1}"#, Some("q\"\\"), false, r#"{"m\u006fdel":"q\"\\","n":1}"#);
    check(
        r#"{"messages":[{"content":"größe 🦙"}],"model":"a"}"#,
        Some("b"),
        false,
        r#"{"messages":[{"content":"größe 🦙"}],"model":"b"}"#,
    );
}

#[test]
fn a_stream_is_asked_for_its_usage() {
    let on = r#""stream_options":{"include_usage":true}"#;
    check(r#"{"model":"a","stream":true}"#, None, true, &format!(r#"{{"model":"a","stream":true,{on}}}"#));
    check("{\"model\":\"a\"} \n", Some("b"), true, &format!("{{\"model\":\"b\",{on}}} \n"));
    check(r#"{"stream_options":null,"model":"a"}"#, Some("b"), true, &format!(r#"{{{on},"model":"b"}}"#));
    check(r#"{"stream_options":{},"model":"a"}"#, None, true, &format!(r#"{{{on},"model":"a"}}"#));
    check(
        r#"{"model":"a","stream_options":{ "x":1}}"#,
        None,
        true,
        r#"{"model":"a","stream_options":{"include_usage":true, "x":1}}"#,
    );
    check(
        r#"{"model":"a","stream_options":{"x":1,"include_usage":false}}"#,
        None,
        true,
        r#"{"model":"a","stream_options":{"x":1,"include_usage":true}}"#,
    );
    check(r#"{"model":"a","stream_options":{"include_usage":null}}"#, None, true, &format!(r#"{{"model":"a",{on}}}"#));
    check(
        r#"{"model":"a","stream_options":{"include_usage":true}}"#,
        None,
        true,
        r#"{"model":"a","stream_options":{"include_usage":true}}"#,
    );
}

#[test]
fn what_the_client_asked_is_understood() {
    let read = |body: &str| {
        let inspected = inspect(body.as_bytes()).unwrap();
        (inspected.model, inspected.stream, inspected.include_usage)
    };
    assert_eq!(read(r#"{"model":""}"#), (String::new(), false, false));
    assert_eq!(read(r#"{"model":"a","stream":null,"stream_options":null}"#), ("a".to_owned(), false, false));
    assert_eq!(
        read(r#"{"model":"a","stream":true,"stream_options":{"include_usage":true},"merged_adapters":null}"#),
        ("a".to_owned(), true, true)
    );
}

#[test]
fn what_is_wrong_is_named() {
    let cases: &[(&[u8], &str)] = &[
        (b"", "the body is not valid JSON: EOF while parsing a value at line 1 column 0"),
        (b"{\"model\":\"a\"", "the body is not valid JSON: EOF while parsing an object at line 1 column 12"),
        (b"{\"model\":\"a\"} x", "the body is not valid JSON: trailing characters at line 1 column 15"),
        (b"[1]", "the body is not valid JSON: invalid type: sequence, expected an object at line 1 column 0"),
        (b"{\"model\":\"\xff\"}", "the body is not valid JSON: invalid utf-8 sequence of 1 bytes from index 10"),
        (b"{}", "'model' is missing: name the base or an adapter; \"\" asks for the base"),
        (b"{\"model\":\" \\t\"}", "'model' is blank: name the base or an adapter; \"\" asks for the base"),
        (b"{\"model\":7}", "'model' must be a string, not 7"),
        (b"{\"model\":null}", "'model' must be a string, not null"),
        (b"{\"model\":[\"a\"]}", "'model' must be a string, not [\"a\"]"),
        (b"{\"model\":\"a\",\"model\":\"b\"}", "'model' stands twice in the body"),
        (b"{\"model\":\"a\",\"mode\\u006c\":\"b\"}", "'model' stands twice in the body"),
        (b"{\"model\":\"a\",\"stream\":1}", "'stream' must be true or false, not 1"),
        (b"{\"model\":\"a\",\"stream_options\":[]}", "'stream_options' must be an object, not []"),
        (
            b"{\"model\":\"a\",\"stream_options\":{\"include_usage\":true,\"include_usage\":false}}",
            "'stream_options.include_usage' stands twice in the body",
        ),
        (
            b"{\"model\":\"\",\"merged_adapters\":{\"ids\":[\"secret\"]}}",
            "'merged_adapters' is not supported by the gateway: enrol the merge as an adapter of its own",
        ),
    ];
    for (body, expected) in cases {
        let error = inspect(body).map(|inspected| panic!("{inspected:?}")).unwrap_err();
        assert_eq!(error.to_string(), *expected, "{}", String::from_utf8_lossy(body));
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from)
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("model|stream|[a-z]{1,6}|.{0,4}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    /// Parsed again, a rewritten body is the old one with the new model and the usage asked for, and nothing else.
    #[test]
    fn a_rewrite_changes_what_it_says(
        rest in prop::collection::btree_map("[a-z]{1,6}|.{0,4}", any_json(), 0..5),
        model in ".{0,10}[^\\s].{0,10}", to in ".{0,20}", pretty in any::<bool>(), ask in any::<bool>(),
        options in prop_oneof![Just(None), Just(Some(json!(null))), Just(Some(json!({}))), Just(Some(json!({"a": [1]}))),
            Just(Some(json!({"include_usage": false, "b": 2}))), Just(Some(json!({"include_usage": true})))],
    ) {
        let mut body = json!(rest);
        for field in ["model", "stream", "stream_options", "merged_adapters"] {
            body.as_object_mut().unwrap().remove(field);
        }
        body["model"] = json!(model);
        if let Some(options) = &options {
            body["stream_options"] = options.clone();
        }
        let text = if pretty { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) }.unwrap();
        let inspected = inspect(text.as_bytes()).unwrap();
        prop_assert_eq!(&inspected.model, &model);
        let rewritten: Value = serde_json::from_slice(&rewrite(text.as_bytes(), &inspected, Some(&to), ask)).unwrap();
        body["model"] = json!(to);
        if ask {
            if !body["stream_options"].is_object() {
                body["stream_options"] = json!({});
            }
            body["stream_options"]["include_usage"] = json!(true);
        } else if options.is_none() {
            prop_assert!(rewritten.get("stream_options").is_none());
        }
        prop_assert_eq!(rewritten, body);
    }

    #[test]
    fn no_bytes_cause_a_panic(body in prop::collection::vec(any::<u8>(), 0..200), text in "[{}\\[\\]\":,a-z ]{0,60}") {
        let _ = inspect(&body);
        if let Ok(inspected) = inspect(text.as_bytes()) {
            rewrite(text.as_bytes(), &inspected, Some("x"), true);
        }
    }
}
