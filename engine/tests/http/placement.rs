//! A managed engine: one desired state, and what it says about it.

use serde_json::{Value, json};

use super::server::{Server, assert_error, cases, digest_of, path, variant};

fn adapter(name: &str, digest: &str, uri: &str, floor: &str) -> Value {
    json!({ "name": name, "namespace": "team", "digest": digest, "uri": uri, "floor": floor })
}

async fn boot(server: &Server) -> Value {
    server.report().await["bootId"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placement_is_made_true_and_moves_names_without_losing_requests() {
    let server = Server::start_unready("base", &["--managed"]).await;
    assert_error(server.get("/readyz").await, 503, "NotReady");
    assert_error(server.load("a", &path("plain-r8-qv")).await, 409, "Managed");
    assert_error(server.unload("a").await, 409, "Managed");
    let (old, new) = (digest_of(&cases().join("plain-r8-qv")), digest_of(&cases().join("all-linear")));
    let boot = boot(&server).await;
    let first = json!({ "bootId": boot, "generation": 3, "revision": "r1", "aliases": { "a": old },
        "adapters": [adapter("a", &old, &path("plain-r8-qv"), "Host")] });
    let (status, reply) = server.put("/v1/placement", &first).await;
    assert_eq!(status, 200, "{reply}");
    server.wait_ready().await;
    let report = server.report().await;
    assert_eq!((&report["generation"], &report["revision"], &report["ready"]), (&json!(3), &json!("r1"), &json!(true)));
    assert_eq!(report["adapters"][0]["state"], "Ready", "{report}");
    assert_eq!(report["adapters"][0]["tier"], "Host", "{report}");
    for row in super::server::case("plain-r8-qv")["answers"].as_array().unwrap() {
        server.check_row("a", row).await;
    }
    // Both versions at once; the bare name moves.
    let second = json!({ "bootId": boot, "generation": 4, "aliases": { "a": new },
        "adapters": [adapter("a", &old, &path("plain-r8-qv"), "None"), adapter("a", &new, &path("all-linear"), "Device")] });
    assert_eq!(server.put("/v1/placement", &second).await.0, 200);
    server
        .until("on the device", async || {
            let report = server.report().await;
            let rows = report["adapters"].as_array().unwrap().clone();
            rows.iter().any(|row| row["digest"] == json!(new) && row["tier"] == "Device")
        })
        .await;
    let row = |name: &str| super::server::case(name)["answers"][2].clone();
    server.check_row("a", &row("all-linear")).await;
    let short = |digest: &str| format!("a@{}", &digest["sha256:".len()..][..12]);
    server.check_row(&short(&old), &row("plain-r8-qv")).await;
    server.check_row(&short(&new), &row("all-linear")).await;
    let reply = server
        .client
        .post(server.url.clone() + "/v1/completions")
        .json(&json!({"model": "a", "prompt": [1], "max_tokens": 1}));
    let reply = reply.send().await.unwrap();
    assert_eq!(reply.headers()["x-lorafleet-adapter"], short(&new));
    // The old one leaves while it is in use.
    let stream = server.stream(&short(&old), &json!([1, 2]), 450).await;
    let third = json!({ "bootId": boot, "generation": 5, "aliases": { "a": new },
        "adapters": [adapter("a", &new, &path("all-linear"), "None")] });
    assert_eq!(server.put("/v1/placement", &third).await.0, 200);
    assert_error(server.complete(&short(&old), &json!([1]), 1).await, 404, "ModelNotFound");
    let text = stream.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""));
    server.until("gone", async || server.report().await["adapters"].as_array().unwrap().len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_or_contradictory_placement_changes_nothing() {
    let server = Server::start_unready("base", &["--managed"]).await;
    let boot = boot(&server).await;
    let digest = digest_of(&cases().join("plain-r8-qv"));
    let place = |generation: u64, boot: &Value, name: &str| {
        json!({ "bootId": boot, "generation": generation, "aliases": { name: digest },
            "adapters": [adapter(name, &digest, &path("plain-r8-qv"), "None")] })
    };
    assert_error(server.put("/v1/placement", &place(1, &json!("another"), "a")).await, 409, "Stale");
    assert_eq!(server.put("/v1/placement", &place(7, &boot, "a")).await.0, 200);
    assert_eq!(server.put("/v1/placement", &place(7, &boot, "a")).await.0, 200);
    assert_error(server.put("/v1/placement", &place(7, &boot, "b")).await, 409, "Stale");
    assert_error(server.put("/v1/placement", &place(6, &boot, "a")).await, 409, "Stale");
    assert_error(server.put("/v1/placement", &place(8, &boot, "base")).await, 409, "NameConflict");
    let mut wrong = place(8, &boot, "a");
    wrong["aliases"] = json!({ "c": digest });
    assert_error(server.put("/v1/placement", &wrong).await, 400, "InvalidRequest");
    wrong["surprise"] = json!(1);
    assert_error(server.put("/v1/placement", &wrong).await, 400, "InvalidRequest");
    let mut merged = place(8, &boot, "a");
    merged["role"] = json!({ "merged": digest });
    assert_error(server.put("/v1/placement", &merged).await, 422, "UnsupportedFeature");
    assert_eq!(server.report().await["generation"], 7);
    assert_eq!(server.complete("a", &json!([1]), 1).await.0, 200);
    let standalone = Server::start("base", &[]).await;
    assert_error(standalone.put("/v1/placement", &place(1, &boot, "a")).await, 409, "Standalone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_process_serves_what_it_had_under_a_new_boot_id() {
    let disk = tempfile::tempdir().unwrap();
    let cache = format!("{},100000000", disk.path().display());
    let mut server = Server::start_unready("base", &["--managed", "--disk-cache", &cache]).await;
    let first_boot = boot(&server).await;
    let folder = variant("plain-r8-qv", server.folder.path(), 1);
    let digest = digest_of(&folder);
    let placement = json!({ "bootId": first_boot, "generation": 9, "revision": "r", "aliases": { "a": digest },
        "adapters": [adapter("a", &digest, folder.to_str().unwrap(), "Device")] });
    assert_eq!(server.put("/v1/placement", &placement).await.0, 200);
    server.wait_ready().await;
    let answer = server.complete("a", &json!([3, 4]), 8).await.1["choices"][0]["token_ids"].clone();
    server.process.kill().unwrap();
    server.process.wait().unwrap();
    // The source is gone; the disk has its copy.
    std::fs::remove_dir_all(&folder).unwrap();
    let allowed = server.folder.path().to_str().unwrap().to_owned();
    let again = Server::start("base", &["--managed", "--disk-cache", &cache, "--allowed-source", &allowed]).await;
    let report = again.report().await;
    assert_ne!(report["bootId"], first_boot);
    assert_eq!((&report["generation"], &report["revision"]), (&json!(0), &json!("")));
    assert_eq!(again.complete("a", &json!([3, 4]), 8).await.1["choices"][0]["token_ids"], answer);
    assert_error(again.put("/v1/placement", &placement).await, 409, "Stale");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_adapter_gives_each_queued_request_its_typed_error() {
    let server = Server::start_unready("base", &["--managed"]).await;
    let boot = boot(&server).await;
    let broken = digest_of(&cases().join("nan"));
    let forbidden = digest_of(&cases().join("all-linear"));
    let placement = json!({ "bootId": boot, "generation": 1, "aliases": { "broken": broken, "far": forbidden },
        "adapters": [adapter("broken", &broken, &path("nan"), "None"),
            adapter("far", &forbidden, "s3://elsewhere/x", "Host")] });
    assert_eq!(server.put("/v1/placement", &placement).await.0, 200);
    // A floor that can never be reached does not keep the pod from serving the others.
    server.wait_ready().await;
    let prompt = json!([1]);
    let replies = futures::future::join_all((0..10).map(|_| server.complete("broken", &prompt, 1))).await;
    for reply in replies {
        assert_error(reply, 422, "Malformed");
    }
    assert_error(server.complete("far", &json!([1]), 1).await, 403, "SourceForbidden");
    assert_eq!(server.complete("base", &json!([1]), 1).await.0, 200);
    let report = server.report().await;
    for row in report["adapters"].as_array().unwrap() {
        assert_eq!(row["state"], "Failed", "{row}");
        assert!(row["lastError"]["code"].is_string(), "{row}");
    }
    // Other bytes than promised are refused as well.
    let wrong = json!({ "bootId": boot, "generation": 2, "aliases": { "w": forbidden },
        "adapters": [adapter("w", &forbidden, &path("plain-r8-qv"), "None")] });
    assert_eq!(server.put("/v1/placement", &wrong).await.0, 200);
    assert_error(server.complete("w", &json!([1]), 1).await, 422, "DigestMismatch");
}
