//! An adapter that may not or cannot be served says why, names both values, and never reaches an engine.
#![allow(clippy::unwrap_used, clippy::panic)]

use lorafleet_e2e::install::demo_adapter;
use lorafleet_e2e::s3::Store;
use lorafleet_e2e::wait;
use lorafleet_e2e::world::{PATIENCE, adapter, versioned};

struct Case {
    name: &'static str,
    /// Which of the demo's adapters it is made from, and how: configuration and weights.
    from: &'static str,
    change: fn(&mut String, &mut Vec<u8>),
    base: &'static str,
    /// Further fields of its spec.
    spec: &'static str,
    /// The condition that is False, its reason, and words of its message.
    condition: &'static str,
    reason: &'static str,
    words: &'static [&'static str],
}

/// Of the demo's base, refused once its files are read.
const USUAL: Case = Case {
    name: "",
    from: "tickets",
    change: |_, _| {},
    base: "smollm2",
    spec: "",
    condition: "Verified",
    reason: "",
    words: &[],
};

/// In [`bases`], `smollm2` takes ranks up to 8, and `strict` rank 16 of two modules, up to the size of `pirate`.
const CASES: [Case; 15] = [
    Case {
        name: "stranger",
        from: "stranger",
        reason: "BaseMismatch",
        words: &["sha256:26b9187c", "sha256:327d685a"],
        ..USUAL
    },
    Case {
        name: "baseless",
        change: |_, weights| replace(weights, "lorafleet.base_digest", "lorafleet.base_nobody"),
        reason: "BaseUnknown",
        words: &["baseModelDigest", "lorafleet.base_digest"],
        ..USUAL
    },
    Case { name: "high", from: "pirate", reason: "RankTooHigh", words: &["16", "8"], ..USUAL },
    Case { name: "low", base: "strict", reason: "RankNotAllowed", words: &["rank 8", "[16]"], ..USUAL },
    Case {
        name: "elsewhere",
        from: "pirate",
        base: "strict",
        reason: "ModuleNotAllowed",
        words: &["o_proj", "q_proj"],
        ..USUAL
    },
    Case {
        name: "fat",
        from: "pirate",
        change: |_, weights| weights.push(0),
        base: "strict",
        reason: "TooLarge",
        words: &["2973001", "2973000"],
        ..USUAL
    },
    Case {
        name: "corrupt",
        change: |_, weights| weights.truncate(weights.len() / 2),
        reason: "Malformed",
        words: &["lora_A.weight", "457728", "452964"],
        ..USUAL
    },
    Case {
        name: "nan",
        change: |_, weights| weights.iter_mut().rev().take(2).for_each(|byte| *byte = 0xff),
        reason: "Malformed",
        words: &["lora_B.weight", "NaN"],
        ..USUAL
    },
    Case {
        name: "idle",
        change: |_, weights| {
            let data = 8 + usize::from(weights[0]) + 256 * usize::from(weights[1]);
            weights[data..].fill(0);
        },
        reason: "NoEffect",
        words: &["zero"],
        ..USUAL
    },
    Case {
        name: "shape",
        change: |_, weights| replace(weights, "\"shape\":[192,8]", "\"shape\":[8,192]"),
        reason: "ShapeMismatch",
        words: &["v_proj.lora_B.weight", "[8, 192]", "[192, 8]"],
        ..USUAL
    },
    Case {
        name: "module",
        change: |config, weights| {
            *config = config.replace("v_proj", "z_proj");
            replace(weights, "v_proj", "z_proj");
        },
        reason: "ModuleUnknown",
        words: &["z_proj"],
        ..USUAL
    },
    Case {
        name: "dora",
        change: |config, _| *config = config.replace("\"use_dora\": false", "\"use_dora\": true"),
        reason: "UnsupportedFeature",
        words: &["use_dora"],
        ..USUAL
    },
    Case {
        name: "other",
        spec: ", digest: 'sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'",
        reason: "DigestMismatch",
        words: &["sha256:01234567", "sha256:"],
        ..USUAL
    },
    Case {
        name: "second",
        spec: ", servedName: tickets",
        condition: "SourceAllowed",
        reason: "NameConflict",
        words: &["tickets"],
        ..USUAL
    },
    Case {
        name: "forbidden",
        condition: "SourceAllowed",
        reason: "SourceForbidden",
        words: &["s3://adapters/private/forbidden"],
        ..USUAL
    },
];

/// Replaces all of the same length.
fn replace(bytes: &mut [u8], old: &str, new: &str) {
    assert_eq!(old.len(), new.len());
    let places: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(old.as_bytes())).collect();
    assert!(!places.is_empty(), "no `{old}`");
    for at in places {
        bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    }
}

impl Case {
    fn path(&self) -> String {
        let folder = if self.reason == "SourceForbidden" { "private" } else { "team/refused" };
        format!("adapters/{folder}/{}", self.name)
    }

    /// Puts its files into the store.
    fn put(&self, store: &Store) {
        let from = demo_adapter(self.from);
        let mut config = std::fs::read_to_string(from.join("adapter_config.json")).unwrap();
        let mut weights = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
        (self.change)(&mut config, &mut weights);
        let folder = std::env::temp_dir().join(format!("lorafleet-{}-{}", self.name, std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("adapter_config.json"), config).unwrap();
        std::fs::write(folder.join("adapter_model.safetensors"), weights).unwrap();
        store.put_folder(&folder, &self.path()).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }

    fn manifest(&self) -> String {
        adapter(self.name, self.base, &format!("source: {{uri: 's3://{}'}}{}", self.path(), self.spec))
    }
}

/// The demo's base with a limit that one of the demo's own adapters is beyond, and once more with other rules.
fn bases(demo: &str) -> String {
    let strict =
        "maxRank: 32\n    allowedRanks: [16]\n    allowedTargetModules: [q_proj, v_proj]\n    maxAdapterBytes: 2973000";
    let (_, base) = demo.split_once("---\n").unwrap();
    let other = base.replace("name: smollm2}", "name: strict}").replace("maxRank: 32", strict);
    format!("{}---\n{other}", demo.replace("maxRank: 32", "maxRank: 8"))
}

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_refused_adapters_say_why() {
    let world = crate::world();
    let space = world.namespace("refusals").unwrap();
    space.apply(&bases(&space.demo("base").unwrap())).unwrap();
    let client = space.serve(&["tickets"]).unwrap();
    CASES.iter().for_each(|case| case.put(&world.store));
    space.apply(&CASES.iter().map(Case::manifest).collect::<String>()).unwrap();

    for Case { name, condition, reason, words, .. } in &CASES {
        space.says("loraadapter", name, &format!("{condition}=False {reason}"), words).unwrap();
        space.says("loraadapter", name, &format!("Ready=False {reason}"), &[]).unwrap();
        space.condition("loraadapter", name, "Stalled", "True").unwrap();
        let answer = client.chat(name, "Hello", 1).unwrap();
        assert_eq!(answer.status, 404, "{name}: {}", answer.body);
    }
    let told = |event: &serde_json::Value| {
        event["reason"] == "BaseMismatch" && event["message"].as_str().is_some_and(|it| it.contains("sha256:26b9187c"))
    };
    // Written after the status.
    wait::until("an event tells of the stranger", PATIENCE, || {
        let words = ["get", "events", "--field-selector=involvedObject.name=stranger,type=Warning"];
        let events = space.kubectl.json(words)?;
        let found = events["items"].as_array().is_some_and(|events| events.iter().any(told));
        if found { Ok(Some(())) } else { anyhow::bail!("{events}") }
    })
    .unwrap();
    let tickets = space.get("loraadapter", "tickets").unwrap()["status"]["digest"].as_str().unwrap().to_owned();
    assert_eq!(space.held().unwrap(), [versioned("tickets", &tickets).unwrap()]);
    assert_eq!(client.chat("tickets", "Hello", 1).unwrap().status, 200);
}
