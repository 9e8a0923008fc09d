//! Thousands of adapters in one pool with one engine pod: how long until all are served, and what that takes.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::adapter::{self, Shape};
use super::process::Memory;
use super::{Figure, pods};
use crate::cache::Cache;
use crate::chat::Client;
use crate::cluster::{Cluster, Parts, Settings};
use crate::install;
use crate::place::Place;
use crate::progress::{say, step};
use crate::wait;
use crate::world::{self, Namespace, World};

/// Adapters that are made, and put into the store, at a time.
const MADE_AT_ONCE: u32 = 100;
/// Longest time until all adapters are Ready, for each of them.
const READY_TIME_MAX: Duration = Duration::from_secs(1);
/// Watched for writes and work once all is said.
const REST: Duration = Duration::from_secs(60);
/// Adapters that are asked, each for the first time.
const ASKED: u32 = 40;
const TOKENS_MAX: u32 = 4;
const PROGRAMS: [&str; 3] = ["operator", "gateway", "engine"];
const PROMPT: &str = "My invoice shows a charge that I did not make. Please help.";

/// Brings up a cluster for it and ends it, whatever came of it.
///
/// # Errors
/// When a part fails, or not all adapters are served in time.
pub fn figures(cache: &Cache, folder: &Path, adapters: u32) -> Result<Vec<Figure>> {
    let settings = Settings::numbered("measure", 4, Parts::Node).tied();
    Cluster::down(cache, &settings)?;
    let done = World::up(cache, &Place::Own(settings.clone())).and_then(|world| {
        // As a user has it: the harness looks at sources all the time.
        install::set(cache, world.kubectl(), &["operator.sourceCheckSeconds=300"])?;
        let space = world.namespace("fleet")?;
        Fleet { space: &space, settings: &settings, folder, adapters }.figures()
    });
    Cluster::down(cache, &settings)?;
    done
}

struct Fleet<'a> {
    space: &'a Namespace<'a>,
    settings: &'a Settings,
    folder: &'a Path,
    adapters: u32,
}

impl Fleet<'_> {
    fn figures(&self) -> Result<Vec<Figure>> {
        let client = self.space.serve(&[])?;
        step(&format!("put {} adapters into the store", self.adapters), || self.fill())?;
        let mut figures = step("apply all, until all are Ready", || self.until_ready())?;
        figures.extend(step("let it rest", || self.rest())?);
        figures.extend(step("ask adapters that nobody has asked before", || self.ask(&client))?);
        figures.extend(step("look at lists, reports and metrics", || self.sizes(&client))?);
        for program in PROGRAMS {
            let most = self.memory(program)?.most;
            figures.push(Figure::new(format!("{program}, the most it had so far"), "MiB", None, vec![most]));
        }
        figures.extend(step("one adapter more, a new operator, a new pod", || self.changes())?);
        Ok(figures)
    }

    fn fill(&self) -> Result<()> {
        let base = self.space.get("basemodel", "smollm2")?;
        let base = base["status"]["digest"].as_str().context("the base has no digest")?;
        let numbers: Vec<u32> = (0..=self.adapters).collect();
        for some in numbers.chunks(MADE_AT_ONCE as usize) {
            let mut files: Vec<(PathBuf, String)> = Vec::new();
            for &number in some {
                let folder = self.folder.join(name(number));
                let shape = Shape { rank: 1 + u64::from(number % 4), projections: 2 };
                adapter::files(&folder, base, shape, u64::from(number))?;
                for file in ["adapter_config.json", "adapter_model.safetensors"] {
                    files.push((folder.join(file), format!("adapters/team/fleet/{}/{file}", name(number))));
                }
            }
            self.space.world.store.put_all(&files)?;
            some.iter().try_for_each(|number| fs::remove_dir_all(self.folder.join(name(*number))))?;
        }
        Ok(())
    }

    fn until_ready(&self) -> Result<Vec<Figure>> {
        let begun = Instant::now();
        let all: String = (0..self.adapters).map(manifest).collect();
        self.space.apply(&all)?;
        let applied = begun.elapsed().as_secs_f64();
        self.all_ready(self.adapters)?;
        let ready = begun.elapsed().as_secs_f64();
        Ok(vec![
            Figure::new(format!("`kubectl apply` of {} adapters", self.adapters), "s", None, vec![applied]),
            Figure::new("from its start until all are Ready", "s", None, vec![ready]),
        ])
    }

    fn all_ready(&self, adapters: u32) -> Result<()> {
        let begun = Instant::now();
        let mut told = 0;
        wait::until(&format!("{adapters} adapters are Ready"), READY_TIME_MAX * adapters, || {
            let words = [
                "get",
                "loraadapters",
                "--no-headers",
                "-o",
                "custom-columns=:.status.conditions[?(@.type==\"Ready\")].status",
            ];
            let ready = self.space.kubectl.output(words)?.lines().filter(|line| line.trim() == "True").count();
            let tens = begun.elapsed().as_secs() / 10;
            if tens > told {
                told = tens;
                let operator = self.memory("operator").map_or(0.0, |memory| memory.now);
                say(format!("  {ready} of {adapters}, operator {operator:.0} MiB"));
            }
            std::thread::sleep(Duration::from_millis(400));
            if ready as u64 == u64::from(adapters) { Ok(Some(())) } else { bail!("{ready} are") }
        })
    }

    /// A minute in which nothing happens.
    fn rest(&self) -> Result<Vec<Figure>> {
        // What has just become true is still being told.
        std::thread::sleep(Duration::from_secs(20));
        let busy = || PROGRAMS.iter().map(|it| pods::processor_time(self.settings, it)).collect::<Result<Vec<f64>>>();
        let (before, versions) = (busy()?, self.versions()?);
        std::thread::sleep(REST);
        let (after, written) = (busy()?, changed(&versions, &self.versions()?));
        let mut figures = vec![Figure::new("objects written in a minute of rest", "", Some(1.0), vec![written as f64])];
        for (program, (before, after)) in PROGRAMS.iter().zip(before.iter().zip(&after)) {
            let share = 100.0 * (after - before) / REST.as_secs_f64();
            figures.push(Figure::new(format!("{program}, processor in that minute"), "% of a core", None, vec![share]));
            let now = self.memory(program)?.now;
            figures.push(Figure::new(format!("{program}, resident then"), "MiB", None, vec![now]));
        }
        Ok(figures)
    }

    /// Kind, name and version of every object that the operator writes.
    fn versions(&self) -> Result<Vec<String>> {
        let kinds =
            "basemodels,loraadapters,servingpools,deployments,services,configmaps,secrets,serviceaccounts,rolebindings";
        let columns = "custom-columns=:.kind,:.metadata.name,:.metadata.resourceVersion";
        let listed = self.space.kubectl.output(["get", kinds, "--no-headers", "-o", columns])?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    fn ask(&self, client: &Client) -> Result<Vec<Figure>> {
        let ask = |number: u32| {
            let begun = Instant::now();
            let mut first = None;
            client.stream(&name(number), PROMPT, TOKENS_MAX, |_| {
                first.get_or_insert_with(|| begun.elapsed().as_secs_f64() * 1e3);
            })?;
            first.with_context(|| format!("{} answered nothing", name(number)))
        };
        let numbers: Vec<u32> =
            (0..ASKED.min(self.adapters)).map(|index| index * (self.adapters / ASKED.min(self.adapters))).collect();
        let cold: Vec<f64> = numbers.iter().map(|number| ask(*number)).collect::<Result<_>>()?;
        let warm: Vec<f64> = numbers.iter().rev().take(8).map(|number| ask(*number)).collect::<Result<_>>()?;
        Ok(vec![
            Figure::new("first token through the gateway, adapter on the pod's disk alone", "ms", None, cold),
            Figure::new("the same, one of the last eight asked again", "ms", None, warm),
        ])
    }

    fn sizes(&self, client: &Client) -> Result<Vec<Figure>> {
        let begun = Instant::now();
        let listed = self.space.kubectl.output(["get", "lora"])?.lines().count();
        let seconds = begun.elapsed().as_secs_f64();
        ensure!(listed as u64 == u64::from(self.adapters) + 1, "kubectl get lora prints {listed} lines");
        let begun = Instant::now();
        let models = client.get("/v1/models")?.body["data"].as_array().map_or(0, Vec::len);
        let models_ms = begun.elapsed().as_secs_f64() * 1e3;
        ensure!(models as u64 == u64::from(self.adapters) + 1, "/v1/models lists {models}");
        let engine = self.space.engine()?;
        let report = engine.get("/v1/lora_adapters")?.body.to_string().len() as f64;
        let series = |page: String| page.lines().filter(|line| !line.starts_with('#')).count() as f64;
        let gateway = self.gateway_metrics()?;
        Ok(vec![
            Figure::new("`kubectl get lora`", "s", None, vec![seconds]),
            Figure::new("`/v1/models` of the gateway, all of them", "ms", None, vec![models_ms]),
            Figure::new("an engine's whole report", "KB", None, vec![report / 1e3]),
            Figure::new(
                format!("series on the engine's /metrics, {ASKED} adapters asked"),
                "",
                None,
                vec![series(engine.text("/metrics")?)],
            ),
            Figure::new("series on the gateway's", "", None, vec![series(gateway)]),
        ])
    }

    fn gateway_metrics(&self) -> Result<String> {
        let selector = "--selector=lorafleet.dev/pool=chat,app.kubernetes.io/component=gateway";
        let pod = self.space.kubectl.output(["get", "pods", selector, "-o", "name"])?;
        Client::new(self.space.reach(pod.trim(), 8081)?).text("/metrics")
    }

    /// How long until one more adapter is Ready, a new operator has looked at all, and a new pod holds all.
    fn changes(&self) -> Result<Vec<Figure>> {
        let begun = Instant::now();
        self.space.apply(&manifest(self.adapters))?;
        self.space.condition("loraadapter", &name(self.adapters), "Ready", "True")?;
        let one_more = begun.elapsed().as_secs_f64();

        let operators = self.space.world.kubectl().namespace(install::NAMESPACE);
        operators.output(["rollout", "restart", "deployment/lorafleet-operator"])?;
        operators.output(["rollout", "status", "deployment/lorafleet-operator", "--timeout=120s"])?;
        let begun = Instant::now();
        self.space.kubectl.output(["delete", "loraadapter", &name(self.adapters)])?;
        self.space.apply(&manifest(self.adapters))?;
        self.space.condition("loraadapter", &name(self.adapters), "Ready", "True")?;
        let new_operator = begun.elapsed().as_secs_f64();

        let begun = Instant::now();
        self.space.kubectl.output(["rollout", "restart", "deployment/chat-engine"])?;
        self.space.kubectl.output(["rollout", "status", "deployment/chat-engine", "--timeout=900s"])?;
        let new_pod = begun.elapsed().as_secs_f64();
        self.all_ready(self.adapters + 1)?;
        let said = begun.elapsed().as_secs_f64();
        Ok(vec![
            Figure::new("one adapter more, applied to Ready", "s", None, vec![one_more]),
            Figure::new("the same with an operator that has just started", "s", None, vec![new_operator]),
            Figure::new("a new engine pod with an empty disk, started to taking traffic", "s", None, vec![new_pod]),
            Figure::new("the same until every adapter says so", "s", None, vec![said]),
        ])
    }

    fn memory(&self, program: &str) -> Result<Memory> {
        pods::memory(self.settings, program)
    }
}

fn changed(before: &[String], after: &[String]) -> usize {
    after.iter().filter(|line| !before.contains(line)).count()
}

fn name(number: u32) -> String {
    format!("fleet-{number:05}")
}

/// On each pod's disk, and in its memory while it is asked.
fn manifest(number: u32) -> String {
    let name = name(number);
    let spec = format!("source: {{uri: s3://adapters/team/fleet/{name}}}, warmth: {{floor: Disk}}");
    world::adapter(&name, "smollm2", &spec)
}
