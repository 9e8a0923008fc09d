//! The simulated outer world, and passes of the real plans over it.

use std::collections::{BTreeMap, HashMap, HashSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use lorafleet_artifact::{Digest, Traits};
use lorafleet_crds::wire::{AdapterReport, AdapterState, BaseReport, Budgets, Load, Placement, Report, Role, Tier};
use lorafleet_crds::{BaseModel, LoraAdapter, NameClaim, PoolPlacement, ServingPool, SourceFile};
use serde_json::{Value, json};

use super::api;
use super::event::Event;
use crate::build::Defaults;
use crate::conditions::conditions;
use crate::intake::{self, Facts, Outcome, PoolSeen};
use crate::job::{Fault, FaultKind, JobState};
use crate::owned::says;
use crate::pool::{self, Answer, AppliedOnce, ChildSeen, DeploymentSeen, PodAction, PodSeen, Step};
use crate::recheck::{Look, Recheck, listing};
use crate::settings::Limits;
use crate::source::ReadEnd;

/// What the base's digest may be.
const BASES: [Digest; 2] = [Digest::from_bytes([0x55; 32]), Digest::from_bytes([0x66; 32])];

/// What lies at the source of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Good(u8),
    Bad(u8),
}

impl Content {
    pub(super) fn digest(self) -> Digest {
        match self {
            Self::Good(byte) | Self::Bad(byte) => Digest::from_bytes([byte; 32]),
        }
    }

    /// Contents differ in what policies judge.
    pub(super) fn traits(self) -> Traits {
        let (Self::Good(byte) | Self::Bad(byte)) = self;
        traits(Digest::from_bytes([byte; 32]))
    }

    fn files(self) -> Vec<SourceFile> {
        let version = Some(format!("{self:?}"));
        vec![SourceFile { name: "adapter_model.safetensors".to_owned(), size_bytes: 10, version }]
    }
}

/// Of the content with this digest.
pub(super) fn traits(digest: Digest) -> Traits {
    let byte = digest.as_bytes()[0];
    let rank = if byte.is_multiple_of(2) { 8 } else { 4 };
    Traits {
        ranks: BTreeMap::from([("q_proj".to_owned(), vec![rank])]),
        base_digest: (!byte.is_multiple_of(3)).then_some(BASES[0]),
        weights_bytes: 9,
    }
}

pub(super) struct Pod {
    pub(super) boot: u32,
    pub(super) placement: Option<Placement>,
    /// Versions that have arrived.
    pub(super) loaded: Vec<(String, Digest)>,
    pub(super) up: bool,
    /// All that it was told to hold was there once since it started.
    pub(super) ready: bool,
    /// Which of the bases it has loaded.
    pub(super) base: Digest,
    /// Zero is not said.
    pub(super) host_bytes: u64,
}

/// The outer world, and what the operator holds in memory.
pub(super) struct World {
    pub(super) now_s: i64,
    pub(super) base: BaseModel,
    pub(super) pool: ServingPool,
    pub(super) adapters: BTreeMap<String, LoraAdapter>,
    /// For how many events the operator's watch of the adapters stays behind, and what it shows until then.
    pub(super) late: Option<(u8, BTreeMap<String, LoraAdapter>)>,
    pub(super) contents: BTreeMap<String, Content>,
    pub(super) pods: Vec<Pod>,
    pub(super) keys: bool,
    pub(super) children: BTreeMap<String, u64>,
    pub(super) store_down: bool,
    pub(super) made: u32,
    // Lost when the operator dies.
    pub(super) applied: BTreeMap<String, AppliedOnce>,
    pub(super) sightings: Option<HashMap<String, PoolPlacement>>,
    pub(super) jobs: HashMap<String, (String, JobState<Outcome>)>,
    /// Looks at sources by uid, with the listing that they compare with.
    pub(super) looks: HashMap<String, (Option<String>, JobState<Look>)>,
    /// Which content was ever verified for which base, by name of the adapter.
    pub(super) verified: HashSet<(String, Digest, Digest)>,
    /// What the operator has applied to each status, by uid.
    pub(super) owned: HashMap<String, Value>,
    /// Writes of any kind.
    pub(super) writes: u32,
    /// Reads of whole sources that were asked for.
    pub(super) reads_planned: u32,
}

/// What a second writer adds to a status.
pub(super) fn foreign(field: &str) -> Value {
    let condition = json!({
        "type": "BackedUp", "status": "True", "reason": "Nightly", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let digest = Content::Good(0xee).digest();
    let all = json!({
        "conditions": [condition],
        "pools": [{ "name": "ghost", "reason": "Succeeded", "message": "", "held": [digest] }],
        "candidateRevision": digest,
        "retiring": { "digest": digest, "uri": "s3://adapters/other", "until": "2099-01-01T00:00:00Z" },
    });
    json!({ field: all[field] })
}

/// Adds it: entries to lists, and fields.
pub(super) fn add<S: serde::Serialize + serde::de::DeserializeOwned>(status: &mut S, foreign: &Value) {
    let mut value = serde_json::to_value(&*status).unwrap();
    for (field, added) in foreign.as_object().unwrap() {
        match (&mut value[field.as_str()], added) {
            (Value::Array(list), Value::Array(added)) => {
                list.extend(added.iter().filter(|added| !list.contains(added)).cloned().collect::<Vec<_>>());
            }
            (field, added) => *field = added.clone(),
        }
    }
    *status = from(value);
}

fn from<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}

impl World {
    pub(super) fn new() -> Self {
        let base = from(json!({
            "metadata": { "name": "base", "namespace": "demo", "uid": "base" },
            "spec": {
                "source": { "uri": "s3://models/base" },
                "identities": BASES,
                "adapterPolicy": {
                    "allowedSources": [{ "prefix": "s3://adapters" }], "maxRank": 8, "requireBaseDigest": false,
                },
            },
            "status": {
                "digest": BASES[0], "architecture": "llama", "parameters": 1, "layers": 2, "hiddenSize": 64,
                "feedForwardSize": 128, "attentionHeads": 4, "keyValueHeads": 2, "headSize": 16,
                "vocabularySize": 258, "tiedEmbeddings": false,
            },
        }));
        let pool = from(json!({
            "metadata": { "name": "chat", "namespace": "demo", "uid": "pool", "generation": 1 },
            "spec": { "baseModelRef": { "name": "base" }, "replicas": 2 },
        }));
        let pod = || Pod {
            boot: 1,
            placement: None,
            loaded: Vec::new(),
            up: true,
            ready: false,
            base: BASES[0],
            host_bytes: 0,
        };
        let mut world = Self {
            now_s: 1_900_000_000,
            base,
            pool,
            adapters: BTreeMap::new(),
            late: None,
            contents: BTreeMap::new(),
            pods: vec![pod(), pod()],
            keys: false,
            children: BTreeMap::new(),
            store_down: false,
            made: 0,
            applied: BTreeMap::new(),
            sightings: None,
            jobs: HashMap::new(),
            looks: HashMap::new(),
            verified: HashSet::new(),
            owned: HashMap::new(),
            writes: 0,
            reads_planned: 0,
        };
        (0..3).for_each(|index| world.create(index));
        world
    }

    fn create(&mut self, index: u8) {
        let name = format!("a{}", index % 4);
        if self.adapters.contains_key(&name) {
            return;
        }
        self.made += 1;
        let mut adapter: LoraAdapter = from(json!({
            "metadata": { "name": name, "namespace": "demo", "uid": format!("{name}-{}", self.made), "generation": 1 },
            "spec": {
                "baseModelRef": { "name": "base" },
                // Every other one takes what comes.
                "source": { "uri": format!("s3://adapters/{name}"), "follow": index % 2 == 1 },
            },
        }));
        adapter.metadata.creation_timestamp = Some(Time(Timestamp::from_second(self.now_s).unwrap()));
        self.contents.entry(name.clone()).or_insert(Content::Good(self.made as u8));
        self.adapters.insert(name, adapter);
    }

    fn pick(&self, index: u8) -> Option<String> {
        let count = self.adapters.len();
        (count > 0).then(|| self.adapters.keys().nth(usize::from(index) % count).cloned()).flatten()
    }

    /// The adapters as the operator's watch shows them.
    pub(super) fn watched(&self) -> &BTreeMap<String, LoraAdapter> {
        self.late.as_ref().map_or(&self.adapters, |(_, before)| before)
    }

    /// Those that want the same name, as far as the operator knows.
    pub(super) fn rivals(&self, adapter: &LoraAdapter) -> Vec<NameClaim> {
        let name = adapter.served_name();
        let others = self.watched().values().filter(|other| other.uid() != adapter.uid());
        others.filter(|other| other.served_name() == name).map(|other| other.claim(name)).collect()
    }

    pub(super) fn happen(&mut self, event: &Event) {
        self.one(event);
        self.late = match (event, self.late.take()) {
            (Event::Lag(0), _) => None,
            (Event::Lag(events), Some((_, before))) => Some((*events, before)),
            (Event::Lag(events), None) => Some((*events, self.adapters.clone())),
            (_, late) => late.filter(|(left, _)| *left > 1).map(|(left, before)| (left - 1, before)),
        };
    }

    fn one(&mut self, event: &Event) {
        self.now_s += 1;
        match event {
            Event::Lag(_) => {}
            Event::Rename(index, to) => {
                let names = [None, Some("x"), Some("y")];
                if let Some(adapter) = self.pick(*index).and_then(|name| self.adapters.get_mut(&name)) {
                    adapter.spec.served_name = names[usize::from(*to)].map(|name| name.parse().unwrap());
                }
            }
            Event::Claim(index, claim) => {
                let Some(name) = self.pick(*index) else { return };
                let claims = [None, Some(self.contents[&name].digest()), Some(Digest::from_bytes([0xdd; 32]))];
                let spec = &mut self.adapters.get_mut(&name).unwrap().spec;
                // What follows its source claims nothing.
                spec.digest = claims[usize::from(*claim)].filter(|_| !spec.source.follow);
            }
            Event::Intake(index) => self.pick(*index).into_iter().for_each(|name| self.intake(&name, false)),
            Event::LookIsDue(index) => self.pick(*index).into_iter().for_each(|name| self.intake(&name, true)),
            Event::LookEnds(index) => self.pick(*index).into_iter().for_each(|name| self.look_ends(&name)),
            Event::Pool(dies_after) => self.pool_pass(*dies_after),
            Event::JobEnds(index) => self.pick(*index).into_iter().for_each(|name| self.job_ends(&name)),
            Event::Arrives(index) => self.arrives(usize::from(*index) % self.pods.len(), 1),
            Event::EngineRestarts(index) => self.restart(usize::from(*index) % self.pods.len()),
            Event::BaseMoves => {
                let other = BASES.into_iter().find(|base| *base != self.base_digest()).unwrap();
                self.base.status.as_mut().unwrap().digest = Some(other);
            }
            Event::Others(index, condition) => {
                let status = self.pick(*index).and_then(|name| self.adapters.get_mut(&name)?.status.as_mut());
                let said = if *condition { foreign("conditions") } else { foreign("pools") };
                status.into_iter().for_each(|status| add(status, &said));
            }
            Event::EngineDown(index) => {
                let count = self.pods.len();
                self.pods[usize::from(*index) % count].up = false;
            }
            Event::OperatorDies => {
                self.applied.clear();
                self.sightings = None;
                self.jobs.clear();
                self.looks.clear();
            }
            Event::Replace(index, good) => {
                self.made += 1;
                let byte = self.made as u8;
                let content = if *good { Content::Good(byte) } else { Content::Bad(byte) };
                if let Some(name) = self.pick(*index) {
                    self.contents.insert(name, content);
                }
            }
            Event::ResolveAgain(index) => {
                let at = self.now_s.to_string();
                if let Some(adapter) = self.pick(*index).and_then(|name| self.adapters.get_mut(&name)) {
                    adapter.annotations_mut().insert("lorafleet.dev/resolve-at".to_owned(), at);
                }
            }
            Event::Delete(index) => self.pick(*index).into_iter().for_each(|name| drop(self.adapters.remove(&name))),
            Event::Create(index) => self.create(*index),
            Event::Store(down) => self.store_down = *down,
            Event::MaxRank(rank) => self.base.spec.adapter_policy.max_rank = Some(u32::from(*rank)),
            Event::RequireBaseDigest(yes) => self.base.spec.adapter_policy.require_base_digest = *yes,
        }
    }

    pub(super) fn base_digest(&self) -> Digest {
        self.base.status.as_ref().unwrap().digest.unwrap()
    }

    /// Whether the present policy lets this content be served.
    pub(super) fn allows(&self, digest: Digest) -> bool {
        let (policy, traits) = (&self.base.spec.adapter_policy, traits(digest));
        policy.max_rank.is_none_or(|limit| traits.rank_max() <= limit)
            && (!policy.require_base_digest || traits.base_digest.is_some())
    }

    /// A new process of the pod, of the present template.
    pub(super) fn restart(&mut self, index: usize) {
        let base = self.base_digest();
        let pod = &mut self.pods[index];
        let (boot, host_bytes) = (pod.boot + 1, pod.host_bytes);
        *pod = Pod { boot, placement: None, loaded: Vec::new(), up: true, ready: false, base, host_bytes };
    }

    pub(super) fn intake(&mut self, name: &str, look_is_due: bool) {
        let Some(adapter) = self.watched().get(name).cloned() else { return };
        let uid = adapter.uid().unwrap();
        let rivals = self.rivals(&adapter);
        let gate = intake::gate(&adapter, Some(&self.base), &rivals, &[]);
        let fingerprint = gate.map(|gate| gate.order.fingerprint).unwrap_or_default();
        let job = match self.jobs.get(&uid) {
            Some((known, state)) if *known == fingerprint => state.clone(),
            _ => JobState::Idle,
        };
        let judged = adapter.status.as_ref().and_then(|status| status.source_listing.clone());
        let state = match self.looks.get(&uid) {
            Some((known, state)) if *known == judged => state.clone(),
            _ => JobState::Idle,
        };
        let recheck = Recheck { state, due_in_ms: Some(if look_is_due { 0 } else { 1000 }) };
        let seen = self.sightings.as_ref().and_then(|seen| seen.get(&uid)).cloned();
        let (looked, idle) = (self.sightings.is_some(), self.pool.spec.replicas == 0);
        let pools = vec![PoolSeen { name: "chat".to_owned(), selects: true, idle, looked, seen }];
        let base = Some(self.base.clone());
        let observed = intake::Observed {
            adapter: adapter.clone(),
            base,
            rivals,
            pools,
            job,
            recheck,
            source_caps: Vec::new(),
            now_s: self.now_s,
        };
        let plan = intake::plan(&observed, &Limits::DEFAULT);
        if let Some(order) = &plan.read {
            self.jobs.insert(uid.clone(), (order.fingerprint.clone(), JobState::Running));
            self.looks.remove(&uid);
        }
        if plan.look.is_some() {
            self.looks.insert(uid, (judged, JobState::Running));
        }
        self.reads_planned += u32::from(plan.read.is_some());
        let Some(mut status) = plan.status else { return self.check_told(name, &adapter.status.unwrap_or_default()) };
        self.check_revisions(&adapter, name, &status);
        let old = adapter.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
        status.observed_generation = Some(1);
        status.conditions = conditions(&old, &plan.stated, Some(1), Timestamp::from_second(self.now_s).unwrap());
        if says(adapter.status.as_ref(), &status) {
            return;
        }
        let owned = self.owned.entry(adapter.uid().unwrap()).or_default();
        // Refused if it is another object by now.
        let Some(truth) = self.adapters.get_mut(name).filter(|truth| truth.uid() == adapter.uid()) else { return };
        let (left, writes) = api::write(truth.status.as_ref(), owned, &status);
        truth.status = left;
        self.writes += writes;
    }

    /// The look at one source ends as its content says.
    pub(super) fn look_ends(&mut self, name: &str) {
        let (uid, files) = (self.adapters[name].uid().unwrap(), self.contents[name].files());
        let Some((judged, state)) = self.looks.get_mut(&uid).filter(|(_, state)| *state == JobState::Running) else {
            return;
        };
        *state = if self.store_down {
            let fault = Fault { kind: FaultKind::Unavailable, message: "down".to_owned() };
            JobState::Failed { fault, attempts: 1, age_ms: 0 }
        } else if *judged == Some(listing(&files)) {
            JobState::Done(Look::Same)
        } else {
            // That a change is looked at twice matters to its time only.
            JobState::Done(Look::Other)
        };
    }

    /// The read of one adapter ends as its content says.
    pub(super) fn job_ends(&mut self, name: &str) {
        let adapter = &self.adapters[name];
        let Ok(gate) = intake::gate(adapter, Some(&self.base), &[], &[]) else { return };
        let (order, content) = (gate.order, self.contents[name]);
        let Some((_, state)) = self
            .jobs
            .get_mut(&adapter.uid().unwrap())
            .filter(|(known, state)| *known == order.fingerprint && *state == JobState::Running)
        else {
            return;
        };
        let refused = |reason: &str| {
            let end = ReadEnd::Refused { reason: reason.to_owned(), message: String::new(), digest: None };
            JobState::Done(intake::ended(end, &order, &content.files()).unwrap())
        };
        *state = if self.store_down {
            let fault = Fault { kind: FaultKind::Unavailable, message: "down".to_owned() };
            JobState::Failed { fault, attempts: 1, age_ms: 100_000 }
        } else if matches!(content, Content::Bad(_)) {
            refused("Malformed")
        } else if let Err(refusal) = order.policy.check_traits(&content.traits()) {
            refused(refusal.reason.as_str())
        } else if order.claims.digest.is_some_and(|claimed| claimed != content.digest()) {
            refused("DigestMismatch")
        } else {
            self.verified.insert((name.to_owned(), content.digest(), order.policy.identities[0]));
            JobState::Done(Outcome::Verified(Box::new(Facts {
                digest: content.digest(),
                traits: content.traits(),
                alpha: 16.0,
                size_bytes: 10,
                files: content.files(),
            })))
        };
    }

    fn report(&self, index: usize) -> Report {
        let pod = &self.pods[index];
        let wanted = pod.placement.iter().flat_map(|placement| &placement.adapters);
        let adapters = wanted.map(|adapter| {
            let there = pod.loaded.contains(&(adapter.name.clone(), adapter.digest));
            AdapterReport {
                name: adapter.name.clone(),
                namespace: adapter.namespace.clone(),
                digest: adapter.digest,
                state: if there { AdapterState::Ready } else { AdapterState::Loading },
                tier: if there { Tier::Host } else { Tier::Source },
                pinned: true,
                rank: 8,
                bytes: 10,
                leases: 0,
                waiting: 0,
                idle_ms: None,
                loads: 0,
                evictions: 0,
                last_error: None,
            }
        });
        let adapters: Vec<AdapterReport> = adapters.collect();
        Report {
            boot_id: format!("boot-{}", pod.boot),
            generation: pod.placement.as_ref().map_or(0, |placement| placement.generation),
            revision: pod.placement.as_ref().map(|placement| placement.revision.clone()).unwrap_or_default(),
            ready: self.ready(index),
            holdings: String::new(),
            unchanged: false,
            draining: false,
            base: BaseReport { name: "base".to_owned(), digest: pod.base, origin: None, max_model_tokens: 100 },
            role: Role::Shared,
            budgets: Budgets { host_bytes_total: pod.host_bytes, ..Budgets::default() },
            load: Load::default(),
            adapters,
            aliases: pod.placement.as_ref().map(|placement| placement.aliases.clone()).unwrap_or_default(),
        }
    }

    /// As Kubernetes sees it.
    pub(super) fn ready(&self, index: usize) -> bool {
        self.pods[index].up && self.pods[index].ready
    }

    /// As `/readyz` has it: told something, and all of it there; it stays so.
    fn probe(&mut self, index: usize) {
        let pod = &mut self.pods[index];
        let Some(placement) = &pod.placement else { return };
        let there = |name: &String, digest: Digest| pod.loaded.contains(&(name.clone(), digest));
        pod.ready |= placement.adapters.iter().all(|adapter| there(&adapter.name, adapter.digest));
    }

    pub(super) fn arrives(&mut self, index: usize, most: usize) {
        let pod = &mut self.pods[index];
        pod.up = true;
        let Some(placement) = &pod.placement else { return };
        let wanted: Vec<_> = placement.adapters.iter().map(|adapter| (adapter.name.clone(), adapter.digest)).collect();
        pod.loaded.retain(|loaded| wanted.contains(loaded));
        let missing: Vec<_> = wanted.into_iter().filter(|wanted| !pod.loaded.contains(wanted)).take(most).collect();
        pod.loaded.extend(missing);
        self.probe(index);
    }

    pub(super) fn observe_pool(&self) -> pool::Observed {
        let pod = |index: usize| PodSeen {
            name: format!("p{index}"),
            ready: self.ready(index),
            deleting: false,
            starting: false,
            trouble: None,
            address: Some("10.0.0.1".to_owned()),
            answer: match self.pods[index].up {
                true => Answer::Report(self.report(index).into()),
                false => Answer::Unreachable("down".to_owned()),
            },
        };
        let child = |(key, version): (&String, &u64)| {
            let applied = self.applied.get(key).cloned();
            (key.clone(), ChildSeen { resource_version: version.to_string(), uid: None, foreign: false, applied })
        };
        let ready = (0..self.pods.len()).filter(|index| self.ready(*index)).count() as u32;
        pool::Observed {
            pool: self.pool.clone(),
            base: Some(self.base.clone()),
            adapters: self.watched().values().cloned().collect(),
            pods: (0..self.pods.len()).map(pod).collect(),
            children: self.children.iter().map(child).collect(),
            keys_exist: self.keys,
            keys_lack: None,
            api_keys_missing: false,
            engine: DeploymentSeen { observed: true, updated: 2, ready, ..DeploymentSeen::default() },
            gateway: DeploymentSeen { observed: true, updated: 1, ready: 1, ..DeploymentSeen::default() },
            defaults: Defaults {
                engine_image: "engine".to_owned(),
                gateway_image: "gateway".to_owned(),
                image_pull_policy: "IfNotPresent".to_owned(),
                gateway_cluster_role: "role".to_owned(),
            },
        }
    }

    /// One pass, in the order in which it is applied. It may die after any number of its writes.
    pub(super) fn pool_pass(&mut self, dies_after: Option<u8>) {
        let observed = self.observe_pool();
        let plan = pool::plan(&observed);
        self.check_placements(&observed, &plan);
        self.check_held(&plan);
        let mut left = dies_after.map_or(u32::MAX, u32::from);
        let mut write = |writes: &mut u32| {
            let alive = left > 0;
            left = left.saturating_sub(1);
            *writes += u32::from(alive);
            alive
        };
        if plan.make_keys {
            if !write(&mut self.writes) {
                return;
            }
            self.keys = true;
        }
        for (key, step) in &plan.steps {
            let Step::Apply { hash, .. } = step else { continue };
            if !write(&mut self.writes) {
                return;
            }
            // Applying what is there already changes no version.
            let version = *self.children.entry(key.clone()).or_insert(1);
            let applied = AppliedOnce { hash: hash.clone(), resource_version: version.to_string(), generation: None };
            self.applied.insert(key.clone(), applied);
        }
        for (index, step) in plan.pods.iter().enumerate() {
            let PodAction::Put { placement, .. } = &step.action else { continue };
            if !write(&mut self.writes) {
                return;
            }
            self.pods[index].placement = Some(placement.clone());
            self.probe(index);
        }
        self.sightings = Some(plan.adapters.iter().map(|step| (step.uid.clone(), step.seen.clone())).collect());
        let now = Timestamp::from_second(self.now_s).unwrap();
        let (status, _) = pool::status(&observed, &plan, &pool::Applied::default(), now);
        let owned = self.owned.entry(self.pool.uid().unwrap()).or_default();
        let (left, writes) = api::write(self.pool.status.as_ref(), owned, &status);
        self.pool.status = left;
        self.writes += writes;
    }
}
