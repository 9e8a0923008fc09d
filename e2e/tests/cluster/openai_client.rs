//! The unmodified `openai` Python client lists, chats and streams through the gateway.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::tools;

const SCRIPT: &str = r#"
import json, sys
from openai import NotFoundError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
ask = dict(messages=[{"role": "user", "content": "How do I cook rice?"}], max_tokens=24, temperature=0)
models = [model.id for model in client.models.list()]
whole = client.chat.completions.create(model="pirate", **ask)
stream = client.chat.completions.create(model="pirate", stream=True, stream_options={"include_usage": True}, **ask)
pieces, usage = [], None
for event in stream:
    usage = event.usage or usage
    pieces += [choice.delta.content for choice in event.choices if choice.delta.content]
try:
    client.chat.completions.create(model="nobody", **ask)
    missing = "answered"
except NotFoundError as error:
    missing = error.status_code
text = client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=8, temperature=0)
print(json.dumps({
    "models": models, "whole": whole.choices[0].message.content, "streamed": "".join(pieces), "pieces": len(pieces),
    "finish": whole.choices[0].finish_reason, "tokens": [whole.usage.completion_tokens, usage.completion_tokens],
    "missing": missing, "text": text.choices[0].text,
}))
"#;

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_the_openai_client_works_unmodified() {
    let world = crate::world();
    let space = world.namespace("openai").unwrap();
    let client = space.serve(&["pirate"]).unwrap();
    let packages = tools::openai_client(&Cache::open().unwrap()).unwrap();
    let url = format!("{}/v1", client.url());
    let printed = Shell::new("python3")
        .args(["-c", SCRIPT, &url])
        .env("PYTHONPATH", packages)
        .env("NO_PROXY", "*")
        .output()
        .unwrap();
    let seen: serde_json::Value = serde_json::from_str(&printed).unwrap();

    let answer = client.say("pirate", "How do I cook rice?", 24).unwrap();
    assert_eq!(seen["whole"], answer.as_str(), "{seen}");
    assert_eq!(seen["streamed"], answer.as_str(), "{seen}");
    assert!(seen["pieces"].as_u64().unwrap() > 3, "{seen}");
    assert_eq!(seen["tokens"][0], seen["tokens"][1], "{seen}");
    assert_eq!(seen["missing"], 404, "{seen}");
    assert!(!seen["text"].as_str().unwrap().is_empty(), "{seen}");
    let models: Vec<&str> = seen["models"].as_array().unwrap().iter().filter_map(|it| it.as_str()).collect();
    assert!(models.contains(&"pirate") && models.contains(&"smollm2"), "{seen}");
}
