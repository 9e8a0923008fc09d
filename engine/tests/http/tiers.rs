//! Little room: on the device, in host memory, on disk.

use std::time::Duration;

use futures::StreamExt as _;
use serde_json::{Value, json};

use super::server::{Server, digest_of, path, variant};

async fn ids(server: &Server, model: &str) -> Value {
    let (status, reply) = server.complete(model, &json!([5, 6, 7, 8]), 12).await;
    assert_eq!(status, 200, "{model}: {reply}");
    reply["choices"][0]["token_ids"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_adapter_comes_back_the_same_and_the_client_sees_only_its_answer() {
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("{},100000000", disk.path().display());
    let server = Server::start("base", &["--host-cache=60000", "--page-budget=90000", "--disk-cache", &disk]).await;
    let names = ["plain-r8-qv", "all-linear", "r3-odd", "rslora"];
    for name in names {
        let (status, reply) = server.load(name, &path(name)).await;
        assert_eq!(status, 200, "{reply}");
    }
    let mut first = Vec::new();
    for name in names {
        first.push(ids(&server, name).await);
    }
    for _ in 0..5 {
        for (name, first) in names.iter().zip(&first) {
            assert_eq!(&ids(&server, name).await, first, "{name}");
        }
    }
    let report = server.report().await;
    let evictions: u64 =
        report["adapters"].as_array().unwrap().iter().map(|row| row["evictions"].as_u64().unwrap()).sum();
    assert!(evictions > 10, "nothing was evicted: {report}");
    assert!(report["budgets"]["hostBytesUsed"].as_u64().unwrap() <= 60000, "{report}");
    assert!(report["budgets"]["diskBytesUsed"].as_u64().unwrap() > 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_place_and_a_long_stream_still_let_the_other_adapter_and_the_base_go_on() {
    let server = Server::start("base", &["--max-adapters-per-batch=1", "--age-ms-max=300"]).await;
    for (name, case) in [("a", "plain-r8-qv"), ("b", "all-linear")] {
        assert_eq!(server.load(name, &path(case)).await.0, 200);
    }
    let alone = server.complete("a", &json!([1, 2]), 500).await.1["choices"][0]["token_ids"].clone();
    let long = async { server.complete("a", &json!([1, 2]), 500).await.1["choices"][0]["token_ids"].clone() };
    let others = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (base, again, other) = tokio::join!(ids(&server, "base"), ids(&server, "a"), ids(&server, "b"));
        assert!(base.is_array() && again.is_array() && other.is_array());
    };
    let (long, ()) = tokio::join!(long, others);
    assert_eq!(long, alone, "giving its place up changed an answer");
}

#[tokio::test(flavor = "multi_thread")]
async fn pinned_adapters_stay_where_they_are_under_a_flood() {
    let server = Server::start("base", &["--host-cache=120000", "--page-budget=600000"]).await;
    let body = json!({ "lora_name": "pinned", "lora_path": path("plain-r8-qv"), "pinned": true });
    let (status, reply) = server.post("/v1/load_lora_adapter", &body).await;
    assert_eq!(status, 200, "{reply}");
    for number in 0..30 {
        let folder = variant("all-linear", server.folder.path(), number);
        assert_eq!(server.load(&format!("a{number}"), folder.to_str().unwrap()).await.0, 200);
        ids(&server, &format!("a{number}")).await;
    }
    let report = server.report().await;
    let row = report["adapters"].as_array().unwrap().iter().find(|row| row["name"] == "pinned").unwrap().clone();
    assert_eq!((&row["tier"], &row["evictions"], &row["loads"]), (&json!("Device"), &json!(0), &json!(1)), "{row}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_never_fit_is_refused_with_both_values() {
    let server = Server::start("base", &["--host-cache=4000", "--page-budget=400000"]).await;
    let (status, reply) = server.load("a", &path("r100-wide")).await;
    assert_eq!((status, reply["error"]["code"].as_str()), (422, Some("TooLarge")), "{reply}");
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(message.contains("4000"), "{message}");
    let busy = Server::start("base", &["--max-queued=2"]).await;
    let mut body = super::server::ask("base", &json!([1]), 400);
    body["n"] = json!(3);
    let (status, reply) = busy.post("/v1/completions", &body).await;
    assert_eq!((status, reply["error"]["code"].as_str()), (429, Some("Busy")), "{reply}");
}

/// Far more adapters than any tier has room for, asked for at once: each answer is PEFT's.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_adapters_through_little_room_answer_as_alone() {
    const ADAPTERS: usize = 1000;
    const ASKED: usize = 400;
    let disk = tempfile::tempdir().unwrap();
    let disk = format!("{},400000", disk.path().display());
    let room = ["--managed", "--host-cache=100000", "--page-budget=200000", "--max-adapters-per-batch=3"];
    let server =
        Server::start_unready("base", &[&room[..], &["--age-ms-max=200", "--disk-cache", &disk]].concat()).await;
    let names = ["plain-r8-qv", "all-linear", "r3-odd", "rslora", "merge-a"];
    let folders: Vec<_> =
        (0..ADAPTERS).map(|number| variant(names[number % names.len()], server.folder.path(), number)).collect();
    let adapters: Vec<(String, String)> =
        folders.iter().enumerate().map(|(number, folder)| (format!("a{number}"), digest_of(folder))).collect();
    let placed: Vec<Value> = adapters
        .iter()
        .zip(&folders)
        .map(|((name, digest), folder)| json!({ "name": name, "digest": digest, "uri": folder, "floor": "None" }))
        .collect();
    let aliases: Value = adapters.iter().map(|(name, digest)| (name.clone(), json!(digest))).collect();
    let boot = server.report().await["bootId"].clone();
    let placement = json!({ "bootId": boot, "generation": 1, "adapters": placed, "aliases": aliases });
    assert_eq!(server.put("/v1/placement", &placement).await.0, 200);
    server.wait_ready().await;
    let rows = names.map(|name| super::server::case(name)["answers"].as_array().unwrap().clone());
    // A fixed walk over all of them, in which some come again soon.
    let asked = (0..ASKED).map(|turn| (turn * 7919 + turn % 3) % ADAPTERS);
    let checked = futures::stream::iter(asked.map(|number| {
        let rows = &rows[number % names.len()];
        let (server, row) = (&server, &rows[number % rows.len()]);
        async move { server.check_row(&format!("a{number}"), row).await }
    }));
    assert_eq!(checked.buffer_unordered(12).count().await, ASKED);
    let budgets = server.report().await["budgets"].clone();
    let used = |tier: &str| budgets[tier].as_u64().unwrap();
    assert!(used("hostBytesUsed") <= 100_000 && used("diskBytesUsed") <= 400_000, "{budgets}");
    assert_eq!(used("pagesUsed"), 0, "{budgets}");
    let counted = server.get("/metrics").await.1;
    let dropped = counted.as_str().unwrap().lines().filter(|line| line.contains("move=\"DropHost\"")).count();
    assert_eq!(dropped, 1, "nothing had to make room: the test tests nothing");
}

/// Clients leave `max_tokens` out: the answer may then be as long as the pages allow, beside the adapter and whatever is
/// pinned, whether the adapter's size was known when they asked or not.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_unasked_length_takes_what_fits() {
    let server = Server::start_unready("base", &["--managed", "--page-budget=200000"]).await;
    let names = ["all-linear", "plain-r8-qv"];
    let placed = names.map(|name| {
        let digest = digest_of(&super::server::cases().join(name));
        json!({ "name": name, "digest": digest, "uri": path(name), "floor": "None" })
    });
    let aliases: Value = placed.iter().map(|row| (row["name"].as_str().unwrap(), row["digest"].clone())).collect();
    let boot = server.report().await["bootId"].clone();
    let place = async |generation: u64, pinned: bool| {
        let mut placed = placed.clone();
        (placed[1]["floor"], placed[1]["pinned"]) = (json!(if pinned { "Device" } else { "None" }), json!(pinned));
        let body = json!({ "bootId": boot, "generation": generation, "adapters": placed, "aliases": aliases });
        assert_eq!(server.put("/v1/placement", &body).await.0, 200);
    };
    place(1, false).await;
    let chat = async |model: &str| {
        let body = json!({ "model": model, "messages": [{ "role": "user", "content": "hello" }], "temperature": 0,
            "ignore_eos": true });
        let (status, reply) = server.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{model}: {reply}");
        assert_eq!(reply["choices"][0]["finish_reason"], "length", "{reply}");
        reply["usage"]["total_tokens"].as_u64().unwrap()
    };
    let pages = server.report().await["budgets"]["pagesTotal"].as_u64().unwrap();
    assert_eq!(chat("base").await, pages * 16);
    // Cold, then warm: the same length, and the adapter's pages are missing from it.
    let cold = chat("all-linear").await;
    assert!(cold < pages * 16 && cold > pages * 16 / 2, "{cold} of {}", pages * 16);
    assert_eq!(chat("all-linear").await, cold);
    let asked = json!({ "model": "all-linear", "prompt": [1], "max_tokens": pages * 16 - 1 });
    let (status, reply) = server.post("/v1/completions", &asked).await;
    assert_eq!((status, reply["error"]["code"].as_str()), (400, Some("OutOfPages")), "{reply}");
    // Pages that a floor holds are not counted on.
    place(2, true).await;
    let pinned = async || server.report().await["adapters"][1]["tier"] == "Device";
    server.until("pinned", pinned).await;
    assert!(chat("all-linear").await < cold && chat("base").await < pages * 16);
    assert!(chat("plain-r8-qv").await > cold);
}
