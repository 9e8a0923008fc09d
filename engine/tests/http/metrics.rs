//! What routers and people read.

use std::collections::BTreeSet;

use serde_json::json;

use super::server::{Server, path, variant};

async fn page(server: &Server) -> String {
    let (status, text) = server.get("/metrics").await;
    assert_eq!(status, 200);
    text.as_str().unwrap().to_owned()
}

/// Whether "a" is shown as running and "b" as waiting.
fn apart(page: &str) -> bool {
    let line = page.lines().find(|line| line.starts_with("vllm:lora_requests_info{")).unwrap();
    line.contains("running_lora_adapters=\"a,a@") && line.contains("waiting_lora_adapters=\"b,b@")
}

fn series(page: &str) -> usize {
    page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_adapters_in_turn_leave_a_bounded_number_of_series() {
    let server = Server::start("base", &["--host-cache=300000"]).await;
    let mut counts = BTreeSet::new();
    for number in 0..200 {
        let folder = variant("plain-r8-qv", server.folder.path(), number);
        assert_eq!(server.load(&format!("a{number}"), folder.to_str().unwrap()).await.0, 200);
        assert_eq!(server.complete(&format!("a{number}"), &json!([number]), 1).await.0, 200);
        if number >= 100 {
            counts.insert(series(&page(&server).await));
        }
    }
    let (fewest, most) = (counts.first().unwrap(), counts.last().unwrap());
    // The tiers' own series may come and go with what is held; nothing grows with the adapters.
    assert!(most - fewest <= 8 && *most < 700, "{counts:?}");
    assert!(page(&server).await.contains("adapter=\"other\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_adapter_is_shown_as_resident_and_running_ones_apart_from_waiting_ones() {
    let server = Server::start("base", &["--max-adapters-per-batch=1", "--age-ms-max=600000"]).await;
    for (name, case) in [("a", "plain-r8-qv"), ("b", "all-linear")] {
        assert_eq!(server.load(name, &path(case)).await.0, 200);
    }
    assert_eq!(server.complete("a", &json!([1]), 2).await.0, 200);
    assert!(page(&server).await.contains("vllm:lora_adapter_loaded{adapter_name=\"a\",level=\"gpu\""));
    let prompt = json!([1]);
    let mut shown = String::new();
    // The tiny model may have answered before anybody looks: then it is asked again.
    server
        .until("apart", async || {
            let running = server.stream("a", &json!([1, 2]), 480).await;
            let look = async {
                let mut pages: Vec<String> = Vec::new();
                while pages.len() < 20 && !pages.last().is_some_and(|last| apart(last)) {
                    pages.push(page(&server).await);
                }
                drop(running);
                pages.pop().unwrap()
            };
            (_, shown) = tokio::join!(server.complete("b", &prompt, 1), look);
            apart(&shown)
        })
        .await;
    assert!(shown.contains("vllm:num_requests_waiting 1\n"), "{shown}");
    assert!(shown.contains("vllm:num_requests_running 1\n"), "{shown}");
    assert!(shown.contains("vllm:cache_config_info{block_size=\""), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_counts_the_bytes_of_each_of_its_adapters_once() {
    let server = Server::start("base", &[]).await;
    let mut bytes = 0.0;
    for (name, case) in [("a", "plain-r8-qv"), ("b", "all-linear")] {
        let (status, reply) = server.load(name, &path(case)).await;
        assert_eq!(status, 200, "{reply}");
        bytes += reply["bytes"].as_f64().unwrap();
    }
    let sum = async || server.counted("lorafleet_step_adapter_bytes_sum ").await;
    for name in ["base", "a", "b"] {
        assert_eq!(server.complete(name, &json!([1]), 1).await.0, 200);
    }
    assert_eq!(sum().await, bytes);
    // Four choices of eight tokens are 32 rows and some eleven steps, each with one adapter.
    let (status, reply) = server.load("c", &path("rslora")).await;
    assert_eq!(status, 200, "{reply}");
    let mut body = super::server::ask("c", &json!([1]), 8);
    body["n"] = json!(4);
    assert_eq!(server.post("/v1/completions", &body).await.0, 200);
    let steps = |count: f64| bytes + count * reply["bytes"].as_f64().unwrap();
    assert!((steps(8.0)..=steps(16.0)).contains(&sum().await));
}
