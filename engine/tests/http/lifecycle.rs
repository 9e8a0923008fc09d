//! Loads, unloads and the races between them and requests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::server::{Server, ask, assert_error, events, path, variant};

#[tokio::test(flavor = "multi_thread")]
async fn unloading_takes_the_name_at_once_and_lets_running_requests_finish() {
    let server = Server::start("base", &[]).await;
    assert_eq!(server.load("a", &path("all-linear")).await.0, 200);
    let prompt = json!([9, 8, 7]);
    let whole = server.complete("a", &prompt, 400).await.1["choices"][0]["token_ids"].clone();
    let stream = server.stream("a", &prompt, 400).await;
    let begun = Instant::now();
    assert_eq!(server.unload("a").await.0, 200);
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert_error(server.complete("a", &prompt, 1).await, 404, "ModelNotFound");
    let report = server.report().await;
    assert_eq!(report["adapters"][0]["state"], "Draining", "{report}");
    let text = stream.text().await.unwrap();
    let streamed: Vec<Value> = events(&text)
        .iter()
        .filter(|event| *event != "[DONE]")
        .flat_map(|event| {
            let event: Value = serde_json::from_str(event).unwrap();
            event["choices"][0]["token_ids"].as_array().unwrap().clone()
        })
        .collect();
    // The first piece was read before.
    let whole = whole.as_array().unwrap();
    assert_eq!(streamed[..], whole[whole.len() - streamed.len()..]);
    assert!(streamed.len() > 300);
    server.until("forgotten", async || server.report().await["adapters"] == json!([])).await;
}

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

#[tokio::test(flavor = "multi_thread")]
async fn one_folder_under_many_names_at_once_is_not_read_for_each_of_them() {
    let server = Server::start("base", &[]).await;
    let folder = path("r100-wide");
    let names: Vec<String> = (0..20).map(|number| format!("a{number}")).collect();
    let loads = futures::future::join_all(names.iter().map(|name| server.load(name, &folder))).await;
    assert!(loads.iter().all(|(status, reply)| *status == 200 && reply["digest"] == loads[0].1["digest"]), "{loads:?}");
    let counted = async |series: &str| {
        let page = server.get("/metrics").await.1;
        let value =
            page.as_str().unwrap().lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<u64>().ok());
        value.unwrap_or_else(|| panic!("no series {series}"))
    };
    // Those that come while one is under way share the next one. How many come in time is the machine's matter.
    let reads = counted("lorafleet_adapter_load_seconds_count").await;
    assert!((1..=10).contains(&reads), "{reads} reads for 20 names");
    // What is refused counts as well.
    assert_error(server.load("b", &path("nan")).await, 422, "Malformed");
    assert_eq!(counted("lorafleet_adapter_load_failures_total{reason=\"Malformed\"}").await, 1);
    assert_eq!(counted("lorafleet_adapter_load_seconds_count").await, reads);
}

/// In host memory, and so for loads under way, there is room for two of them.
#[tokio::test(flavor = "multi_thread")]
async fn loads_whose_client_hangs_up_do_no_harm() {
    let server = Server::start("base", &["--host-cache=600000"]).await;
    let load = |number: usize| {
        let folder = variant("r100-wide", server.folder.path(), number);
        let body = json!({ "lora_name": format!("a{number}"), "lora_path": folder });
        let request = server.client.post(server.url.clone() + "/v1/load_lora_adapter").json(&body);
        request.bearer_auth(super::server::ADMIN_KEY).send()
    };
    let mut hung_up = 0;
    for number in 0..20 {
        let cut = Duration::from_micros(700 * number as u64);
        hung_up += usize::from(tokio::time::timeout(cut, load(number)).await.is_err());
    }
    // All at once as well, so that some wait for room when their clients go.
    let crowd = (20..40).map(|number| tokio::time::timeout(Duration::from_millis(20), load(number)));
    hung_up += futures::future::join_all(crowd).await.iter().filter(|ended| ended.is_err()).count();
    assert!(hung_up > 10, "only {hung_up} hung up in time");
    for number in 40..44 {
        let reply =
            tokio::time::timeout(Duration::from_secs(5), load(number)).await.expect("no room comes back").unwrap();
        assert_eq!(reply.status(), 200);
        assert_eq!(server.complete(&format!("a{number}"), &json!([1]), 4).await.0, 200);
    }
    let budgets = server.report().await["budgets"].clone();
    assert!(budgets["hostBytesUsed"].as_u64().unwrap() <= 600_000, "{budgets}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_whose_client_hangs_up_give_everything_back() {
    let server = Server::start("base", &[]).await;
    assert_eq!(server.load("a", &path("all-linear")).await.0, 200);
    let streams =
        futures::future::join_all((0..16).map(async |at| server.stream("a", &json!([at, 2]), 480).await)).await;
    assert!(server.report().await["adapters"][0]["leases"].as_u64().unwrap() > 0);
    drop(streams);
    let begun = Instant::now();
    server
        .until("given back", async || {
            let report = server.report().await;
            report["adapters"][0]["leases"] == 0 && report["load"]["running"] == 0 && report["load"]["waiting"] == 0
        })
        .await;
    assert!(begun.elapsed() < Duration::from_secs(2), "it took {:?}", begun.elapsed());
    assert_eq!(server.report().await["budgets"]["pagesUsed"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_before_its_whole_reply_gives_everything_back() {
    let server = Server::start("base", &[]).await;
    let prompt = json!([1, 2]);
    // The tiny model may have answered before anybody looks: then it is asked again.
    server
        .until("seen running", async || {
            tokio::select! {
                _ = server.complete("base", &prompt, 500) => false,
                () = server.until("running", async || server.report().await["load"]["running"] == 1) => true,
            }
        })
        .await;
    let begun = Instant::now();
    server.until("given back", async || server.report().await["load"]["running"] == 0).await;
    assert!(begun.elapsed() < Duration::from_millis(500), "it took {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn unloading_under_many_choices_does_not_wait_for_them() {
    let server = Server::start("base", &[]).await;
    assert_eq!(server.load("a", &path("all-linear")).await.0, 200);
    let mut body = ask("a", &json!([1, 2]), 300);
    body["n"] = json!(4);
    let (replies, unloaded) =
        tokio::join!(futures::future::join_all((0..3).map(|_| server.post("/v1/completions", &body))), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let begun = Instant::now();
            (server.unload("a").await.0, begun.elapsed())
        });
    assert_eq!(unloaded.0, 200);
    assert!(unloaded.1 < Duration::from_secs(1), "unloading took {:?}", unloaded.1);
    for (status, reply) in replies {
        assert_eq!((status, reply["choices"].as_array().unwrap().len()), (200, 4), "{reply}");
    }
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
    assert!(read.await < 1000);
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
    let loading = AtomicBool::new(true);
    let reload = async {
        for number in 1..=60 {
            assert_eq!(server.post("/v1/load_lora_adapter", &load(number)).await.0, 200);
        }
        loading.store(false, Ordering::Relaxed);
    };
    let ask = async || {
        let mut answered = 0;
        while loading.load(Ordering::Relaxed) {
            let (status, reply) = server.post("/v1/completions", &body).await;
            assert_eq!(status, 200, "{reply}");
            answered += 1;
        }
        answered
    };
    let ((), answered) = tokio::join!(reload, futures::future::join_all((0..6).map(|_| ask())));
    assert!(answered.iter().sum::<usize>() >= 12, "{answered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_end_finishes_what_runs_and_takes_nothing_new() {
    let mut server = Server::start("base", &[]).await;
    // Enough work that a busy machine still looks before the end of it.
    let mut streams = Vec::new();
    for first in 1..=8 {
        streams.push(server.stream("base", &json!([first, 2]), 500).await);
    }
    let killed = std::process::Command::new("kill").arg(server.process.id().to_string()).status().unwrap();
    assert!(killed.success());
    server.until("draining", async || server.get("/readyz").await.0 == 503).await;
    assert_error(server.complete("base", &json!([1]), 1).await, 503, "Draining");
    for stream in streams {
        let text = stream.text().await.unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    let begun = Instant::now();
    while server.process.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(5), "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(server.process.wait().unwrap().success(), "{}", server.log());
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
        assert!(begun.elapsed() < Duration::from_secs(10), "it does not end: {}", server.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_twice_ends_at_once() {
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut server = Server::start("base", &[]).await;
        let mut streams = Vec::new();
        for first in 1..=8 {
            streams.push(server.stream("base", &json!([first, 2]), 500).await);
        }
        signal(&server, "-TERM");
        server.until("draining", async || server.log().contains("draining")).await;
        signal(&server, name);
        assert_eq!(exit_code(&mut server).await, Some(code), "{}", server.log());
        assert!(server.log().contains("told again"), "{}", server.log());
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
    let listens = async || tokio::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).await.is_ok();
    server.until("listening", listens).await;
    signal(&server, "-TERM");
    assert_eq!(exit_code(&mut server).await, Some(0), "{}", server.log());
    assert!(server.log().contains("ended before it served"), "{}", server.log());
}
