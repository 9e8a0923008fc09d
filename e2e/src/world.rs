//! What the tests on a cluster share: lorafleet installed in it, a store with the model, and namespaces of their own.
use std::fmt::Write;
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cache::Cache;
use crate::chat::Client;
use crate::cluster::Settings;
use crate::forward::Route;
use crate::kubectl::Kubectl;
use crate::place::{Place, Target};
use crate::s3::{self, Store};
use crate::{guest, install, repository, wait};

/// Time for what needs pods to start or models to load, on a machine that is slow and busy besides: seconds are usual.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Names of the demo's base and pool.
const BASE: &str = "smollm2";
const POOL: &str = "chat";

/// The shared cluster with everything in it.
#[derive(Debug)]
pub struct World {
    pub target: Target,
    pub store: Store,
}

/// Context of the cluster that `cargo xtask test --context` has prepared; without it, tests use one of the harness's own.
pub const CONTEXT: &str = "LORAFLEET_TEST_CONTEXT";

/// Set by `cargo xtask test` where it has brought up the cluster of [`Settings::for_tests`], which it ends itself.
pub const PREPARED: &str = "LORAFLEET_TEST_PREPARED";

impl World {
    /// Brings it up once per process, to end with it; or finds the one that `cargo xtask test` has brought up.
    ///
    /// # Errors
    /// When anything of it cannot be had.
    pub fn shared() -> Result<&'static Self> {
        static SHARED: OnceLock<World> = OnceLock::new();
        static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
        // A poisoned lock guards nothing: whoever panicked brought nothing up.
        let _guard = LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(world) = SHARED.get() {
            return Ok(world);
        }
        let cache = Cache::open()?;
        let world = match std::env::var(CONTEXT) {
            Ok(context) => {
                let target = Target::prepared(&cache, &context)?;
                Self { store: install::store(&target)?, target }
            }
            Err(_) => {
                let settings = Settings::for_tests().tied();
                if std::env::var_os(PREPARED).is_none() {
                    // Held as long as the process lives: two programs of tests share no cluster that ends with one of them.
                    static ALONE: OnceLock<fs::File> = OnceLock::new();
                    let _ = ALONE.set(cache.alone("test")?);
                }
                Self::up(&cache, &Place::Own(settings))?
            }
        };
        Ok(SHARED.get_or_init(|| world))
    }

    /// Cluster, images, store and chart.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn up(cache: &Cache, place: &Place) -> Result<Self> {
        let target = Target::open(cache, place)?;
        Ok(Self { store: install::all(cache, &target)?, target })
    }

    pub fn kubectl(&self) -> &Kubectl {
        self.target.kubectl()
    }

    /// A namespace of its own with the store's credentials in it; removed when dropped.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn namespace(&self, prefix: &str) -> Result<Namespace<'_>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let kubectl = self.kubectl();
        kubectl.args(["create", "-f", "-"]).shell().input(guest::namespace(&name)).run()?;
        let namespace = Namespace { world: self, kubectl: kubectl.namespace(&name), name };
        namespace.apply(&s3::credentials(&namespace.name))?;
        Ok(namespace)
    }
}

/// Manifest of an adapter on a base; `spec` is what else its spec says, such as `source: {uri: s3://adapters/one}`.
pub fn adapter(name: &str, base: &str, spec: &str) -> String {
    format!(
        "---
apiVersion: lorafleet.dev/v1alpha1
kind: LoraAdapter
metadata: {{name: {name}}}
spec: {{baseModelRef: {{name: {base}}}, {spec}}}
"
    )
}

/// An object's conditions, one a line: a failed test's message is cut after some lines.
fn told(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let mut lines = vec![format!("generation {} of it has these conditions:", object["metadata"]["generation"])];
    lines.extend(conditions.iter().map(|it| {
        let (kind, status, reason) = (text(&it["type"]), text(&it["status"]), text(&it["reason"]));
        format!("{kind}={status} {reason} of {}: {}", it["observedGeneration"], text(&it["message"]))
    }));
    lines.join("\n")
}

/// `name@digest12`, as replies and versioned requests say it.
///
/// # Errors
/// When this is no digest.
pub fn versioned(name: &str, digest: &str) -> Result<String> {
    let digits = digest.strip_prefix("sha256:").and_then(|hex| hex.get(..12));
    Ok(format!("{name}@{}", digits.with_context(|| format!("`{digest}` is no digest"))?))
}

/// A namespace that lives as long as a test.
#[derive(Debug)]
pub struct Namespace<'a> {
    pub world: &'a World,
    /// kubectl within the namespace.
    pub kubectl: Kubectl,
    pub name: String,
}

impl Namespace<'_> {
    /// Applies manifests in this namespace.
    ///
    /// # Errors
    /// When the API server refuses.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.kubectl.apply(manifests)
    }

    /// One object as JSON.
    ///
    /// # Errors
    /// When it is not there.
    pub fn get(&self, kind: &str, name: &str) -> Result<Value> {
        self.kubectl.json(["get", kind, name])
    }

    /// Waits until a condition has a status; the condition.
    ///
    /// # Errors
    /// When time is up; the message holds all conditions.
    pub fn condition(&self, kind: &str, name: &str, condition: &str, status: &str) -> Result<Value> {
        let what = format!("{kind} {name} is {condition}={status}");
        self.stated(kind, name, &what, |it| it["type"] == condition && it["status"] == status)
    }

    /// Waits until an object has a condition, written `TYPE=STATUS REASON`, with all these words in its message; the message.
    /// What is in the way at first may be something else: who expects a reason waits for it.
    ///
    /// # Errors
    /// When time is up; the message holds all conditions.
    pub fn says(&self, kind: &str, name: &str, said: &str, words: &[&str]) -> Result<String> {
        let what = format!("{kind} {name} is {said}, with {words:?}");
        let message = |it: &Value| it["message"].as_str().unwrap_or_default().to_owned();
        let is_it = |it: &Value| {
            let text = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
            format!("{}={} {}", text("type"), text("status"), text("reason")) == said
                && words.iter().all(|word| message(it).contains(word))
        };
        self.stated(kind, name, &what, is_it).map(|it| message(&it))
    }

    fn stated(&self, kind: &str, name: &str, what: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(what, PATIENCE, || {
            let object = self.get(kind, name)?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let generation = &object["metadata"]["generation"];
            let found = conditions.iter().find(|it| is_it(it));
            match found.filter(|it| it["observedGeneration"].is_null() || &it["observedGeneration"] == generation) {
                Some(found) => Ok(Some(found.clone())),
                None => bail!("{}", told(&object)),
            }
        })
    }

    /// One of the demo's manifests, `e2e/demo/NAME.yaml`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn demo(&self, name: &str) -> Result<String> {
        let path = repository().join("e2e/demo").join(format!("{name}.yaml"));
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Applies the demo's base (unless there is one), these of its adapters and its pool `chat`; once all are Ready and have
    /// answered, a client of the gateway.
    ///
    /// # Errors
    /// When something is not Ready or does not answer within the limit.
    pub fn serve(&self, adapters: &[&str]) -> Result<Client> {
        if self.get("basemodel", BASE).is_err() {
            self.apply(&self.demo("base")?)?;
        }
        for document in self.demo("adapters")?.split("---\n") {
            if adapters.iter().any(|name| document.contains(&format!("{{name: {name}}}"))) {
                self.apply(document)?;
            }
        }
        self.apply(&self.demo("pool")?)?;
        self.condition("servingpool", POOL, "Ready", "True")?;
        for name in adapters {
            self.condition("loraadapter", name, "Ready", "True")?;
        }
        let client = self.gateway(POOL)?;
        self.answer(&client, &[&[BASE], adapters].concat())?;
        Ok(client)
    }

    /// Waits until each of these models has answered once. Ready is what the operator has seen: a gateway watches the API
    /// server by itself, and may hear of it a moment later.
    ///
    /// # Errors
    /// When one does not answer within the limit.
    pub fn answer(&self, client: &Client, models: &[&str]) -> Result<()> {
        models.iter().try_for_each(|model| {
            wait::until(&format!("{model} answers in {}", self.name), PATIENCE, || {
                let answer = client.chat(model, "Hello", 1)?;
                if answer.status != 200 {
                    bail!("{} {}", answer.status, answer.body);
                }
                Ok(Some(()))
            })
        })
    }

    /// Names of the engine pods of `chat` that run and are not on their way out.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn engine_pods(&self) -> Result<Vec<String>> {
        let selector = format!("--selector=lorafleet.dev/pool={POOL},app.kubernetes.io/component=engine");
        let pods = self.kubectl.json(["get", "pods", &selector])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        Ok(pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["podIP"].is_string())
            .map(|pod| pod["metadata"]["name"].as_str().unwrap_or_default().to_owned())
            .collect())
    }

    /// A client of the only engine pod, with a key that may read its report.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub fn engine(&self) -> Result<Client> {
        let pods = self.engine_pods()?;
        let [pod] = pods.as_slice() else { bail!("one engine pod expected, found {pods:?}") };
        let keys = self.engine_keys("api-key")?;
        let key = keys.first().context("the Secret has no key")?;
        Ok(Client::new(self.reach(&format!("pod/{pod}"), 8000)?).with_key(key))
    }

    /// The keys in an entry of the Secret that the gateway and the engine of `chat` share.
    ///
    /// # Errors
    /// When there is no such Secret.
    pub fn engine_keys(&self, entry: &str) -> Result<Vec<String>> {
        let template = format!("go-template={{{{index .data \"{entry}\" | base64decode}}}}");
        let keys = self.kubectl.output(["get", "secret", "chat-engine-keys", "-o", &template])?;
        Ok(keys.lines().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty()).collect())
    }

    /// `name@digest12` of each adapter that the only engine pod holds.
    ///
    /// # Errors
    /// When there is no such pod, or it does not say.
    pub fn held(&self) -> Result<Vec<String>> {
        let report = self.engine()?.get("/v1/lora_adapters")?.body;
        let adapters = report["adapters"].as_array().with_context(|| format!("no adapters in {report}"))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        adapters.iter().map(|it| versioned(&text(&it["name"]), &text(&it["digest"]))).collect()
    }

    /// A way to a port of a pod or Service of this namespace.
    ///
    /// # Errors
    /// When there is no such thing, or nothing behind it.
    pub fn reach(&self, target: &str, port: u16) -> Result<Route> {
        self.world.target.reach(&self.name, target, port)
    }

    /// A client of a pool's gateway, by its Service.
    ///
    /// # Errors
    /// When the pool has no gateway within the limit.
    pub fn gateway(&self, pool: &str) -> Result<Client> {
        let service = format!("service/{pool}-gateway");
        wait::until(&format!("the gateway of {pool} answers"), PATIENCE, || {
            let client = Client::new(self.reach(&service, 80)?);
            Ok((client.get("/v1/models")?.status == 200).then_some(client))
        })
    }

    /// Everything that tells why something did not come: objects, events and the ends of the pods' logs.
    pub fn dump(&self) -> String {
        let mut text = format!("namespace {}:\n", self.name);
        let mut add = |kubectl: &Kubectl, words: &[&str]| {
            let told = kubectl.args(words.iter().copied()).shell().finish();
            let told = told.map_or_else(|error| error.to_string(), |it| it.stdout + &it.stderr);
            let _ = writeln!(text, "--- kubectl {}\n{told}", words.join(" "));
        };
        add(&self.kubectl, &["get", "basemodels,loraadapters,servingpools,pods,services", "-o", "wide"]);
        add(&self.kubectl, &["get", "events", "--sort-by=.lastTimestamp"]);
        let pods = self.kubectl.output(["get", "pods", "-o", "name"]).unwrap_or_default();
        for pod in pods.lines() {
            add(&self.kubectl, &["logs", pod, "--tail=40", "--all-containers", "--ignore-errors"]);
            add(&self.kubectl, &["logs", pod, "--tail=20", "--all-containers", "--previous", "--ignore-errors"]);
        }
        let operator = self.world.kubectl().namespace(install::NAMESPACE);
        add(&operator, &["logs", "deployment/lorafleet-operator", "--tail=60"]);
        text
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // After the panic's own message, which says what was awaited and how it stood; the end of a whole run says it again.
            eprintln!("{}", self.dump());
        }
        // The cluster outlives the test: what cannot be removed now goes with it.
        let _ = self.world.kubectl().output(["delete", "namespace", &self.name, "--wait=false"]);
    }
}
