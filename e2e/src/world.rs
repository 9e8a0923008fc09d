//! What the tests on a cluster share: lorafleet installed in it, a store with the model, and namespaces of their own.
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cache::Cache;
use crate::chat::Client;
use crate::cluster::{Cluster, Settings};
use crate::kubectl::Kubectl;
use crate::s3::{self, Store};
use crate::{images, install, repository, tools, wait};

/// Time for a condition that needs pods to start or models to load.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Name of the demo's pool.
const POOL: &str = "chat";

/// The shared cluster with everything in it.
#[derive(Debug)]
pub struct World {
    pub cluster: Cluster,
    pub store: Store,
    model: PathBuf,
}

impl World {
    /// Brings it up once per process, and finds what an earlier process of the same build has brought up.
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
        let world = Self::up(&Cache::open()?, &Settings::for_tests())?;
        Ok(SHARED.get_or_init(|| world))
    }

    /// Cluster, images, store and chart.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn up(cache: &Cache, settings: &Settings) -> Result<Self> {
        let cluster = Cluster::up(cache, settings)?;
        let kubectl = cluster.kubectl();
        let names = install::Images::default();
        let archives = images::make(cache)?;
        let model = tools::model(cache)?;
        // The digests say what is in the cluster already.
        let wanted = format!("{:?} {}", archives, chart_text()?);
        let stamp = settings.folder(cache).join("installed");
        let installed = fs::read_to_string(&stamp).is_ok_and(|found| found == wanted);
        if !installed {
            images::import(&cluster, &archives)?;
            Store::deploy(&kubectl, &names.name("s3"))?;
            // The tag is the same for every build: running pods must be told to start again.
            install::helm(cluster.tools(), &kubectl, &names, &[])?;
            let restart = ["rollout", "restart", "deployment", "--namespace", install::NAMESPACE];
            kubectl.output(restart)?;
            let status = ["rollout", "status", "deployment/lorafleet-operator", "--timeout", "60s"];
            kubectl.namespace(install::NAMESPACE).output(status)?;
        }
        let store = Store::at(format!("http://{}:9000", service_ip(&kubectl, s3::NAMESPACE, "s3")?))?;
        let world = Self { cluster, store, model };
        if !installed {
            world.fill()?;
            fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
        }
        Ok(world)
    }

    /// The model and the demo's adapters, where the manifests look for them.
    fn fill(&self) -> Result<()> {
        fill(&self.store, &self.model)
    }

    pub fn kubectl(&self) -> Kubectl {
        self.cluster.kubectl()
    }

    /// A namespace of its own with the store's credentials in it; removed when dropped.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn namespace(&self, prefix: &str) -> Result<Namespace<'_>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let kubectl = self.kubectl();
        kubectl.output(["create", "namespace", &name])?;
        let namespace = Namespace { world: self, kubectl: kubectl.namespace(&name), name };
        namespace.apply(&s3::credentials(&namespace.name))?;
        Ok(namespace)
    }
}

/// Puts the model and the demo's adapters into the store: `s3://models/smollm2` and `s3://adapters/team/NAME`.
///
/// # Errors
/// When the store refuses.
pub fn fill(store: &Store, model: &std::path::Path) -> Result<()> {
    store.bucket("models")?;
    store.bucket("adapters")?;
    let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    store.put(model, &format!("models/smollm2/{name}"))?;
    for adapter in ["tickets", "pirate", "stranger"] {
        store.put_folder(&demo_adapter(adapter), &format!("adapters/team/{adapter}"))?;
    }
    Ok(())
}

/// Folder of one of the demo's adapters.
pub fn demo_adapter(name: &str) -> PathBuf {
    repository().join("e2e/demo/adapters").join(name)
}

/// Address of a Service.
///
/// # Errors
/// When there is no such Service.
pub fn service_ip(kubectl: &Kubectl, namespace: &str, name: &str) -> Result<String> {
    let ip = kubectl.namespace(namespace).output(["get", "service", name, "-o", "jsonpath={.spec.clusterIP}"])?;
    Ok(ip.trim().to_owned())
}

/// All that the chart consists of, to know whether it changed.
fn chart_text() -> Result<String> {
    let listed = crate::shell::Shell::new("find").arg(install::chart()).args(["-type", "f"]).output()?;
    let mut files: Vec<&str> = listed.lines().collect();
    files.sort_unstable();
    let mut text = String::new();
    for file in files {
        text.push_str(&fs::read_to_string(file).with_context(|| format!("read {file}"))?);
    }
    Ok(text)
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
        wait::until(&format!("{kind} {name} is {condition}={status}"), PATIENCE, || {
            let object = self.get(kind, name)?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let generation = &object["metadata"]["generation"];
            let found = conditions.iter().find(|it| it["type"] == condition && it["status"] == status);
            match found.filter(|it| it["observedGeneration"].is_null() || &it["observedGeneration"] == generation) {
                Some(found) => Ok(Some(found.clone())),
                None => bail!("{}", serde_json::to_string_pretty(&conditions)?),
            }
        })
        .map_err(|error| error.context(self.dump()))
    }

    /// One of the demo's manifests, `e2e/demo/NAME.yaml`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn demo(&self, name: &str) -> Result<String> {
        let path = repository().join("e2e/demo").join(format!("{name}.yaml"));
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Applies the demo's base (unless there is one), these of its adapters and its pool `chat`; once all are Ready, a
    /// client of the gateway.
    ///
    /// # Errors
    /// When something is not Ready within the limit.
    pub fn serve(&self, adapters: &[&str]) -> Result<Client> {
        if self.get("basemodel", "smollm2").is_err() {
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
        self.gateway(POOL)
    }

    /// Names and addresses of the engine pods of `chat` that run and are not on their way out.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn engine_pods(&self) -> Result<Vec<(String, String)>> {
        let selector = format!("--selector=lorafleet.dev/pool={POOL},app.kubernetes.io/component=engine");
        let pods = self.kubectl.json(["get", "pods", &selector])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null() && pod["status"]["podIP"].is_string())
            .map(|pod| (text(&pod["metadata"]["name"]), text(&pod["status"]["podIP"])))
            .collect())
    }

    /// A client of the only engine pod, with a key that may read its report.
    ///
    /// # Errors
    /// When there is none, or more than one.
    pub fn engine(&self) -> Result<Client> {
        let pods = self.engine_pods()?;
        let [(_, ip)] = pods.as_slice() else { bail!("one engine pod expected, found {pods:?}") };
        let key = self.kubectl.output([
            "get",
            "secret",
            "chat-engine-keys",
            "-o",
            "go-template={{index .data \"api-key\" | base64decode}}",
        ])?;
        Ok(Client::new(&format!("http://{ip}:8000")).with_key(key.trim()))
    }

    /// A client of a pool's gateway, at its Service's address.
    ///
    /// # Errors
    /// When the pool has no gateway within the limit.
    pub fn gateway(&self, pool: &str) -> Result<Client> {
        let service = format!("{pool}-gateway");
        wait::until(&format!("the gateway of {pool} answers"), PATIENCE, || {
            let ip = service_ip(&self.world.kubectl(), &self.name, &service)?;
            let client = Client::new(&format!("http://{ip}"));
            Ok((client.get("/v1/models")?.status == 200).then_some(client))
        })
        .map_err(|error| error.context(self.dump()))
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
            eprintln!("{}", self.dump());
        }
        // The cluster outlives the test: what cannot be removed now goes with it.
        let _ = self.world.kubectl().output(["delete", "namespace", &self.name, "--wait=false"]);
    }
}
