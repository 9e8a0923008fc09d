//! PEFT's own answers: alone, mixed, after unload and reload, in small chunks.

use serde_json::Value;

use super::server::{Server, answers, assert_error, case, cases, path};

fn names(base: &str) -> Vec<(String, Value)> {
    let mut names: Vec<String> = std::fs::read_dir(cases())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| cases().join(name).join("case.json").exists())
        .collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), case(&name))).filter(|(_, case)| case["base"] == base).collect()
}

async fn check(base: &str, flags: &[&str]) {
    let server = Server::start(base, flags).await;
    for row in answers(base) {
        server.check_row(base, &row).await;
    }
    let mut served = Vec::new();
    for (name, case) in names(base) {
        let (status, reply) = server.load(&name, &path(&name)).await;
        let code = reply["error"]["code"].clone();
        match case["expect"].as_str().unwrap() {
            "serve" => assert_eq!(status, 200, "{name}: {reply}"),
            "refuse" => {
                assert_eq!((status, &code), (422, &case["reason"]), "{name}: {reply}");
                assert_error(server.complete(&name, &serde_json::json!([1, 2]), 1).await, 404, "ModelNotFound");
            }
            _ => assert!(status == 200 || (status == 422 && code.is_string()), "{name}: {status} {reply}"),
        }
        if status == 200 {
            served.push((name, case));
        }
    }
    assert!(served.len() > usize::from(base == "base") * 8, "only {} cases are served", served.len());
    for (name, case) in &served {
        for row in case["answers"].as_array().into_iter().flatten() {
            server.check_row(name, row).await;
        }
    }
    let mut mixed = Vec::new();
    for _ in 0..3 {
        for (name, case) in &served {
            mixed.extend(case["answers"].as_array().into_iter().flatten().map(|row| (name.clone(), row.clone())));
        }
        mixed.extend(answers(base).into_iter().map(|row| (base.to_owned(), row)));
    }
    futures::future::join_all(mixed.iter().map(|(model, row)| server.check_row(model, row))).await;
    for (name, case) in &served {
        assert_eq!(server.unload(name).await.0, 200);
        assert_error(server.complete(name, &serde_json::json!([1]), 1).await, 404, "ModelNotFound");
        assert_eq!(server.load(name, &path(name)).await.0, 200);
        if let Some(row) = case["answers"].get(1) {
            server.check_row(name, row).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_base_and_its_adapters_answer_like_peft() {
    check("base", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tied_base_and_its_adapters_answer_like_peft() {
    check("base-tied", &[]).await;
}

/// Chunks of 7 tokens, two adapters at a time, and so few pages that sequences are put back and computed again.
#[tokio::test(flavor = "multi_thread")]
async fn they_do_so_in_small_chunks_and_with_little_room() {
    check("base", &["--max-step-tokens=7", "--max-sequences=5", "--max-adapters-per-batch=2", "--page-budget=1500000"])
        .await;
}
