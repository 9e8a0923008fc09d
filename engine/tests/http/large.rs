//! A model wide enough for adapters of some tens of megabytes, made up on the spot: values do not matter here, sizes do.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::server::{Server, cases, events};

const LAYERS: usize = 4;
const HIDDEN: usize = 512;
const FFN: usize = 1536;
const KV: usize = 128;
const VOCABULARY: usize = 258;

/// Rows and columns of each projection of a layer.
const PROJECTIONS: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", KV, HIDDEN),
    ("self_attn.v_proj", KV, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", FFN, HIDDEN),
    ("mlp.up_proj", FFN, HIDDEN),
    ("mlp.down_proj", HIDDEN, FFN),
];

/// Tensors of small random values, or of ones, in f32.
#[derive(Default)]
struct Tensors {
    header: Map<String, Value>,
    data: Vec<u8>,
    random: u32,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: &[usize], ones: bool) {
        let begin = self.data.len();
        for _ in 0..shape.iter().product::<usize>() {
            self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = if ones { 1.0 } else { (self.random >> 8) as f32 / (1 << 24) as f32 * 0.04 - 0.02 };
            self.data.extend(value.to_le_bytes());
        }
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, self.data.len()] });
        self.header.insert(name.to_owned(), entry);
    }

    fn write(self, path: &Path) {
        let header = Value::Object(self.header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(self.data);
        std::fs::write(path, file).unwrap();
    }
}

fn write_base(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(cases().join("base/config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", HIDDEN),
        ("intermediate_size", FFN),
        ("num_hidden_layers", LAYERS),
        ("num_attention_heads", HIDDEN / 64),
        ("num_key_value_heads", KV / 64),
        ("head_dim", 64),
    ] {
        config[key] = json!(value);
    }
    config["tie_word_embeddings"] = json!(true);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(cases().join("base").join(name), folder.join(name)).unwrap();
    }
    let mut tensors = Tensors::default();
    tensors.add("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], false);
    tensors.add("model.norm.weight", &[HIDDEN], true);
    for layer in 0..LAYERS {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.add(&format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN], true);
        }
        for (name, rows, columns) in PROJECTIONS {
            tensors.add(&format!("model.layers.{layer}.{name}.weight"), &[rows, columns], false);
        }
    }
    tensors.write(&folder.join("model.safetensors"));
}

/// All projections: 9.7 MB for each layer at rank 256.
fn write_adapter(folder: &Path, rank: usize) {
    std::fs::create_dir_all(folder).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(cases().join("all-linear/adapter_config.json")).unwrap()).unwrap();
    (config["r"], config["lora_alpha"]) = (json!(rank), json!(rank));
    config["target_modules"] = json!(PROJECTIONS.map(|(name, ..)| name.split_once('.').unwrap().1));
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = Tensors { random: rank as u32, ..Tensors::default() };
    for layer in 0..LAYERS {
        for (name, rows, columns) in PROJECTIONS {
            let name = format!("base_model.model.model.layers.{layer}.{name}");
            tensors.add(&format!("{name}.lora_A.weight"), &[rank, columns], false);
            tensors.add(&format!("{name}.lora_B.weight"), &[rows, rank], false);
        }
    }
    tensors.write(&folder.join("adapter_model.safetensors"));
}

async fn started(flags: &[&str]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    write_base(&folder.path().join("model"));
    for rank in [8, 256] {
        write_adapter(&folder.path().join(format!("r{rank}")), rank);
    }
    let model = folder.path().join("model").to_str().unwrap().to_owned();
    let server = Server::start_model(folder, &model, "base", flags).await;
    server.wait_ready().await;
    server
}

async fn load(server: &Server, rank: usize) -> Value {
    let folder = server.folder.path().join(format!("r{rank}"));
    let (status, reply) = server.load(&format!("r{rank}"), folder.to_str().unwrap()).await;
    assert_eq!(status, 200, "{reply}");
    reply
}

/// Steps that wrote at most so many pages.
async fn steps(server: &Server, pages: &str) -> f64 {
    let text = server.get("/metrics").await.1.as_str().unwrap().to_owned();
    let wanted = format!("lorafleet_step_uploaded_pages_bucket{{le=\"{pages}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&wanted)).unwrap().parse().unwrap()
}

/// Written at once, an adapter of 39 MB would hold every stream for as long as that takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_adapter_comes_to_the_device_in_pieces_while_a_stream_runs() {
    let server = started(&["--page-budget=120000000", "--host-cache=100000000"]).await;
    load(&server, 256).await;
    let before = (steps(&server, "0").await, steps(&server, "512").await, steps(&server, "+Inf").await);
    let mut stream = server.stream("base", &json!([1, 2]), 480).await;
    let reading = async {
        let (mut gaps, mut last, mut text) = (Vec::new(), Instant::now(), String::new());
        while let Some(piece) = stream.chunk().await.unwrap() {
            gaps.push(last.elapsed());
            last = Instant::now();
            text.push_str(std::str::from_utf8(&piece).unwrap());
        }
        (gaps, text)
    };
    let prompt = json!([1, 2]);
    let large = server.complete("r256", &prompt, 4);
    let ((mut gaps, text), (status, reply)) = tokio::join!(reading, large);
    assert_eq!(status, 200, "{reply}");
    assert_eq!(events(&text).last().unwrap(), "[DONE]");
    let after = (steps(&server, "0").await, steps(&server, "512").await, steps(&server, "+Inf").await);
    // Its 600 pages, in no step more than 512; the stream went on between.
    let with_pages = (after.2 - before.2) - (after.0 - before.0);
    assert!(with_pages >= 2.0, "{with_pages} steps wrote pages");
    assert_eq!(after.1 - before.1, after.2 - before.2, "a step wrote more");
    gaps.sort_unstable();
    let (median, longest) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
    // Far more than a step takes on a busy machine.
    assert!(longest < Duration::from_millis(400).max(20 * median), "{longest:?}, {median:?} as a rule");
}

/// Ranks are exact: what the server would accept costs nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_adapter_takes_as_much_under_a_high_limit_as_under_a_low_one() {
    let mut held = Vec::new();
    for limit in ["--max-rank=256", "--max-rank=8"] {
        let server = started(&["--page-budget=120000000", "--host-cache=100000000", limit]).await;
        let loaded = load(&server, 8).await;
        let answer = server.complete("r8", &json!([1, 2, 3]), 8).await.1["choices"][0]["token_ids"].clone();
        server.until("idle", async || server.report().await["budgets"]["pagesUsed"] == 0).await;
        held.push((loaded, answer, server.report().await["budgets"].clone()));
    }
    assert_eq!(held[0], held[1]);
    assert!(held[0].2["pagesCached"].as_u64().unwrap() > 0, "it takes no pages: {}", held[0].2);
}

/// Loading begins on arrival: a cold adapter's first token costs the longer of load and queue, not their sum.
#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_is_fetched_while_its_request_waits_for_its_turn() {
    let flags = ["--page-budget=120000000", "--host-cache=60000000", "--max-sequences=1", "--age-ms-max=600000"];
    let server = started(&flags).await;
    // Only one of the two fits in host memory, so that the first has to be fetched again.
    for rank in [256, 255] {
        write_adapter(&server.folder.path().join(format!("r{rank}")), rank);
        load(&server, rank).await;
    }
    let tier = async || {
        let report = server.report().await;
        let row = report["adapters"].as_array().unwrap().iter().find(|row| row["name"] == "r256").cloned();
        row.unwrap()["tier"].clone()
    };
    server.until("let go", async || tier().await == "Source").await;
    let mut stream = server.stream("base", &json!([1, 2]), 500).await;
    let running = async { while stream.chunk().await.unwrap().is_some() {} };
    let prompt = json!([1]);
    let cold = server.complete("r256", &prompt, 1);
    tokio::pin!(running, cold);
    while tier().await == "Source" {
        tokio::select! {
            () = &mut running => panic!("it was not fetched before its turn came"),
            reply = &mut cold => panic!("it had no turn yet: {reply:?}"),
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
    }
    let ((), (status, reply)) = tokio::join!(running, cold);
    assert_eq!(status, 200, "{reply}");
}
