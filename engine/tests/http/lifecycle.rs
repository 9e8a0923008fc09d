//! Loads, unloads and the races between them and requests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::server::{ADMIN_KEY, Server, TIME_MAX, ask, assert_error, path, variant};

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_loads_and_unloads_leave_nothing_behind() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("{},100000000", disk.path().display());
    let server = Server::start("base", &["--disk-cache", &disk]).await;
    let mut first = None;
    for _ in 0..100 {
        assert_eq!(server.load("a", &path("plain-r8-qv")).await.0, 200);
        assert_eq!(server.complete("a", &json!([1, 2, 3]), 2).await.0, 200);
        assert_eq!(server.unload("a").await.0, 200);
        server.until("idle", async || server.report().await["adapters"] == json!([])).await;
        let budgets = server.report().await["budgets"].clone();
        assert_eq!(budgets["hostBytesUsed"], 0);
        // One copy on disk, for the next time.
        assert!(budgets["diskBytesUsed"].as_u64().unwrap() > 0, "{budgets}");
        assert_eq!(first.get_or_insert_with(|| budgets.clone()), &budgets);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn loads_and_unloads_of_one_name_at_once_are_one_after_another() {
    let server = Server::start("base", &[]).await;
    let loads =
        futures::future::join_all((0..50).map(|_| async { server.load("a", &path("all-linear")).await.0 })).await;
    assert_eq!(loads.iter().filter(|status| **status == 200).count(), 1, "{loads:?}");
    assert!(loads.iter().all(|status| [200, 409].contains(status)), "{loads:?}");
    let (one, two) = tokio::join!(server.unload("a"), server.unload("a"));
    let mut statuses = [one.0, two.0];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 404]);
    assert_error(server.unload("a").await, 404, "AdapterNotFound");
}

/// Those that come while one is under way share the next one; how many come in time is the machine's matter, so it is tried
/// until enough have.
#[tokio::test(flavor = "multi_thread")]
async fn one_folder_under_many_names_at_once_is_not_read_for_each_of_them() {
    let server = Server::start("base", &[]).await;
    let folder = path("r100-wide");
    let (begun, mut before, mut round) = (Instant::now(), 0.0, 0);
    loop {
        let names: Vec<String> = (0..20).map(|number| format!("a{round}-{number}")).collect();
        let loads = futures::future::join_all(names.iter().map(|name| server.load(name, &folder))).await;
        let same = |(status, reply): &(u16, Value)| *status == 200 && reply["digest"] == loads[0].1["digest"];
        assert!(loads.iter().all(same), "{loads:?}");
        let reads = server.counted("lorafleet_adapter_load_seconds_count ").await;
        assert!((1.0..=20.0).contains(&(reads - before)), "{} reads for 20 names", reads - before);
        if reads - before <= 10.0 {
            before = reads;
            break;
        }
        assert!(begun.elapsed() < TIME_MAX, "{} reads for 20 names", reads - before);
        (before, round) = (reads, round + 1);
    }
    // What is refused counts as well.
    assert_error(server.load("b", &path("nan")).await, 422, "Malformed");
    assert_eq!(server.counted("lorafleet_adapter_load_failures_total{reason=\"Malformed\"} ").await, 1.0);
    assert_eq!(server.counted("lorafleet_adapter_load_seconds_count ").await, before);
}

/// In host memory, and so for loads under way, there is room for two of them.
#[tokio::test(flavor = "multi_thread")]
async fn loads_whose_client_hangs_up_do_no_harm() {
    let server = Server::start("base", &["--host-cache=600000"]).await;
    let load = |number: usize| {
        let folder = variant("r100-wide", server.folder.path(), number);
        let body = json!({ "lora_name": format!("a{number}"), "lora_path": folder });
        let request = server.client.post(server.url.clone() + "/v1/load_lora_adapter").json(&body);
        request.bearer_auth(ADMIN_KEY).send()
    };
    let begun = Instant::now();
    assert_eq!(load(0).await.unwrap().status(), 200);
    let whole = begun.elapsed();
    let (mut hung_up, mut number) = (0, 1);
    while hung_up <= 10 {
        for part in 1..20 {
            hung_up += usize::from(tokio::time::timeout(whole * part / 20, load(number)).await.is_err());
            number += 1;
        }
        // All at once as well, so that some wait for room when their clients go.
        let crowd = (number..number + 20).map(|number| tokio::time::timeout(whole, load(number)));
        hung_up += futures::future::join_all(crowd).await.iter().filter(|ended| ended.is_err()).count();
        number += 20;
        assert!(begun.elapsed() < TIME_MAX, "only {hung_up} hung up in time");
    }
    for number in number..number + 4 {
        let reply = tokio::time::timeout(TIME_MAX, load(number)).await.expect("no room comes back").unwrap();
        assert_eq!(reply.status(), 200);
        assert_eq!(server.complete(&format!("a{number}"), &json!([1]), 4).await.0, 200);
    }
    let budgets = server.report().await["budgets"].clone();
    assert!(budgets["hostBytesUsed"].as_u64().unwrap() <= 600_000, "{budgets}");
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_in_place_changes_what_new_requests_get() {
    let server = Server::start("base", &[]).await;
    let folder = variant("plain-r8-qv", server.folder.path(), 1);
    let load = |in_place: bool| json!({ "lora_name": "a", "lora_path": folder, "load_inplace": in_place });
    let prompt = Value::from((0..40).collect::<Vec<_>>());
    let (status, first) = server.post("/v1/load_lora_adapter", &load(false)).await;
    assert_eq!(status, 200, "{first}");
    let before = server.complete("a", &prompt, 8).await.1["choices"][0]["token_ids"].clone();
    assert_error(server.post("/v1/load_lora_adapter", &load(false)).await, 409, "AlreadyLoaded");
    // The same files in place: the same content, nothing changes.
    assert_eq!(server.post("/v1/load_lora_adapter", &load(true)).await.1["digest"], first["digest"]);
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(format!("{}/{file}", path("all-linear")), folder.join(file)).unwrap();
    }
    let read = bytes_read(&server, async {
        let (status, second) = server.post("/v1/load_lora_adapter", &load(true)).await;
        assert_eq!(status, 200, "{second}");
        assert_ne!(first["digest"], second["digest"]);
    });
    assert!(read.await > 10_000);
    let (_, reply) = server.complete("a", &prompt, 8).await;
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_ne!(reply["choices"][0]["token_ids"], before);
    // Afterwards the files are not needed any more: no file is even opened.
    std::fs::remove_dir_all(&folder).unwrap();
    let read = bytes_read(&server, async {
        for _ in 0..10 {
            assert_eq!(server.complete("a", &prompt, 1).await.0, 200);
        }
    });
    // Less than the smallest of the files.
    assert!(read.await < 5000);
}

/// Bytes that the server reads from files meanwhile; sockets do not count.
async fn bytes_read(server: &Server, meanwhile: impl Future<Output = ()>) -> u64 {
    let read = || {
        let counted = std::fs::read_to_string(format!("/proc/{}/io", server.process.id())).unwrap();
        counted.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse::<u64>().unwrap()
    };
    let before = read();
    meanwhile.await;
    read() - before
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_loaded_in_place_again_and_again_always_answers() {
    let server = Server::start("base", &[]).await;
    let folders = [variant("plain-r8-qv", server.folder.path(), 1), variant("plain-r8-qv", server.folder.path(), 2)];
    let load = |number: usize| json!({ "lora_name": "a", "lora_path": folders[number % 2], "load_inplace": true });
    assert_eq!(server.post("/v1/load_lora_adapter", &load(0)).await.0, 200);
    // Long texts, so that much of a request's time is the making of tokens.
    let prompts = vec!["some words and some more of them. ".repeat(14); 24];
    let body = json!({ "model": "a", "prompt": prompts, "max_tokens": 1, "temperature": 0 });
    let (loaded, answered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let enough = || loaded.load(Ordering::Relaxed) >= 60 && answered.load(Ordering::Relaxed) >= 12;
    let reload = async {
        while !enough() {
            let number = 1 + loaded.fetch_add(1, Ordering::Relaxed);
            assert_eq!(server.post("/v1/load_lora_adapter", &load(number)).await.0, 200);
        }
    };
    let ask = async || {
        while !enough() {
            let (status, reply) = server.post("/v1/completions", &body).await;
            assert_eq!(status, 200, "{reply}");
            answered.fetch_add(1, Ordering::Relaxed);
        }
    };
    tokio::join!(reload, futures::future::join_all((0..6).map(|_| ask())));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_end_finishes_what_runs_and_takes_nothing_new() {
    let mut server = Server::start("base", &["--drain-seconds-max=600"]).await;
    let mut streams = Vec::new();
    for first in 1..=8 {
        streams.push(server.stream("base", &json!([first, 2]), 500).await);
    }
    // The end cannot come before this one has been asked and answered.
    let body = ask("base", &json!([1]), 1).to_string();
    let mut last = half_asked(&server, &body).await;
    signal(&server, "-TERM");
    server.until("draining", async || server.get("/readyz").await.0 == 503).await;
    assert_error(server.complete("base", &json!([1]), 1).await, 503, "Draining");
    last.write_all(&body.as_bytes()[10..]).await.unwrap();
    let mut answer = String::new();
    last.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    for stream in streams {
        let text = stream.text().await.unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    assert_eq!(exit_code(&mut server).await, Some(0), "{}", server.log());
}

/// Longer than open connections are waited for when nothing is asked any more.
const BEYOND_CLOSING: Duration = Duration::from_secs(3);

/// Opens a connection, sends the head of a request and the beginning of its body, and waits until the server wants the rest.
async fn half_asked(server: &Server, body: &str) -> tokio::net::TcpStream {
    let mut client = tokio::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    while !heard.ends_with(b"\r\n\r\n") {
        assert!(client.read_buf(&mut heard).await.unwrap() > 0, "{}", server.log());
    }
    assert_eq!(heard, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(&body.as_bytes()[..10]).await.unwrap();
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn who_still_sends_and_who_reads_slowly_get_their_whole_answers_from_a_server_that_drains() {
    let patient = ["--drain-seconds-max", "600", "--write-timeout-seconds", "600"];
    let mut server = Server::start("base", &patient).await;
    let stream = |tokens: usize, choices: usize| {
        let mut body = ask("base", &json!([1, 2]), tokens);
        (body["stream"], body["n"], body["logprobs"]) = (json!(true), json!(choices), json!(20));
        body.to_string()
    };
    // More than the kernel takes for a client that reads nothing.
    let body = stream(400, 16);
    let mut slow = half_asked(&server, &body).await;
    slow.write_all(&body.as_bytes()[10..]).await.unwrap();
    let mut heard = vec![0; 15];
    slow.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard, b"HTTP/1.1 200 OK");
    // All of it has been computed, little has been taken.
    let idle = async || {
        let load = &server.report().await["load"];
        load["running"] == 0 && load["waiting"] == 0
    };
    server.until("idle", idle).await;
    let body = stream(20, 1);
    let mut late = half_asked(&server, &body).await;
    signal(&server, "-TERM");
    server.until("draining", async || server.log().contains("draining")).await;
    tokio::time::sleep(BEYOND_CLOSING).await;
    late.write_all(&body.as_bytes()[10..]).await.unwrap();
    for (mut client, tokens) in [(slow, 16 * 400), (late, 20)] {
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer.matches("data: {").count(), tokens, "{}", server.log());
        assert!(answer.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{answer}");
    }
    assert_eq!(exit_code(&mut server).await, Some(0), "{}", server.log());
    assert!(!server.log().contains("cut off"), "{}", server.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_never_sends_the_rest_keeps_no_server_from_its_end() {
    let mut server = Server::start("base", &["--drain-seconds-max", "1"]).await;
    let silent = half_asked(&server, &"x".repeat(100)).await;
    signal(&server, "-TERM");
    assert_eq!(exit_code(&mut server).await, Some(0), "{}", server.log());
    assert!(server.log().contains("the time to drain is over; what runs is cut off"), "{}", server.log());
    drop(silent);
}

fn signal(server: &Server, name: &str) {
    let sent = std::process::Command::new("kill").args([name, &server.process.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

async fn exit_code(server: &mut Server) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = server.process.try_wait().unwrap() {
            return status.code();
        }
        assert!(begun.elapsed() < TIME_MAX, "it does not end: {}", server.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_twice_ends_at_once() {
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut server = Server::start("base", &["--drain-seconds-max=600"]).await;
        let body = ask("base", &json!([1]), 1).to_string();
        let open = half_asked(&server, &body).await;
        signal(&server, "-TERM");
        server.until("draining", async || server.log().contains("draining")).await;
        signal(&server, name);
        assert_eq!(exit_code(&mut server).await, Some(code), "{}", server.log());
        assert!(server.log().contains("told again"), "{}", server.log());
        drop(open);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_end_while_it_loads_does_so() {
    let folder = tempfile::tempdir().unwrap();
    // Reading it never ends.
    let model = folder.path().join("model.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&model).status().unwrap().success());
    let model = model.to_str().unwrap().to_owned();
    let mut server = Server::spawn(folder, &model, "base", &[]);
    server.listens().await;
    signal(&server, "-TERM");
    assert_eq!(exit_code(&mut server).await, Some(0), "{}", server.log());
    assert!(server.log().contains("ended before it served"), "{}", server.log());
}
