//! What happens while answers are being made: they are held at a step until it has happened.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::held::Held;
use super::server::{ask, assert_error, events};
use super::wide::{write_adapter, write_base};

/// Far from the end of any answer here.
const TOKENS: usize = 480;

#[tokio::test(flavor = "multi_thread")]
async fn unloading_takes_the_name_at_once_and_lets_running_requests_finish() {
    let engine = Held::start(|_| {}).await;
    engine.load_case("a", "all-linear").await;
    let prompt = json!([9, 8, 7]);
    let whole = engine.complete("a", &prompt, 400).await.1["choices"][0]["token_ids"].clone();
    engine.gate.hold();
    let stream = engine.stepping(engine.stream("a", &prompt, 400)).await;
    // While no step ends: it waits for none.
    assert_eq!(engine.unload("a").await.0, 200);
    assert_error(engine.complete("a", &prompt, 1).await, 404, "ModelNotFound");
    let report = engine.report().await;
    assert_eq!(report["adapters"][0]["state"], "Draining", "{report}");
    engine.gate.open();
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
    engine.until("forgotten", async || engine.report().await["adapters"] == json!([])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unloading_under_many_choices_does_not_wait_for_them() {
    let engine = Held::start(|_| {}).await;
    engine.load_case("a", "all-linear").await;
    engine.gate.hold();
    let mut body = ask("a", &json!([1, 2]), 300);
    body["n"] = json!(4);
    let replies = futures::future::join_all((0..3).map(|_| engine.post("/v1/completions", &body)));
    let unload = async {
        let running = async || engine.report().await["load"]["running"] == 12;
        engine.stepping(engine.until("running", running)).await;
        assert_eq!(engine.unload("a").await.0, 200);
        engine.gate.open();
    };
    let (replies, ()) = tokio::join!(replies, unload);
    for (status, reply) in replies {
        assert_eq!((status, reply["choices"].as_array().unwrap().len()), (200, 4), "{reply}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_whose_client_hangs_up_give_everything_back() {
    let engine = Held::start(|_| {}).await;
    engine.load_case("a", "all-linear").await;
    engine.gate.hold();
    let mut streams = Vec::new();
    for at in 0..16 {
        streams.push(engine.stepping(engine.stream("a", &json!([at, 2]), TOKENS)).await);
    }
    assert_eq!(engine.report().await["adapters"][0]["leases"], 16);
    drop(streams);
    let given_back = async || {
        let report = engine.report().await;
        report["adapters"][0]["leases"] == 0 && report["load"]["running"] == 0 && report["load"]["waiting"] == 0
    };
    engine.stepping(engine.until("given back", given_back)).await;
    assert!(engine.drawn().await < (16 * TOKENS) as f64, "they were computed to their ends");
    let budgets = engine.report().await["budgets"].clone();
    assert_eq!(budgets["pagesUsed"], 0, "{budgets}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_before_its_whole_reply_gives_everything_back() {
    let engine = Held::start(|_| {}).await;
    engine.gate.hold();
    let prompt = json!([1, 2]);
    let running = async || engine.report().await["load"]["running"] == 1;
    tokio::select! {
        reply = engine.complete("base", &prompt, TOKENS) => panic!("nobody let it end: {reply:?}"),
        () = engine.stepping(engine.until("running", running)) => {}
    }
    let given_back = async || engine.report().await["load"]["running"] == 0;
    engine.stepping(engine.until("given back", given_back)).await;
    assert!(engine.drawn().await < TOKENS as f64, "it was computed to its end");
}

/// Loading begins on arrival: a cold adapter's first token costs the longer of load and queue, not their sum.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_is_fetched_while_its_request_waits_for_its_turn() {
    // Only one of the two fits in host memory, so that the first has to be fetched again.
    let engine = Held::start(|limits| {
        (limits.max_sequences, limits.host_cache_bytes, limits.age_max) = (1, 50_000, Duration::from_secs(3600));
    })
    .await;
    engine.load_case("cold", "plain-r8-qv").await;
    engine.load_case("other", "all-linear").await;
    engine.until("let go", async || engine.tier("cold").await == "Source").await;
    engine.gate.hold();
    let stream = engine.stepping(engine.stream("base", &json!([1, 2]), TOKENS)).await;
    let prompt = json!([1]);
    let cold = engine.complete("cold", &prompt, 1);
    tokio::pin!(cold);
    let fetched = async || engine.tier("cold").await != "Source";
    tokio::select! {
        reply = &mut cold => panic!("it had no turn yet: {reply:?}"),
        () = engine.stepping(engine.until("fetched", fetched)) => {}
    }
    assert!(engine.drawn().await < TOKENS as f64, "its turn had come");
    engine.gate.open();
    let (text, (status, reply)) = tokio::join!(stream.text(), cold);
    assert!(text.unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(status, 200, "{reply}");
}

/// Written at once, an adapter of 39 MB would hold every stream for as long as that takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_adapter_comes_to_the_device_in_pieces_while_a_stream_runs() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    write_base(&model);
    write_adapter(&folder.path().join("r256"), 256);
    let piece = 8 << 20;
    let engine = Held::start_model(folder, &model, |limits| {
        limits.host_cache_bytes = 100_000_000;
        (limits.upload_bytes_per_step, limits.upload_bytes_whole, limits.upload_bytes_min) = (piece, piece, piece);
    })
    .await;
    let (status, reply) = engine.load("r256", engine.folder.path().join("r256").to_str().unwrap()).await;
    assert_eq!(status, 200, "{reply}");
    let steps =
        async |pages: &str| engine.counted(&format!("lorafleet_step_uploaded_pages_bucket{{le=\"{pages}\"}} ")).await;
    engine.gate.hold();
    let stream = engine.stepping(engine.stream("base", &json!([1, 2]), TOKENS)).await;
    let (status, reply) = engine.stepping(engine.complete("r256", &json!([1, 2]), 4)).await;
    assert_eq!(status, 200, "{reply}");
    assert!(engine.drawn().await < TOKENS as f64, "the stream had ended before");
    // Its 600 pages of 64 KiB, in no step more than 8 MiB of them; in each of these steps the stream went on.
    let (none, few, all) = (steps("0").await, steps("128").await, steps("+Inf").await);
    assert!(all - none >= 5.0, "{} steps wrote pages", all - none);
    assert_eq!(few, all, "a step wrote more");
    engine.gate.open();
    assert!(stream.text().await.unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn long_answers_of_one_do_not_keep_all_places_from_another() {
    let limit = |limits: &mut lorafleet_engine::limits::Limits| {
        (limits.max_sequences, limits.age_max) = (4, Duration::from_millis(100));
    };
    let engine = Held::start(limit).await;
    engine.load_case("a", "all-linear").await;
    let prompt = |at: u32| json!([at, 2]);
    let mut alone = Vec::new();
    for at in 0..6 {
        alone.push(engine.complete("a", &prompt(at), 300).await.1["choices"][0]["token_ids"].clone());
    }
    engine.gate.hold();
    let drawn = engine.drawn().await;
    let prompts: Vec<Value> = (0..6).map(prompt).collect();
    let flood = futures::future::join_all(prompts.iter().map(|prompt| engine.complete("a", prompt, 300)));
    let other = async {
        let full = async || engine.report().await["load"]["running"] == 4;
        engine.stepping(engine.until("full", full)).await;
        let (status, reply) = engine.stepping(engine.complete("base", &json!([1]), 2)).await;
        assert_eq!(status, 200, "{reply}");
        assert!(engine.drawn().await - drawn < 300.0, "it waited until one of them had ended");
        engine.gate.open();
    };
    let (flood, ()) = tokio::join!(flood, other);
    for ((status, reply), alone) in flood.iter().zip(&alone) {
        assert_eq!((*status, &reply["choices"][0]["token_ids"]), (200, alone), "giving a place up changed an answer");
    }
}

/// By the client's own clock: no less than it saw pass between two events, no more than between two others around them.
#[tokio::test(flavor = "multi_thread")]
async fn queue_and_token_times_are_those_that_the_client_sees() {
    let engine = Held::start(|limits| (limits.max_sequences, limits.age_max) = (1, Duration::from_secs(3600))).await;
    let sum = async |name: &str| engine.counted(&format!("lorafleet_{name}_seconds_sum ")).await;
    let count = async |name: &str| engine.counted(&format!("lorafleet_{name}_seconds_count ")).await;
    engine.gate.hold();
    let begun = Instant::now();
    let stream = engine.stepping(engine.stream("base", &json!([1, 2]), TOKENS)).await;
    let prompt = json!([3]);
    let second = engine.complete("base", &prompt, 2);
    let pausing = async {
        engine.stepping(engine.until("waiting", async || engine.report().await["load"]["waiting"] == 1)).await;
        engine.stop().await;
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_millis(300)).await;
        let pause = begun.elapsed();
        engine.gate.open();
        pause.as_secs_f64()
    };
    let (text, (status, reply), pause) = tokio::join!(stream.text(), second, pausing);
    let whole = begun.elapsed().as_secs_f64();
    assert!(text.unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(status, 200, "{reply}");
    // One after the other: all that passed between tokens, with the pause in it.
    assert_eq!(count("inter_token").await, (TOKENS - 1 + 1) as f64);
    let between = sum("inter_token").await;
    assert!((pause..=whole).contains(&between), "{between} s between tokens, the pause was {pause} of {whole} s");
    // The second waited for its turn, through the pause.
    assert_eq!(count("queue").await, 2.0);
    let queued = sum("queue").await;
    assert!((pause..=2.0 * whole).contains(&queued), "{queued} s in the queue, the pause was {pause} of {whole} s");
    let first = engine.counted("lorafleet_time_to_first_token_seconds_sum{tier=\"base\"} ").await;
    assert!((queued..=2.0 * whole).contains(&first), "{first} s to first tokens, {queued} of them in the queue");
    let steps = sum("step").await;
    assert!((pause..=whole).contains(&steps), "{steps} s of steps, the pause was {pause} of {whole} s");
}
