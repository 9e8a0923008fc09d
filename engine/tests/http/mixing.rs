//! A request's answer does not depend on its batch mates.

use serde_json::Value;

use super::server::{Server, path};

fn prompt(length: usize, salt: usize) -> Value {
    (0..length).map(|at| (at * 31 + salt * 7 + at * at) % 256).collect::<Vec<_>>().into()
}

fn words(reply: &(u16, Value)) -> (Value, Value) {
    assert_eq!(reply.0, 200, "{}", reply.1);
    let choice = &reply.1["choices"][0];
    (choice["token_ids"].clone(), choice["logprobs"]["token_logprobs"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_at_once_answer_bit_for_bit_as_alone() {
    let alone = Server::start("base", &[]).await;
    let crowd =
        Server::start("base", &["--max-step-tokens=40", "--max-sequences=12", "--max-adapters-per-batch=3"]).await;
    let adapters = ["plain-r8-qv", "all-linear", "r3-odd", "r100-wide"];
    for server in [&alone, &crowd] {
        for adapter in adapters {
            assert_eq!(server.load(adapter, &path(adapter)).await.0, 200);
        }
    }
    let lengths = [1, 15, 16, 17, 127, 128, 129, 200, 450, 3, 64, 31];
    let asks: Vec<(&str, Value)> = (0..32)
        .map(|at| (["base", adapters[0], adapters[1], adapters[2], adapters[3]][at % 5], prompt(lengths[at % 12], at)))
        .collect();
    let mut expected = Vec::new();
    for (model, prompt) in &asks {
        expected.push(words(&alone.complete(model, prompt, 20).await));
    }
    let found = futures::future::join_all(asks.iter().map(|(model, prompt)| crowd.complete(model, prompt, 20))).await;
    for ((found, expected), ask) in found.iter().zip(&expected).zip(&asks) {
        assert_eq!(&words(found), expected, "{} with {} tokens", ask.0, ask.1.as_array().unwrap().len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_is_loaded_and_not_used_changes_nothing() {
    let server = Server::start("base", &[]).await;
    let before = words(&server.complete("base", &prompt(40, 1), 30).await);
    assert_eq!(server.load("plain", &path("plain-r8-qv")).await.0, 200);
    assert_eq!(words(&server.complete("base", &prompt(40, 1), 30).await), before);
    server.complete("plain", &prompt(40, 1), 3).await;
    assert_eq!(words(&server.complete("base", &prompt(40, 1), 30).await), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_values_are_shared_under_the_same_weights_only() {
    let server = Server::start("base", &[]).await;
    assert_eq!(server.load("x", &path("plain-r8-qv")).await.0, 200);
    let long = prompt(70, 5);
    let ask = async |model: &str| {
        let reply = server.complete(model, &long, 8).await;
        let cached = reply.1["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (words(&reply), cached)
    };
    let (base, cached) = ask("base").await;
    assert_eq!(cached, 0);
    let (adapted, cached) = ask("x").await;
    assert_eq!(cached, 0, "the base's pages were used for an adapter");
    assert_ne!(base, adapted);
    let (again, cached) = ask("base").await;
    assert_eq!((&again, cached > 0), (&base, true));
    let (again, cached) = ask("x").await;
    assert_eq!((&again, cached > 0), (&adapted, true));
    // Another adapter under the same name.
    assert_eq!(server.unload("x").await.0, 200);
    assert_eq!(server.load("x", &path("all-linear")).await.0, 200);
    let (other, cached) = ask("x").await;
    assert_eq!(cached, 0);
    assert_ne!(other, adapted);
    assert_eq!(server.load("y", &path("plain-r8-qv")).await.0, 200);
    let (same_content, cached) = ask("y").await;
    assert_eq!((&same_content, cached > 0), (&adapted, true));
}
