//! Adapters of any size.

use serde_json::json;

use super::server::Server;
use super::wide::{write_adapter, write_base};

async fn started(flags: &[&str]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    write_base(&folder.path().join("model"));
    write_adapter(&folder.path().join("r8"), 8);
    let model = folder.path().join("model").to_str().unwrap().to_owned();
    let server = Server::start_model(folder, &model, "base", flags).await;
    server.wait_ready().await;
    server
}

/// Ranks are exact: what the server would accept costs nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_adapter_takes_as_much_under_a_high_limit_as_under_a_low_one() {
    let mut held = Vec::new();
    for limit in ["--max-rank=256", "--max-rank=8"] {
        let server = started(&["--page-budget=120000000", "--host-cache=100000000", limit]).await;
        let (status, loaded) = server.load("r8", server.folder.path().join("r8").to_str().unwrap()).await;
        assert_eq!(status, 200, "{loaded}");
        let answer = server.complete("r8", &json!([1, 2, 3]), 8).await.1["choices"][0]["token_ids"].clone();
        let budgets = server.report().await["budgets"].clone();
        assert_eq!(budgets["pagesUsed"], 0, "{budgets}");
        held.push((loaded, answer, budgets));
    }
    assert_eq!(held[0], held[1]);
    assert!(held[0].2["pagesCached"].as_u64().unwrap() > 0, "it takes no pages: {}", held[0].2);
}
