//! What routers and people read.

use std::collections::BTreeSet;

use serde_json::json;

use super::server::{Server, path, variant};

async fn page(server: &Server) -> String {
    let (status, text) = server.get("/metrics").await;
    assert_eq!(status, 200);
    text.as_str().unwrap().to_owned()
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
    server
        .until("resident", async || {
            page(&server).await.contains("vllm:lora_adapter_loaded{adapter_name=\"a\",level=\"gpu\"")
        })
        .await;
    let running = server.stream("a", &json!([1, 2]), 480).await;
    let prompt = json!([1]);
    let waiting = server.complete("b", &prompt, 1);
    let (_, shown) = tokio::join!(waiting, async {
        let mut shown = None;
        server
            .until("apart", async || {
                let page = page(&server).await;
                let line = page.lines().find(|line| line.starts_with("vllm:lora_requests_info{")).unwrap().to_owned();
                let apart =
                    line.contains("running_lora_adapters=\"a,a@") && line.contains("waiting_lora_adapters=\"b,b@");
                shown = Some(page);
                apart
            })
            .await;
        drop(running);
        shown.unwrap()
    });
    assert!(shown.contains("vllm:num_requests_waiting 1\n"), "{shown}");
    assert!(shown.contains("vllm:num_requests_running 1\n"), "{shown}");
    assert!(shown.contains("vllm:cache_config_info{block_size=\""), "{shown}");
}
