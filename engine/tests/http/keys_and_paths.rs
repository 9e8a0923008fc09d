//! Who may do what, and from where.

use std::time::Duration;

use serde_json::json;

use super::server::{ADMIN_KEY, Server, assert_error, path, read};

#[tokio::test(flavor = "multi_thread")]
async fn every_route_that_changes_something_wants_the_admin_key() {
    let server = Server::start("base", &[]).await;
    for (method, route) in [
        (reqwest::Method::POST, "/v1/load_lora_adapter"),
        (reqwest::Method::POST, "/v1/unload_lora_adapter"),
        (reqwest::Method::PUT, "/v1/placement"),
    ] {
        let ask = |key: Option<&str>| {
            let request = server.client.request(method.clone(), server.url.clone() + route).json(&json!({}));
            let request = if let Some(key) = key { request.bearer_auth(key) } else { request };
            async { read(request.send().await.unwrap()).await }
        };
        assert_error(ask(None).await, 401, "KeyMissing");
        assert_error(ask(Some("the-admin-kex")).await, 403, "KeyWrong");
        assert_error(ask(Some("")).await, 401, "KeyMissing");
        assert_eq!(ask(Some(ADMIN_KEY)).await.0, 400, "{route} with the key looks at the body");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_need_a_key_where_there_are_keys_and_a_changed_file_counts() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "one\ntwo\n").unwrap();
    let server = Server::start("base", &["--api-key-file", keys.to_str().unwrap()]).await;
    let ask = async |route: &str, key: &str| {
        let request = server.client.get(server.url.clone() + route);
        read(request.bearer_auth(key).send().await.unwrap()).await.0
    };
    assert_eq!(ask("/v1/lora_adapters", "two").await, 200);
    assert_eq!(ask("/v1/lora_adapters", ADMIN_KEY).await, 200);
    assert_eq!(ask("/v1/lora_adapters", "three").await, 401);
    for route in ["/v1/models", "/v1/models/base"] {
        assert_eq!((ask(route, "two").await, ask(route, "three").await), (200, 401), "{route}");
    }
    for open in ["/metrics", "/healthz", "/readyz"] {
        assert_eq!(ask(open, "three").await, 200, "{open}");
    }
    let chat = server.client.post(server.url.clone() + "/v1/chat/completions").json(&json!({}));
    assert_error(read(chat.send().await.unwrap()).await, 401, "KeyMissing");
    std::fs::write(&keys, "three\n").unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(ask("/v1/lora_adapters", "three").await, 200);
    assert_eq!(ask("/v1/lora_adapters", "two").await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_path_leads_out_of_the_allowed_sources() {
    let server = Server::start("base", &[]).await;
    let outside = tempfile::tempdir().unwrap();
    let inside = server.folder.path();
    std::os::unix::fs::symlink(outside.path(), inside.join("link")).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(format!("{}/{file}", path("plain-r8-qv")), outside.path().join(file)).unwrap();
    }
    let inside = inside.display();
    for (path, statuses) in [
        (outside.path().display().to_string(), &[403][..]),
        (format!("{inside}/../{}", outside.path().file_name().unwrap().display()), &[403]),
        (format!("{inside}/%2e%2e/x"), &[403, 404]),
        (format!("{inside}/link"), &[403]),
        (format!("{inside}/x\0y"), &[403]),
        (format!("{inside}-evil"), &[403]),
        (format!("file://{inside}/nothing"), &[404]),
        ("s3://bucket/adapter".to_owned(), &[403]),
        ("/etc/passwd".to_owned(), &[403]),
        ("relative/path".to_owned(), &[400, 403]),
    ] {
        let (status, reply) = server.load("x", &path).await;
        assert!(statuses.contains(&status), "{path:?}: {status} {reply}");
        assert!(reply["error"]["code"].is_string(), "{reply}");
    }
    for name in ["../x", "..%2f", "base/../x", "x\0"] {
        assert_error(server.complete(name, &json!([1]), 1).await, 404, "ModelNotFound");
    }
    assert_eq!(server.get("/v1/models").await.1["data"].as_array().unwrap().len(), 1);
    // A slash at the end changes nothing.
    assert_eq!(server.load("x", &(path("plain-r8-qv") + "/")).await.0, 200);
}

#[test]
fn an_empty_key_file_is_a_mistake_that_is_said_at_once() {
    let outcome = std::process::Command::new(env!("CARGO_BIN_EXE_lorafleet-engine"))
        .args(["serve", "--model", &path("base"), "--listen", "127.0.0.1:0", "--api-key-file", "/dev/null"])
        .output()
        .unwrap();
    assert!(!outcome.status.success());
    assert!(String::from_utf8_lossy(&outcome.stderr).contains("/dev/null holds no key"));
}
