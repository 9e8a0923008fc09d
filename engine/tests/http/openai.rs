//! OpenAI's routes, field by field.

use serde_json::{Value, json};

use super::server::{Server, assert_error, events};

async fn stream(server: &Server, route: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, text) = server.post(route, &body).await;
    assert_eq!(status, 200, "{text}");
    let mut events = events(text.as_str().unwrap());
    assert_eq!(events.pop().unwrap(), "[DONE]");
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_the_same_as_a_whole_reply() {
    let server = Server::start("base", &[]).await;
    for seed in 0..5 {
        let body = json!({ "model": "base", "prompt": "hello", "max_tokens": 40, "seed": seed, "n": 2, "logprobs": 3,
            "return_token_ids": true, "ignore_eos": true });
        let (status, whole) = server.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{whole}");
        let mut streamed_body = body.clone();
        streamed_body["stream_options"] = json!({ "include_usage": true });
        let mut chunks = stream(&server, "/v1/completions", &streamed_body).await;
        let last = chunks.pop().unwrap();
        assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(80)));
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()));
        for index in 0..2 {
            let mine: Vec<&Value> =
                chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index).collect();
            let text: String = mine.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
            let ids: Vec<Value> =
                mine.iter().flat_map(|choice| choice["token_ids"].as_array().unwrap().clone()).collect();
            let offsets: Vec<Value> =
                mine.iter().flat_map(|choice| choice["logprobs"]["text_offset"].as_array().unwrap().clone()).collect();
            let choice = &whole["choices"][index];
            assert_eq!(json!(text), choice["text"]);
            assert_eq!(json!(ids), choice["token_ids"]);
            assert_eq!(json!(offsets), choice["logprobs"]["text_offset"]);
            assert_eq!(mine.last().unwrap()["finish_reason"], "length");
            assert_eq!(choice["finish_reason"], "length");
        }
        assert_ne!(whole["choices"][0]["token_ids"], whole["choices"][1]["token_ids"], "choices draw apart");
        assert_eq!(server.post("/v1/completions", &body).await.1["choices"], whole["choices"], "a seed repeats");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_an_answer_and_is_never_shown() {
    let server = Server::start("base", &[]).await;
    let body = |stop: Value| {
        json!({ "model": "base", "prompt": [65, 66, 67], "max_tokens": 60, "temperature": 0,
        "ignore_eos": true, "stop": stop })
    };
    let (_, whole) = server.post("/v1/completions", &body(Value::Null)).await;
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    // Three whole characters from the middle of what it says.
    let letters: Vec<char> = text.chars().collect();
    let stop: String = letters[10..13].iter().collect();
    let expected = &text[..text.find(&stop).unwrap()];
    for given in [json!(stop), json!(["never said", stop])] {
        let (_, reply) = server.post("/v1/completions", &body(given.clone())).await;
        assert_eq!(
            (reply["choices"][0]["text"].as_str(), &reply["choices"][0]["finish_reason"]),
            (Some(expected), &json!("stop"))
        );
        let chunks = stream(&server, "/v1/completions", &body(given)).await;
        let streamed: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(streamed, expected);
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    }
    // The engine computes no longer for an answer that has ended.
    server.until("idle", async || server.report().await["load"]["running"] == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn end_tokens_end_answers_and_are_not_text() {
    let server = Server::start("base", &[]).await;
    // The end token is made certain.
    let body = json!({ "model": "base", "prompt": [1, 2], "max_tokens": 9, "temperature": 0, "logit_bias": { "257": 100 },
        "return_token_ids": true });
    let (status, reply) = server.post("/v1/completions", &body).await;
    assert_eq!(status, 200, "{reply}");
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"], &choice["token_ids"]),
        (&json!(""), &json!("stop"), &json!([257]))
    );
    let mut later = body.clone();
    later["min_tokens"] = json!(4);
    let ids = server.post("/v1/completions", &later).await.1["choices"][0]["token_ids"].clone();
    let ids: Vec<u64> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!((ids.len(), ids[4], ids[..4].contains(&257)), (5, 257, false));
    let mut ignored = body;
    ignored["ignore_eos"] = json!(true);
    assert_eq!(server.post("/v1/completions", &ignored).await.1["choices"][0]["token_ids"], json!(vec![257; 9]));
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_stream_roles_pieces_and_log_probabilities() {
    let server = Server::start("base", &[]).await;
    let body = json!({ "model": "base", "messages": [{ "role": "user", "content": [{ "type": "text", "text": "hi" }] }],
        "max_completion_tokens": 12, "temperature": 0, "logprobs": true, "top_logprobs": 2, "ignore_eos": true });
    let (status, whole) = server.post("/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{whole}");
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    let shown = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!((shown.len(), shown[0]["top_logprobs"].as_array().unwrap().len()), (12, 2));
    assert_eq!(shown[0]["logprob"], shown[0]["top_logprobs"][0]["logprob"], "greedy draws the best");
    let chunks = stream(&server, "/v1/chat/completions", &body).await;
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let text: String =
        chunks[1..].iter().map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or("")).collect();
    assert_eq!(json!(text), choice["message"]["content"]);
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_come_as_text_tokens_or_lists_of_either() {
    let server = Server::start("base", &[]).await;
    let ask = async |prompt: Value| {
        let body =
            json!({ "model": "base", "prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": true });
        let (status, reply) = server.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{reply}");
        reply
    };
    let text = ask(json!("ab")).await;
    let ids = text["choices"][0]["prompt_token_ids"].clone();
    let tokens = ask(ids.clone()).await;
    assert_eq!(text["choices"], tokens["choices"]);
    let both = ask(json!(["ab", "c"])).await;
    assert_eq!(both["choices"].as_array().unwrap().len(), 2);
    assert_eq!(both["choices"][0]["token_ids"], text["choices"][0]["token_ids"]);
    let lists = ask(json!([ids, [5]])).await;
    assert_eq!(lists["choices"][0]["token_ids"], text["choices"][0]["token_ids"]);
    assert_eq!(lists["choices"][1]["prompt_token_ids"], json!([5]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_served_is_refused_by_name_and_what_changes_nothing_is_taken() {
    let server = Server::start("base", &[]).await;
    let chat = |field: &str, value: Value| {
        let mut body = json!({ "model": "base", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 1 });
        body[field] = value;
        body
    };
    for (field, value, code) in [
        ("tools", json!([{ "type": "function" }]), "UnsupportedField"),
        ("tool_choice", json!("required"), "UnsupportedField"),
        ("response_format", json!({ "type": "json_object" }), "UnsupportedField"),
        ("reasoning_effort", json!("high"), "UnsupportedField"),
        ("surprise", json!(1), "UnsupportedField"),
        ("temperature", json!(-1), "InvalidRequest"),
        ("temperature", json!("hot"), "InvalidRequest"),
        ("top_p", json!(0), "InvalidRequest"),
        ("top_k", json!(-2), "InvalidRequest"),
        ("n", json!(0), "InvalidRequest"),
        ("n", json!(65), "InvalidRequest"),
        ("max_tokens", json!(0), "InvalidRequest"),
        ("max_tokens", json!(100_000), "ContextTooLong"),
        ("stop", json!(vec!["x"; 17]), "StopLimit"),
        ("stop", json!([""]), "StopLimit"),
        ("stop", json!(3), "InvalidRequest"),
        ("logit_bias", json!({ "999": 1 }), "InvalidRequest"),
        ("logit_bias", json!({ "1": 101 }), "InvalidRequest"),
        ("top_logprobs", json!(3), "InvalidRequest"),
        ("messages", json!([]), "InvalidRequest"),
        ("messages", json!([{ "role": "wizard", "content": "x" }]), "UnknownRole"),
        ("messages", json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "InvalidRequest"),
        ("stream_options", json!({ "surprise": true }), "InvalidRequest"),
    ] {
        let (status, reply) = server.post("/v1/chat/completions", &chat(field, value.clone())).await;
        assert_error((status, reply.clone()), 400, code);
        assert!(reply.to_string().contains(field), "{field}: {value} is not named: {reply}");
    }
    for (field, value) in [
        ("user", json!("someone")),
        ("metadata", json!({ "a": "b" })),
        ("store", json!(false)),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("response_format", json!({ "type": "text" })),
        ("top_k", json!(-1)),
        ("stop", Value::Null),
        ("seed", json!(-5)),
    ] {
        let (status, reply) = server.post("/v1/chat/completions", &chat(field, value)).await;
        assert_eq!(status, 200, "{field}: {reply}");
    }
    let completion = |prompt: Value| json!({ "model": "base", "prompt": prompt });
    for prompt in [json!([]), json!([[]]), json!([300]), json!([-1]), json!({}), Value::Null, json!(vec![vec![1]; 65])]
    {
        assert_error(server.post("/v1/completions", &completion(prompt)).await, 400, "InvalidRequest");
    }
    // What is sent whole is held whole.
    let large = |stream: bool| json!({ "model": "base", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 400, "n": 64, "logprobs": true, "top_logprobs": 20, "stream": stream });
    assert_error(server.post("/v1/chat/completions", &large(false)).await, 400, "InvalidRequest");
    // The model is looked at before anything else.
    let unknown = json!({ "model": "nobody", "messages": 3, "surprise": 1 });
    assert_error(server.post("/v1/chat/completions", &unknown).await, 404, "ModelNotFound");
    let large =
        server.client.post(server.url.clone() + "/v1/completions").body(vec![b' '; 5 << 20]).send().await.unwrap();
    assert_eq!(large.status(), 413);
    let broken = server.client.post(server.url.clone() + "/v1/completions").body("{").send().await.unwrap();
    assert_eq!(broken.status(), 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_names_its_model() {
    let server = Server::start("base", &[]).await;
    let empty = server.post("/v1/completions", &json!({ "model": "", "prompt": [1, 2], "max_tokens": 2 })).await;
    assert_eq!((empty.0, &empty.1["model"]), (200, &json!("base")));
    // A lost name is not the base's.
    for model in [json!(" "), json!("\t\n"), Value::Null, json!(3), json!(["base"])] {
        let messages = json!([{ "role": "user", "content": "x" }]);
        let reply = server.post("/v1/chat/completions", &json!({ "model": model, "messages": messages })).await;
        assert_eq!(reply.1["error"]["param"], "model", "{}", reply.1);
        assert_error(reply, 400, "InvalidRequest");
    }
    let unnamed = server.post("/v1/completions", &json!({ "prompt": "x" })).await;
    assert_error(unnamed, 400, "InvalidRequest");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_cannot_fit_is_refused_before_it_is_counted() {
    let server = Server::start("base", &[]).await;
    let long = "x".repeat(2_000_000);
    let messages = json!([{ "role": "user", "content": long }]);
    for (route, body) in [
        ("/v1/completions", json!({ "model": "base", "prompt": long })),
        ("/v1/completions", json!({ "model": "base", "prompt": ["short", long] })),
        ("/v1/chat/completions", json!({ "model": "base", "messages": messages })),
    ] {
        let reply = server.post(route, &body).await;
        assert!(reply.1["error"]["message"].as_str().unwrap().contains(" bytes: more than"), "{}", reply.1);
        assert_error(reply, 400, "ContextTooLong");
    }
}
