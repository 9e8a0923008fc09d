//! What a client may not do, and how many may do it at once.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use futures::StreamExt as _;
use lorafleet_gateway::keys::Keys;
use lorafleet_gateway::metrics::Metrics;
use lorafleet_gateway::secret_files::watch_api_keys;
use lorafleet_gateway::vital::Vital;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;

#[tokio::test]
async fn a_body_may_not_be_too_large_or_too_slow() {
    let echo = pod(Behaviour::Echo).await;
    let strict = front(&[&echo], limits(&["--max-body-bytes=100"])).await;
    let large = format!(r#"{{"model":"support","x":"{}"}}"#, "x".repeat(100));
    let (status, code, message) = error_of(strict.chat(&large).await).await;
    assert_eq!(
        (status, code.as_str(), message.as_str()),
        (413, "BodyTooLarge", "the body is above the limit of 100 bytes")
    );

    let impatient = front(&[&echo], limits(&["--body-timeout-seconds=0.2"])).await;
    let mut slow = impatient.unfinished(8).await;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, slow.read_to_string(&mut answer)).await.expect("closed").unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("BodyTimeout"), "{answer}");
    assert_eq!(echo.seen.count(), 0);
}

#[tokio::test]
async fn a_head_may_not_be_too_slow_or_too_large() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&["--head-timeout-seconds=0.2"])).await;
    let mut slow = TcpStream::connect(front.address).await.unwrap();
    slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost:").await.unwrap();
    let mut answer = Vec::new();
    // Closed, or reset if it was closed before all was read.
    let _ = tokio::time::timeout(PATIENCE, slow.read_to_end(&mut answer)).await.expect("over");
    assert!(answer.is_empty(), "{answer:?}");

    let mut large = TcpStream::connect(front.address).await.unwrap();
    let head = format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "x".repeat(100_000));
    let _ = large.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = large.read_to_end(&mut answer).await;
    assert!(!String::from_utf8_lossy(&answer).contains("200 OK"));
}

#[tokio::test]
async fn requests_beyond_the_places_wait_and_then_are_429() {
    let more = Arc::new(Notify::new());
    let streaming = pod(Behaviour::Stream(Arc::clone(&more))).await;
    let flags = ["--max-concurrent=1", "--max-queue=1", "--queue-timeout-seconds=600"];
    let front = Arc::new(front(&[&streaming], limits(&flags)).await);
    let body = r#"{"model":"support","stream":true}"#;
    let mut first = front.chat(body).await.bytes_stream();
    first.next().await.unwrap().unwrap();
    let second = tokio::spawn({
        let front = Arc::clone(&front);
        async move { front.chat(body).await.text().await.unwrap() }
    });
    until("the second waits", || front.gateway.in_flight.queued() == 1).await;
    let third = front.chat(body).await;
    assert_eq!(third.headers()["retry-after"], "1");
    assert_eq!(
        error_of(third).await,
        (429, "Busy".to_owned(), "1 requests are in progress and 1 wait, which is the limit".to_owned())
    );
    more.notify_one();
    while first.next().await.is_some() {}
    more.notify_one();
    assert!(second.await.unwrap().ends_with(DONE));
    assert_eq!(front.metric("lorafleet_gateway_refused_total{code=\"Busy\"}").as_deref(), Some("1"));
}

#[tokio::test]
async fn who_sends_slowly_takes_nobodys_place() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&["--max-concurrent=2", "--max-queue=0", "--body-timeout-seconds=600"])).await;
    let mut slow = Vec::new();
    for _ in 0..20 {
        slow.push(front.unfinished(10).await);
    }
    until("all are connected", || front.metric("lorafleet_gateway_client_connections").as_deref() == Some("20")).await;
    assert_eq!(front.chat(r#"{"model":"support"}"#).await.status(), 200);
}

#[tokio::test]
async fn a_wait_in_the_queue_is_bounded() {
    let stalling = pod(Behaviour::Stall).await;
    let front = front(&[&stalling], limits(&["--max-concurrent=1", "--queue-timeout-seconds=0.2"])).await;
    let mut first = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    first.next().await.unwrap().unwrap();
    let began = Instant::now();
    let (status, code, _) = error_of(front.chat(r#"{"model":"smollm2"}"#).await).await;
    assert_eq!((status, code.as_str()), (429, "Busy"));
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn one_models_flood_leaves_room_for_others() {
    let stalling = pod(Behaviour::Stall).await;
    let front = front(&[&stalling], limits(&["--max-concurrent-per-model=1"])).await;
    let mut first = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    first.next().await.unwrap().unwrap();
    let busy = error_of(front.chat(r#"{"model":"support@a1a1a1a1a1a1","stream":true}"#).await).await;
    assert_eq!(
        busy,
        (429, "Busy".to_owned(), "'support' has 1 requests in progress, which is the limit per model".to_owned())
    );
    let mut other = front.chat(r#"{"model":"smollm2","stream":true}"#).await.bytes_stream();
    assert_eq!(other.next().await.unwrap().unwrap(), EVENT);
    drop(first);
    until("the place is free again", || !front.gateway.in_flight.by_model().contains_key("support")).await;
}

#[tokio::test]
async fn one_clients_flood_leaves_room_for_others() {
    let stalling = pod(Behaviour::Stall).await;
    let keys = ["a", "b"]
        .map(|name| (name.to_owned(), format!(r#"{{"key": "{name}-secret-key", "models": ["*"]}}"#).into_bytes()));
    let (keys, errors) = Keys::parse(&keys.into(), "demo");
    assert_eq!(errors, []);
    let (_sender, keys) = tokio::sync::watch::channel(Arc::new(keys));
    let front = front_with(&[&stalling], limits(&["--max-concurrent-per-client=1"]), Some(keys)).await;
    let body = r#"{"model":"support","stream":true}"#;
    let ask = |key: &'static str| front.post("/v1/completions", body, Some(key));
    let mut first = ask("a-secret-key").await.bytes_stream();
    first.next().await.unwrap().unwrap();
    let busy = error_of(ask("a-secret-key").await).await;
    assert_eq!(busy.2, "the client 'a' has 1 requests in progress, which is the limit per client");
    assert_eq!((busy.0, busy.1.as_str()), (429, "Busy"));
    assert_eq!(ask("b-secret-key").await.bytes_stream().next().await.unwrap().unwrap(), EVENT);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_let_go() {
    let flooding = pod(Behaviour::Flood).await;
    let front = front(&[&flooding], limits(&["--write-timeout-seconds=0.3"])).await;
    let mut lazy = TcpStream::connect(front.address).await.unwrap();
    let body = r#"{"model":"support","stream":true}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    lazy.write_all(head.as_bytes()).await.unwrap();
    until("it is under way", || flooding.seen.count() == 1).await;
    until("it is let go", || front.gateway.in_flight.by_pod().is_empty()).await;
    until("the pod is told", || flooding.seen.dropped.load(std::sync::atomic::Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn answers_that_are_no_streams_are_bounded() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&["--max-reply-bytes=20"])).await;
    let (status, code, _) = error_of(front.chat(r#"{"model":"support"}"#).await).await;
    assert_eq!((status, code.as_str()), (502, "ReplyTooLarge"));
}

#[tokio::test]
async fn bodies_share_one_room() {
    let more = Arc::new(Notify::new());
    let streaming = pod(Behaviour::Stream(Arc::clone(&more))).await;
    let front = front(&[&streaming], limits(&["--max-bodies-bytes=1048576", "--body-timeout-seconds=600"])).await;
    let free = || front.gateway.bodies.free_bytes();
    // Held twice each, but for the first 16 KiB: 224 KiB each.
    let mut slow = Vec::new();
    for held in 1..=4 {
        slow.push(front.unfinished(128 << 10).await);
        until("it is held", || free() == (1 << 20) - held * (224 << 10)).await;
    }
    let large = format!(r#"{{"model":"support","stream":true,"x":"{}"}}"#, "x".repeat(96 << 10));
    let refused = front.chat(&large).await;
    assert_eq!(refused.headers()["retry-after"], "1");
    let message = "the bodies of other requests take all the room there is, 1048576 bytes";
    assert_eq!(error_of(refused).await, (429, "Busy".to_owned(), message.to_owned()));
    // Small ones go on, and who goes away gives his room back.
    let mut small = front.chat(r#"{"model":"support","stream":true}"#).await.bytes_stream();
    assert_eq!(small.next().await.unwrap().unwrap(), EVENT);
    drop(slow);
    until("all is free", || free() == 1 << 20).await;
    // A body is held until its answer begins, and no longer.
    let mut stream = front.chat(&large).await.bytes_stream();
    assert_eq!(stream.next().await.unwrap().unwrap(), EVENT);
    assert_eq!(free(), 1 << 20);
}

#[tokio::test]
async fn answers_share_one_room_until_they_are_read() {
    // Above what the kernel takes from a client that does not read.
    let large = pod(Behaviour::Large(16 << 20)).await;
    let flags = ["--max-replies-bytes=25165824", "--write-timeout-seconds=600"];
    let front = front(&[&large], limits(&flags)).await;
    let body = r#"{"model":"support"}"#;
    let lazy = TcpSocket::new_v4().unwrap();
    lazy.set_recv_buffer_size(4 << 10).unwrap();
    let mut lazy = lazy.connect(front.address).await.unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    lazy.write_all(head.as_bytes()).await.unwrap();
    lazy.readable().await.unwrap();
    let (status, code, message) = error_of(front.chat(body).await).await;
    assert_eq!((status, code.as_str()), (429, "Busy"), "{message}");
    assert_eq!(message, "the answers of other requests take all the room there is, 25165824 bytes");
    drop(lazy);
    until("all is free", || front.gateway.replies.free_bytes() == 24 << 20).await;
    assert_eq!(front.chat(body).await.bytes().await.unwrap().len(), 16 << 20);
}

#[tokio::test]
async fn keys_open_their_models_and_change_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("alice", r#"{"key": "alice-key", "models": ["support"]}"#);
    write("bob", r#"{"key": "bob-key-1", "models": ["*"]}"#);
    write("broken", "{");
    let metrics = Arc::new(Metrics::new(1).unwrap());
    let keys = watch_api_keys(folder.path().to_owned(), "demo".to_owned(), Arc::clone(&metrics), &Vital::default())
        .await
        .unwrap();
    let echo = pod(Behaviour::Echo).await;
    let front = front_with(&[&echo], limits(&[]), Some(keys)).await;
    let ask = async |key: Option<&str>, model: &str| {
        front.post("/v1/completions", &format!(r#"{{"model":"{model}"}}"#), key).await.status().as_u16()
    };
    assert_eq!(ask(None, "support").await, 401);
    assert_eq!(ask(Some("alice-kex"), "support").await, 401);
    assert_eq!(ask(Some("alice-key"), "support").await, 200);
    assert_eq!(ask(Some("alice-key"), "smollm2").await, 404);
    assert_eq!(ask(Some("bob-key-1"), "smollm2").await, 200);

    let list = async |key: &str| {
        let response = reqwest::Client::new().get(front.url("/v1/models")).bearer_auth(key).send().await.unwrap();
        let body: serde_json::Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        body["data"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(list("alice-key").await, ["support"]);
    assert_eq!(list("bob-key-1").await, ["smollm2", "support"]);
    let no_key = reqwest::get(front.url("/v1/models")).await.unwrap();
    assert_eq!(no_key.headers()["www-authenticate"], "Bearer");
    assert_eq!(error_of(no_key).await.1, "InvalidKey");

    write("alice", r#"{"key": "alice-key", "models": ["smollm2"]}"#);
    write("bob", r#"{"key": "bob-key-2", "models": ["*"]}"#);
    // A reading may fall between the two, or into one of them.
    let began = Instant::now();
    loop {
        let bob = (ask(Some("bob-key-1"), "smollm2").await, ask(Some("bob-key-2"), "smollm2").await);
        let alice = (ask(Some("alice-key"), "support").await, ask(Some("alice-key"), "smollm2").await);
        if (bob, alice) == ((401, 200), (404, 200)) {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "the new keys are not read: {bob:?} {alice:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn series_stay_bounded_however_many_adapters_are_asked_for() {
    let echo = pod(Behaviour::Echo).await;
    let front = front(&[&echo], limits(&["--max-metric-models=5"])).await;
    let mut view = view(&[&echo], &front.gateway.fleet);
    let mut adapters = (*view.adapters).clone();
    let mut report = (**view.pods["p0"].report.as_ref().unwrap()).clone();
    for index in 0..40 {
        adapters.insert(format!("a{index}"), adapters["support"].clone());
        let held = report.holdings.adapters["support"].clone();
        Arc::make_mut(&mut report.holdings).adapters.insert(format!("a{index}"), held);
    }
    view.adapters = Arc::new(adapters);
    view.pods.get_mut("p0").unwrap().report = Some(Arc::new(report));
    front.gateway.fleet.publish(view, 0);
    let client = reqwest::Client::new();
    let ask = async |index: usize| {
        let request = client.post(front.url("/v1/completions")).body(format!(r#"{{"model":"a{index}"}}"#));
        assert_eq!(request.send().await.unwrap().status(), 200);
    };
    // The first are asked for so often that they keep their places however long this takes.
    for index in (0..5).flat_map(|index| [index; 8]).chain([5]) {
        ask(index).await;
    }
    let lines = front.metrics().lines().count();
    for index in 6..40 {
        ask(index).await;
    }
    assert_eq!(front.metrics().lines().count(), lines);
    let other = "lorafleet_gateway_requests_total{model=\"other\",outcome=\"Answered\",status=\"200\"}";
    assert_eq!(front.metric(other).as_deref(), Some("35"));
}
