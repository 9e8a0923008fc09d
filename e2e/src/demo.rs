//! The demo: from nothing to chats with a base and two adapters, and a refusal that a person understands.
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::chat::Client;
use crate::kubectl::Kubectl;
use crate::place::{Place, Target};
use crate::progress::{print, say, step};
use crate::{guest, install, repository, tools, wait, ways};

pub const NAMESPACE: &str = "lorafleet-demo";
const PATIENCE: Duration = Duration::from_secs(300);
const ANSWER_TOKENS_MAX: u32 = 48;

/// What the demo asks each model.
const PROMPTS: [&str; 2] = ["My invoice shows a charge that I did not make. Please help.", "How do I cook rice?"];

/// Runs it all; safe to run again.
///
/// # Errors
/// When a step fails; the message names what was awaited and how it stood.
pub fn run(cache: &Cache, place: &Place) -> Result<()> {
    let target = Target::open(cache, place)?;
    install::all(cache, &target)?;
    let demo = target.kubectl().namespace(NAMESPACE);
    step("apply the base, three adapters and a pool", || {
        demo.apply(&guest::namespace(NAMESPACE))?;
        ["base", "adapters", "pool"].into_iter().try_for_each(|name| apply(&demo, name))
    })?;
    step("two adapters are served, the third is refused", || {
        wait_for(&demo, "servingpool/chat", "Ready", "True")?;
        wait_for(&demo, "loraadapter/tickets", "Ready", "True")?;
        wait_for(&demo, "loraadapter/pirate", "Ready", "True")?;
        wait_for(&demo, "loraadapter/stranger", "Stalled", "True")
    })?;
    chats(&Client::new(target.reach(NAMESPACE, "service/chat-gateway", 80)?))?;
    show(&demo)?;
    say("done; to look around, and to end it:\n");
    print(&ways::text(&target, Some(&tools::model(cache)?)));
    Ok(())
}

fn apply(demo: &Kubectl, name: &str) -> Result<()> {
    let path = repository().join("e2e/demo").join(format!("{name}.yaml"));
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    demo.apply(&text).map(drop)
}

fn wait_for(demo: &Kubectl, object: &str, condition: &str, status: &str) -> Result<()> {
    wait::until(&format!("{object} is {condition}={status}"), PATIENCE, || {
        let found = demo.json(["get", object])?;
        let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|it| it["type"] == condition && it["status"] == status) {
            return Ok(Some(()));
        }
        bail!("{}", serde_json::to_string_pretty(&conditions)?)
    })
}

/// The same words to the base and to both adapters, at the same time: one engine pod answers all in one batch.
fn chats(client: &Client) -> Result<()> {
    for prompt in PROMPTS {
        print(&format!("\n  you: {prompt}\n"));
        let answers: Vec<Result<String>> = std::thread::scope(|scope| {
            let asked: Vec<_> =
                MODELS.iter().map(|model| scope.spawn(|| client.say(model, prompt, ANSWER_TOKENS_MAX))).collect();
            asked.into_iter().map(|it| it.join().unwrap_or_else(|_| bail!("the request's thread ended"))).collect()
        });
        for (model, answer) in MODELS.iter().zip(answers) {
            print(&format!("  {model:>8}: {}\n", answer?.trim().replace('\n', "\n            ")));
        }
    }
    let refused = client.chat("stranger", PROMPTS[0], 1)?;
    print(&format!("\n  asked for `stranger`: {} {}\n", refused.status, refused.body["error"]["message"]));
    if refused.status != 404 {
        bail!("a refused adapter must be unknown (404), not {}", refused.status);
    }
    Ok(())
}

const MODELS: [&str; 3] = ["smollm2", "tickets", "pirate"];

fn show(demo: &Kubectl) -> Result<()> {
    let reason = r#"jsonpath={range .status.conditions[?(@.type=="Ready")]}{.reason}: {.message}{end}"#;
    print(&format!("\n$ kubectl --namespace {NAMESPACE} get loraadapter stranger -o {reason:?}\n"));
    print(&(demo.output(["get", "loraadapter", "stranger", "-o", reason])? + "\n"));
    for kind in ["basemodels", "loraadapters", "servingpools", "pods"] {
        print(&format!("\n$ kubectl --namespace {NAMESPACE} get {kind}\n"));
        print(&demo.output(["get", kind])?);
    }
    Ok(())
}
