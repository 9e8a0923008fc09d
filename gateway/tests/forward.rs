//! What reaches a pod, and what of its answer reaches the client.

mod common;

use std::sync::Arc;

use common::*;
use futures::StreamExt as _;
use tokio::sync::Notify;

#[tokio::test]
async fn only_model_and_credentials_change_on_the_way() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&[])).await;
    let request = reqwest::Client::new()
        .post(front.url("/v1/chat/completions"))
        .header("x-request-id", "req-7")
        .header("content-type", "application/json")
        .bearer_auth("client-secret")
        .body(r#"{ "model" : "support", "seed": 1.50e0 }"#);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-request-id"], "req-7");
    assert_eq!(response.headers()["x-lorafleet-adapter"], "support@a1a1a1a1a1a1");
    assert_eq!(response.headers()["content-type"], "application/json");
    let sent = format!(r#"{{ "model" : "support@{}", "seed": 1.50e0 }}"#, SUPPORT.hex());
    assert!(response.text().await.unwrap().ends_with(&format!(r#""echo":{sent}}}"#)));
    assert_eq!(echo.seen.last_body(), sent);
    assert_eq!(echo.seen.last_header("authorization").as_deref(), Some("Bearer engine-key"));
    assert_eq!(echo.seen.last_header("x-request-id").as_deref(), Some("req-7"));
    assert_eq!(
        front.metric("lorafleet_gateway_tokens_total{kind=\"completion\",model=\"support\"}").as_deref(),
        Some("7")
    );
    assert_eq!(
        front.metric("lorafleet_gateway_time_to_first_byte_seconds_count{model=\"support\"}").as_deref(),
        Some("1")
    );
}

#[tokio::test]
async fn every_answer_says_its_request_id() {
    let front = front(&[&pod(Behaviour::Echo).await, &pod(Behaviour::Status(500)).await], limits(&[])).await;
    let client = reqwest::Client::new();
    for (method, path, status) in [
        (http::Method::GET, "/v1/models", 200),
        (http::Method::GET, "/v1/models/nobody", 404),
        (http::Method::POST, "/v1/completions", 400),
        (http::Method::GET, "/v1/completions", 405),
        (http::Method::GET, "/nowhere", 404),
    ] {
        let ask = || client.request(method.clone(), front.url(path));
        let given = ask().header("x-request-id", "req-7").send().await.unwrap();
        assert_eq!((given.status().as_u16(), &given.headers()["x-request-id"]), (status, &"req-7".parse().unwrap()));
        let made = ask().send().await.unwrap().headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(made.len() == 32 && made.bytes().all(|byte| byte.is_ascii_hexdigit()), "{path}: {made}");
    }
}

#[tokio::test]
async fn the_base_passes_as_it_was_asked_for() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&[])).await;
    for body in [r#"{"model":"smollm2"}"#, r#"{"seed": 1,"model":"smollm2" }"#] {
        assert_eq!(front.post("/v1/completions", body, None).await.status(), 200);
        assert_eq!(echo.seen.last_body(), body);
    }
}

#[tokio::test]
async fn a_stream_passes_event_by_event() {
    let more = Arc::new(Notify::new());
    let streaming = pod(Behaviour::Stream(Arc::clone(&more))).await;
    let front = front(&[&streaming], limits(&[])).await;
    let mut chunks = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    // The pod has not sent the second event, so the first was not held back for it.
    assert_eq!(chunks.next().await.unwrap().unwrap(), EVENT);
    more.notify_one();
    let mut rest = Vec::new();
    while let Some(chunk) = chunks.next().await {
        rest.extend_from_slice(&chunk.unwrap());
    }
    assert_eq!(String::from_utf8(rest).unwrap(), [EVENT, DONE].concat(), "the usage event was not asked for");
    assert!(streaming.seen.last_body().ends_with(r#","stream_options":{"include_usage":true}}"#));
    until("usage is counted", || {
        front.metric("lorafleet_gateway_tokens_total{kind=\"prompt\",model=\"support\"}").as_deref() == Some("5")
    })
    .await;
    assert_eq!(
        front.metric("lorafleet_gateway_tokens_total{kind=\"completion\",model=\"support\"}").as_deref(),
        Some("2")
    );
}

#[tokio::test]
async fn a_client_that_asks_for_usage_gets_it() {
    let streaming = pod(Behaviour::Text(
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
    ))
    .await;
    let front = front(&[&streaming], limits(&[])).await;
    let response = front.chat(r#"{"model":"support","stream":true,"stream_options":{"include_usage":true}}"#).await;
    assert_eq!(response.text().await.unwrap(), [USAGE_EVENT, DONE].concat());
}

#[tokio::test]
async fn the_tokens_of_a_stream_without_usage_are_its_events() {
    let streaming =
        pod(Behaviour::Text("data: {\"choices\":[{}]}\n\ndata: {\"choices\":[{}]}\n\ndata: [DONE]\n\n")).await;
    let front = front(&[&streaming], limits(&[])).await;
    front.chat(r#"{"model":"smollm2","stream":true}"#).await.text().await.unwrap();
    until("events are counted", || {
        front.metric("lorafleet_gateway_tokens_total{kind=\"completion\",model=\"smollm2\"}").as_deref() == Some("2")
    })
    .await;
}

#[tokio::test]
async fn the_tokens_of_a_stream_that_is_cut_are_those_that_passed() {
    let stalling = pod(Behaviour::Stall).await;
    let front = front(&[&stalling], limits(&[])).await;
    let mut chunks = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    assert_eq!(chunks.next().await.unwrap().unwrap(), EVENT);
    drop(chunks);
    let gone = "lorafleet_gateway_requests_total{model=\"support\",outcome=\"ClientGone\",status=\"200\"}";
    until("its end is counted", || front.metric(gone).as_deref() == Some("1")).await;
    assert_eq!(
        front.metric("lorafleet_gateway_tokens_total{kind=\"completion\",model=\"support\"}").as_deref(),
        Some("1")
    );
}

/// Many clients hang up at `[DONE]`; their answers were whole.
#[tokio::test]
async fn a_client_that_hangs_up_at_done_was_answered() {
    let lingering = pod(Behaviour::Linger).await;
    let front = front(&[&lingering], limits(&[])).await;
    let mut chunks = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    let mut seen = Vec::new();
    while !seen.ends_with(DONE.as_bytes()) {
        seen.extend_from_slice(&chunks.next().await.unwrap().unwrap());
    }
    drop(chunks);
    let answered = "lorafleet_gateway_requests_total{model=\"support\",outcome=\"Answered\",status=\"200\"}";
    until("the answer is counted", || front.metric(answered).as_deref() == Some("1")).await;
    assert_eq!(
        front.metric("lorafleet_gateway_tokens_total{kind=\"completion\",model=\"support\"}").as_deref(),
        Some("2")
    );
}

#[tokio::test]
async fn unknown_names_are_404_before_anything_is_sent() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&[])).await;
    for model in ["nobody", "support/", "../support", "other/support", "smollm2@bbbbbbbbbbbb"] {
        let (status, code, message) = error_of(front.chat(&format!(r#"{{"model":"{model}"}}"#)).await).await;
        assert_eq!(status, 404, "{model}: {code}: {message}");
    }
    let (status, code, _) = error_of(front.chat(r#"{"model":"support@a1"}"#).await).await;
    assert_eq!((status, code.as_str()), (400, "InvalidRequest"));
    let (status, code, _) = error_of(front.chat(r#"{"model":"support","model":"smollm2"}"#).await).await;
    assert_eq!((status, code.as_str()), (400, "InvalidRequest"));
    for nothing in ["{}", r#"{"model":" "}"#, r#"{"model":null}"#] {
        let response = front.chat(nothing).await;
        assert_eq!(response.status(), 400, "{nothing}");
        let body: serde_json::Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        let error = &body["error"];
        assert_eq!((&error["type"], &error["param"]), (&"invalid_request_error".into(), &"model".into()), "{error}");
    }
    let (status, code, _) = error_of(front.post("/v1/embeddings", "{}", None).await).await;
    assert_eq!((status, code.as_str()), (404, "RouteNotFound"));
    let (status, code, _) = error_of(reqwest::get(front.url("/v1/completions")).await.unwrap()).await;
    assert_eq!((status, code.as_str()), (405, "MethodNotAllowed"));
    assert_eq!(echo.seen.count(), 0);
}

#[tokio::test]
async fn a_client_that_goes_away_stops_the_pod() {
    let stalling = pod(Behaviour::Stall).await;
    let silent = pod(Behaviour::Silent).await;
    for (pod, body) in [(&stalling, r#"{"model":"support","stream":true}"#), (&silent, r#"{"model":"support"}"#)] {
        let front = front(&[pod], limits(&[])).await;
        tokio::select! {
            _ = async { front.chat(body).await.bytes().await } => panic!("the pod ended by itself"),
            () = until("the pod is asked", || pod.seen.count() == 1) => {}
        }
        until("the pod's connection is closed", || pod.seen.dropped.load(std::sync::atomic::Ordering::SeqCst) == 1)
            .await;
        until("nothing is left in progress", || front.gateway.in_flight.by_pod().is_empty()).await;
        assert!(front.gateway.in_flight.by_model().is_empty());
    }
}

#[tokio::test]
async fn models_are_listed_and_shown() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&[])).await;
    let get = async |path: &str| reqwest::get(front.url(path)).await.unwrap().text().await.unwrap();
    let base = format!(
        r#"{{"created":1700000000,"digest":"sha256:{}","id":"smollm2","object":"model","owned_by":"lorafleet","parent":null}}"#,
        "bb".repeat(32)
    );
    let adapter = format!(
        r#"{{"created":0,"digest":"{SUPPORT}","id":"support","object":"model","owned_by":"lorafleet","parent":"smollm2","rank":8}}"#
    );
    assert_eq!(get("/v1/models").await, format!(r#"{{"data":[{base},{adapter}],"object":"list"}}"#));
    assert_eq!(get("/v1/models/support").await, adapter);
    assert_eq!(get("/v1/models/demo/support").await, adapter);
    assert_eq!(get("/v1/models/smollm2").await, base);
    for unknown in ["nobody", "%ff", "a%00b", "%2e%2e%2f%2e%2e%2fetc"] {
        let (status, code, _) =
            error_of(reqwest::get(front.url(&format!("/v1/models/{unknown}"))).await.unwrap()).await;
        assert_eq!((status, code.as_str()), (404, "ModelNotFound"), "{unknown}");
    }
}
