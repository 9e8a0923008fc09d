//! Replies of the load routes, the list of models, and adapters of the command line.

use serde_json::{Value, json};

use super::server::{Server, assert_error, cases, digest_of, path};

#[tokio::test(flavor = "multi_thread")]
async fn a_load_says_what_it_did_and_models_list_it() {
    let server = Server::start("base", &[]).await;
    let (status, reply) = server.load("team/a", &path("plain-r8-qv")).await;
    assert_eq!(status, 200, "{reply}");
    let digest = digest_of(&cases().join("plain-r8-qv"));
    assert_eq!((&reply["lora_name"], &reply["digest"]), (&json!("team/a"), &json!(digest)));
    assert_eq!((&reply["rank"], &reply["modules"], &reply["tier"]), (&json!(8), &json!(4), &json!("Host")));
    let (_, models) = server.get("/v1/models").await;
    let rows = models["data"].as_array().unwrap();
    assert_eq!((&rows[0]["id"], &rows[0]["parent"]), (&json!("base"), &json!(null)));
    assert_eq!((&rows[1]["id"], &rows[1]["parent"], &rows[1]["rank"]), (&json!("team/a"), &json!("base"), &json!(8)));
    assert_eq!(rows[1]["digest"], json!(digest));
    assert!(!models.to_string().contains(cases().to_str().unwrap()), "a path of the server is shown: {models}");
    // One by one, by every name that a request may give.
    let versioned = format!("team/a@{}", &digest["sha256:".len()..][..12]);
    for (id, row) in [("base", &rows[0]), ("team/a", &rows[1]), (&versioned, &rows[1]), ("team%2Fa", &rows[1])] {
        let (status, model) = server.get(&format!("/v1/models/{id}")).await;
        assert_eq!((status, &model["digest"], &model["parent"]), (200, &row["digest"], &row["parent"]), "{id}");
    }
    for unknown in ["team", "a", "team/a@00000000", "%00"] {
        assert_error(server.get(&format!("/v1/models/{unknown}")).await, 404, "ModelNotFound");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_knows_the_holdings_hears_only_that_they_are_the_same() {
    let server = Server::start("base", &[]).await;
    let known = async |report: &Value| {
        server.get(&format!("/v1/lora_adapters?known={}", report["holdings"].as_str().unwrap())).await.1
    };
    let none = server.report().await;
    assert_eq!(server.load("a", &path("plain-r8-qv")).await.0, 200);
    let one = known(&none).await;
    assert_eq!((&one["unchanged"], &one["adapters"][0]["name"]), (&json!(false), &json!("a")), "{one}");
    let same = known(&one).await;
    assert_eq!((&same["unchanged"], &same["holdings"]), (&json!(true), &one["holdings"]));
    assert_eq!((&same["adapters"], &same["aliases"]), (&json!([]), &json!({})));
    // The first use brings it to the device, which who routes must hear of; a second one moves counters only.
    assert_eq!(server.complete("a", &json!([1, 2]), 1).await.0, 200);
    let used = known(&one).await;
    assert_eq!((&used["unchanged"], &used["adapters"][0]["tier"]), (&json!(false), &json!("Device")), "{used}");
    assert_eq!(server.complete("a", &json!([1, 2]), 1).await.0, 200);
    assert_eq!(known(&used).await["unchanged"], json!(true));
    assert_eq!(server.unload("a").await.0, 200);
    assert_eq!(known(&used).await["unchanged"], json!(false));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_loads_are_refused_by_name() {
    let server = Server::start("base", &[]).await;
    for (name, path, status, code) in [
        ("", path("plain-r8-qv"), 400, "InvalidRequest"),
        ("a b", path("plain-r8-qv"), 400, "InvalidRequest"),
        ("a@b", path("plain-r8-qv"), 400, "InvalidRequest"),
        ("a", String::new(), 400, "InvalidRequest"),
        ("base", path("plain-r8-qv"), 409, "NameConflict"),
        ("a", path("not-there"), 404, "NotFound"),
    ] {
        assert_error(server.load(name, &path).await, status, code);
    }
    let body =
        json!({ "lora_name": "a", "lora_path": path("plain-r8-qv"), "digest": digest_of(&cases().join("all-linear")) });
    assert_error(server.post("/v1/load_lora_adapter", &body).await, 422, "DigestMismatch");
    assert_error(server.post("/v1/load_lora_adapter", &json!({ "lora_name": "a" })).await, 400, "InvalidRequest");
    assert_error(server.get("/v1/nothing").await, 404, "RouteNotFound");
    assert_error(server.get("/v1/completions").await, 405, "MethodNotAllowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_names_adapters_and_readiness_waits_for_them() {
    let given = format!("one={}", path("plain-r8-qv"));
    let server = Server::start("base", &["--adapter", &given]).await;
    for row in super::server::case("plain-r8-qv")["answers"].as_array().unwrap() {
        server.check_row("one", row).await;
    }
    let loaded = server.log().lines().find(|line| line.contains("adapter loaded")).map(str::to_owned).unwrap();
    let loaded: serde_json::Value = serde_json::from_str(&loaded).unwrap();
    assert_eq!((loaded["level"].as_str(), loaded["fields"]["name"].as_str()), (Some("INFO"), Some("one")));
    assert_eq!(loaded["fields"]["digest"], digest_of(&cases().join("plain-r8-qv")));
    assert!(loaded["fields"]["bytes"].as_u64() > Some(1000) && loaded["fields"]["milliseconds"].is_u64(), "{loaded}");
    let limits = server.log().lines().find(|line| line.contains("\"limits\"")).map(str::to_owned).unwrap();
    let limits: serde_json::Value = serde_json::from_str(&limits).unwrap();
    assert_eq!(limits["fields"]["max_step_tokens"], 256);
}

/// Runs `serve` until it ends by itself.
fn ends(flags: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lorafleet-engine"));
    // A port that the kernel chooses, unless the flags name one.
    let outcome = command.env("LORAFLEET_LISTEN", "127.0.0.1:0").arg("serve").args(flags).output().unwrap();
    (outcome.status.code(), String::from_utf8_lossy(&outcome.stderr).into_owned())
}

#[test]
fn an_engine_does_not_start_without_what_it_was_told_to_serve() {
    let (base, good) = (path("base"), format!("one={}", path("plain-r8-qv")));
    let (missing, wrong) = (format!("two={}/nothing", path("")), format!("two={}", path("wrong-hidden")));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    for (flags, said) in [
        (&["--model", &base, "--adapter", &good, "--adapter", &missing][..], &["loading 'two'", "NotFound"][..]),
        (&["--model", &base, "--adapter", &wrong], &["loading 'two'", "ShapeMismatch"]),
        (&["--model", &base, "--adapter", &good, "--adapter", &good], &["--adapter", "'one' is given twice"]),
        (&["--model", &base, "--disk-cache", "/proc/nowhere,1000000"], &["--disk-cache", "/proc/nowhere"]),
        (&["--model", &base, "--listen", &taken], &["listening on", &taken, "in use"]),
        (&["--model", "hf://org/model"], &["--model", "hf://"]),
        (&["--model", "s3://bucket/model"], &["--disk-cache", "s3://bucket/model"]),
        (&["--model", "/nowhere"], &["opening the model /nowhere: /nowhere: No such file or directory (os error 2)"]),
    ] {
        let (code, stderr) = ends(flags);
        assert_eq!(code, Some(1), "{flags:?}: {stderr}");
        let last: serde_json::Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
        assert_eq!(last["level"], "ERROR", "{stderr}");
        let stderr = last["fields"]["message"].as_str().unwrap();
        assert!(said.iter().all(|part| stderr.contains(part)), "{flags:?}: {stderr}");
        assert!(stderr.matches("(os error").count() <= 1, "the cause is told twice: {stderr}");
    }
}

#[test]
fn another_model_than_the_one_that_was_meant_is_not_served() {
    let wrong = format!("sha256:{}", "0".repeat(64));
    let outcome = std::process::Command::new(env!("CARGO_BIN_EXE_lorafleet-engine"))
        .args(["serve", "--model", &path("base"), "--listen", "127.0.0.1:0", "--model-digest", &wrong])
        .output()
        .unwrap();
    assert!(!outcome.status.success());
    let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(said.contains("DigestMismatch") && said.contains(&wrong), "{said}");
}
