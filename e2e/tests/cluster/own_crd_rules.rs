//! What the API server itself refuses, and in which words; an API server and its store are all that runs.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Settings};
use lorafleet_e2e::kubectl::Kubectl;
use lorafleet_e2e::world::PATIENCE;
use lorafleet_e2e::{repository, wait};

const BASE: &str = "{apiVersion: lorafleet.dev/v1alpha1, kind: BaseModel, metadata: {name: NAME}, spec: SPEC}";
const ADAPTER: &str = "{apiVersion: lorafleet.dev/v1alpha1, kind: LoraAdapter, metadata: {name: NAME}, spec: SPEC}";
const POOL: &str = "{apiVersion: lorafleet.dev/v1alpha1, kind: ServingPool, metadata: {name: NAME}, spec: SPEC}";

const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn manifest(kind: &str, name: &str, spec: &str) -> String {
    kind.replace("SPEC", &spec.replace("DIGEST", DIGEST)).replace("NAME", name)
}

/// The cluster of this test.
pub fn settings() -> Settings {
    Settings::numbered("rules", 3, Parts::ApiServer).tied()
}

fn with_kinds() -> Cluster {
    crate::guarded();
    let cache = Cache::open().unwrap();
    // Objects of an earlier run would be changed instead of made.
    Cluster::down(&cache, &settings()).unwrap();
    let cluster = Cluster::up(&cache, &settings()).unwrap();
    let folder = repository().join("charts/lorafleet/files/crds");
    cluster.kubectl().args(["apply", "--server-side", "-f"]).args([folder]).shell().run().unwrap();
    wait::until("the kinds are served", PATIENCE, || {
        for kind in ["basemodels", "loraadapters", "servingpools"] {
            cluster.kubectl().output(["get", kind])?;
        }
        Ok(Some(()))
    })
    .unwrap();
    cluster
}

/// Applies a manifest: accepted when `expected` is empty, else refused with these words.
fn check(kubectl: &Kubectl, manifest: &str, expected: &str) {
    match (kubectl.apply(manifest), expected) {
        (Ok(_), "") => {}
        (Ok(_), _) => panic!("accepted, but should say `{expected}`:\n{manifest}"),
        (Err(error), "") => panic!("refused: {error:#}\n{manifest}"),
        (Err(error), _) => {
            let text = format!("{error:#}");
            assert!(text.contains(expected), "should say `{expected}`, said:\n{text}\n{manifest}");
        }
    }
}

/// Kind, name, spec, and what the refusal says ("" when accepted). A later line may change an earlier object.
const CASES: &[(&str, &str, &str, &str)] = &[
    (BASE, "base", "{source: {uri: 's3://models/m', endpoint: 'http://s3:9000'}}", ""),
    (BASE, "none", "{}", "spec.source: Required value"),
    (BASE, "scheme", "{source: {uri: 'ftp://models/m'}}", "spec.source.uri"),
    (BASE, "dots", "{source: {uri: 's3://models/../m'}}", "no segment of a uri may be '.' or '..'"),
    (
        BASE,
        "place",
        "{source: {uri: 'hf://org/m', region: 'eu-west-1'}}",
        "endpoint and region belong to s3:// sources",
    ),
    (BASE, "digest", "{source: {uri: 's3://models/m'}, digest: 'sha256:12'}", "spec.digest"),
    (BASE, "format", "{source: {uri: 's3://models/m'}, format: onnx}", "Unsupported value: \"onnx\""),
    (
        BASE,
        "base",
        "{source: {uri: 's3://models/other', endpoint: 'http://s3:9000'}}",
        "source.uri changes only under a digest",
    ),
    (
        BASE,
        "ranks",
        "{source: {uri: 's3://models/m'}, adapterPolicy: {maxRank: 8, allowedRanks: [4, 16]}}",
        "an allowed rank of allowedRanks is above maxRank",
    ),
    (BASE, "rank", "{source: {uri: 's3://models/m'}, adapterPolicy: {maxRank: 1000}}", "less than or equal to 256"),
    (
        BASE,
        "prefix",
        "{source: {uri: 's3://models/m'}, adapterPolicy: {allowedSources: [{prefix: 's3://a/..'}]}}",
        "no segment of a prefix may be",
    ),
    (
        BASE,
        "twice",
        "{source: {uri: 's3://models/m'}, adapterPolicy: {allowedSources: [{prefix: 's3://a/b'}, {prefix: 's3://a/b'}]}}",
        "duplicate entries for key",
    ),
    (BASE, "fixed", "{source: {uri: 's3://models/m'}, digest: 'DIGEST'}", ""),
    (BASE, "fixed", "{source: {uri: 's3://models/moved'}, digest: 'DIGEST'}", ""),
    // A digest that no weights are known to have is a mistake that may be corrected.
    (BASE, "fixed", "{source: {uri: 's3://models/moved'}}", ""),
    (BASE, "fixed", "{source: {uri: 's3://models/moved'}, digest: 'DIGEST'}", ""),
    (ADAPTER, "one", "{baseModelRef: {name: base}, source: {uri: 's3://adapters/one'}}", ""),
    (
        ADAPTER,
        "one",
        "{baseModelRef: {name: other}, source: {uri: 's3://adapters/one'}}",
        "baseModelRef does not change",
    ),
    (ADAPTER, "one", "{baseModelRef: {name: base}, source: {uri: 's3://adapters/two'}, digest: 'DIGEST'}", ""),
    (ADAPTER, "sourceless", "{baseModelRef: {name: base}}", "spec.source: Required value"),
    (ADAPTER, "baseless", "{source: {uri: 's3://adapters/one'}}", "spec.baseModelRef: Required value"),
    (ADAPTER, "file", "{baseModelRef: {name: base}, source: {uri: 'file:///etc/passwd'}}", "spec.source.uri"),
    (
        ADAPTER,
        "up",
        "{baseModelRef: {name: base}, source: {uri: 's3://adapters/../secret'}}",
        "no segment of a uri may be",
    ),
    (
        ADAPTER,
        "served",
        "{baseModelRef: {name: base}, source: {uri: 's3://adapters/one'}, servedName: 'a b'}",
        "spec.servedName",
    ),
    (ADAPTER, "follow", "{baseModelRef: {name: base}, source: {uri: 's3://adapters/one', follow: true}}", ""),
    (
        ADAPTER,
        "follow",
        "{baseModelRef: {name: base}, source: {uri: 's3://adapters/one', follow: true}, digest: 'DIGEST'}",
        "give one of them",
    ),
    (
        ADAPTER,
        "unknown",
        "{baseModelRef: {name: base}, source: {uri: 's3://adapters/one'}, rank: 8}",
        "field not declared in schema",
    ),
    (POOL, "pool", "{baseModelRef: {name: base}}", ""),
    (POOL, "pool", "{baseModelRef: {name: other}}", "baseModelRef does not change"),
    (POOL, "1pool", "{baseModelRef: {name: base}}", "starts with a letter"),
    (POOL, "many", "{baseModelRef: {name: base}, replicas: 100000}", "less than or equal to 1000"),
    (
        POOL,
        "caches",
        "{baseModelRef: {name: base}, capacity: {hostCacheBytes: 9000000, diskCacheBytes: 8000000}}",
        "hostCacheBytes is above diskCacheBytes",
    ),
    (
        POOL,
        "steps",
        "{baseModelRef: {name: base}, capacity: {maxSequences: 64, maxStepTokens: 32}}",
        "maxSequences is above maxStepTokens",
    ),
    (POOL, "even", "{baseModelRef: {name: base}, capacity: {maxSequences: 64, maxStepTokens: 64}}", ""),
    (POOL, "none-at-once", "{baseModelRef: {name: base}, capacity: {maxSequences: 0}}", "greater than or equal to 1"),
    (POOL, "small", "{baseModelRef: {name: base}, capacity: {pageBudget: 1000}}", "greater than or equal to 1048576"),
    (POOL, "amount", "{baseModelRef: {name: base}, engine: {resources: {limits: {memory: much}}}}", "limits.memory"),
    (
        POOL,
        "claims",
        "{baseModelRef: {name: base}, engine: {resources: {claims: [{name: gpu}]}}}",
        "field not declared in schema",
    ),
    (POOL, "standstill", "{baseModelRef: {name: base}, upgrade: {maxSurge: 0}}", "no pod can ever be replaced"),
    (
        POOL,
        "standstill-percent",
        "{baseModelRef: {name: base}, upgrade: {maxSurge: 0%, maxUnavailable: 0%}}",
        "no pod can ever be replaced",
    ),
    (POOL, "surge", "{baseModelRef: {name: base}, upgrade: {maxSurge: 3000000000}}", "expected pods from 0 to 1000"),
    (POOL, "surge", "{baseModelRef: {name: base}, upgrade: {maxSurge: -1}}", "expected pods from 0 to 1000"),
    (POOL, "surge", "{baseModelRef: {name: base}, upgrade: {maxUnavailable: 101%}}", "spec.upgrade.maxUnavailable"),
    (POOL, "surge", "{baseModelRef: {name: base}, upgrade: {maxUnavailable: '5'}}", "spec.upgrade.maxUnavailable"),
    (
        POOL,
        "surge",
        "{baseModelRef: {name: base}, upgrade: {maxSurge: 00%, maxUnavailable: 1}}",
        "spec.upgrade.maxSurge",
    ),
    (POOL, "surge", "{baseModelRef: {name: base}, upgrade: {maxSurge: 100%, maxUnavailable: 1000}}", ""),
    (
        POOL,
        "tuned",
        "{baseModelRef: {name: base}, engine: {env: [{name: LORAFLEET_LOG, value: debug}, {name: A, value: b}]}}",
        "",
    ),
    (
        POOL,
        "fenceless",
        "{baseModelRef: {name: base}, engine: {env: [{name: A, value: b}, {name: LORAFLEET_MODEL_DIGEST, value: ''}]}}",
        "of the LORAFLEET_ variables env may set _LOG",
    ),
    (BASE, "no-bucket", "{source: {uri: 's3:///m'}}", "spec.source.uri"),
    (BASE, "no-segment", "{source: {uri: 's3://models//m'}}", "spec.source.uri"),
    (BASE, "backslash", "{source: {uri: 's3://models/a\\m'}}", "spec.source.uri"),
    (BASE, "no-character", "{source: {uri: \"s3://models/a\\u0001m\"}}", "spec.source.uri"),
    (BASE, "odd-bucket", "{source: {uri: 's3://m$!/m'}}", "spec.source.uri"),
    (BASE, "hidden-dots", "{source: {uri: 's3://models/%2E%2e/m'}}", "no segment of a uri may be '.' or '..'"),
    (BASE, "hidden-slash", "{source: {uri: 's3://models/a%2Fm'}}", "no segment may hide a slash"),
    (BASE, "percent", "{source: {uri: 's3://models/100%25/a+b=c@1/'}}", ""),
    (
        BASE,
        "prefix-twice",
        "{source: {uri: 's3://m/m'}, adapterPolicy: {allowedSources: [{prefix: 's3://a/b/'}, {prefix: 's3://a/b'}]}}",
        "two allowedSources are the same prefix",
    ),
    (BASE, "endpoint-user", "{source: {uri: 's3://models/m', endpoint: 'http://u:p@h'}}", "spec.source.endpoint"),
    (BASE, "endpoint-port", "{source: {uri: 's3://models/m', endpoint: 'http://h:99999'}}", "spec.source.endpoint"),
    (BASE, "endpoint-open", "{source: {uri: 's3://models/m', endpoint: 'http://[:::'}}", "spec.source.endpoint"),
    (BASE, "endpoint-six", "{source: {uri: 's3://models/m', endpoint: 'http://[::1]:9000/'}}", ""),
    (BASE, "secret", "{source: {uri: 's3://models/m', credentialsSecretRef: {name: A_B}}}", "credentialsSecretRef"),
    (
        POOL,
        "label-value",
        "{baseModelRef: {name: base}, adapterSelector: {matchLabels: {tier: 'a b'}}}",
        "spec.adapterSelector.matchLabels",
    ),
    (
        POOL,
        "label-key",
        "{baseModelRef: {name: base}, adapterSelector: {matchExpressions: [{key: 'a b', operator: Exists}]}}",
        "spec.adapterSelector.matchExpressions[0].key",
    ),
    (
        POOL,
        "labels",
        "{baseModelRef: {name: base}, adapterSelector: {matchLabels: {example.com/tier: Gold_1}, matchExpressions: [{key: a.b/c, operator: In, values: [x, '']}]}}",
        "",
    ),
    (
        POOL,
        "negative",
        "{baseModelRef: {name: base}, engine: {resources: {limits: {memory: '-1Gi'}}}}",
        "spec.engine.resources.limits",
    ),
    (
        POOL,
        "request",
        "{baseModelRef: {name: base}, engine: {resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}}}",
        "something of requests is above the same of limits",
    ),
    (
        POOL,
        "request",
        "{baseModelRef: {name: base}, engine: {resources: {requests: {cpu: 1500m, memory: 1Gi}, limits: {cpu: 2, nvidia.com/gpu: 1}}}}",
        "",
    ),
    (
        POOL,
        "variable",
        "{baseModelRef: {name: base}, engine: {env: [{name: 'A=B', value: x}]}}",
        "spec.engine.env[0].name",
    ),
    (
        POOL,
        "variable",
        "{baseModelRef: {name: base}, engine: {env: [{name: '', value: x}]}}",
        "spec.engine.env[0].name",
    ),
    (
        POOL,
        "variable",
        "{baseModelRef: {name: base}, engine: {env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}}",
        "a variable has a value or a valueFrom",
    ),
    (
        POOL,
        "variable",
        "{baseModelRef: {name: base}, engine: {env: [{name: 'a b.c-d_1', valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}}",
        "",
    ),
    (POOL, "taint", "{baseModelRef: {name: base}, engine: {tolerations: [{key: a, operator: Maybe}]}}", "Maybe"),
    (POOL, "taint", "{baseModelRef: {name: base}, engine: {tolerations: [{key: a, effect: Never}]}}", "Never"),
    (POOL, "taint", "{baseModelRef: {name: base}, gateway: {tolerations: [{value: x}]}}", "without a key"),
    (
        POOL,
        "taint",
        "{baseModelRef: {name: base}, engine: {tolerations: [{key: a, operator: Exists, value: x}]}}",
        "Exists has no value",
    ),
    (
        POOL,
        "taint",
        "{baseModelRef: {name: base}, engine: {tolerations: [{key: a, tolerationSeconds: 5}]}}",
        "belong to the effect NoExecute",
    ),
    (
        POOL,
        "taint",
        "{baseModelRef: {name: base}, engine: {tolerations: [{operator: Exists}, {key: a, value: x, effect: NoSchedule}]}}",
        "",
    ),
    (POOL, "node", "{baseModelRef: {name: base}, engine: {nodeSelector: {disk: 'a b'}}}", "spec.engine.nodeSelector"),
    (POOL, "image", "{baseModelRef: {name: base}, engine: {image: ' a b '}}", "spec.engine.image"),
    (POOL, "account", "{baseModelRef: {name: base}, engine: {serviceAccountName: A_B}}", "serviceAccountName"),
    (POOL, "backend", "{baseModelRef: {name: base}, engine: {backend: tpu}}", "Unsupported value: \"tpu\""),
];

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_the_kinds_refuse_what_cannot_be_meant() {
    let cluster = with_kinds();
    let kubectl = cluster.kubectl().namespace("default");
    for (kind, name, spec, expected) in CASES {
        check(&kubectl, &manifest(kind, name, spec), expected);
    }
    // One that the weights have stands.
    let resolved = format!(r#"--patch={{"status": {{"digest": "{DIGEST}"}}}}"#);
    kubectl.output(["patch", "basemodel", "fixed", "--subresource=status", "--type=merge", &resolved]).unwrap();
    for digest in ["", ", digest: 'sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"] {
        let spec = format!("{{source: {{uri: 's3://models/moved'}}{digest}}}");
        check(&kubectl, &manifest(BASE, "fixed", &spec), "spec.digest does not change once the weights have it");
    }
    // kubectl scale, autoscalers and short names find their way.
    kubectl.output(["scale", "servingpool/pool", "--replicas=3"]).unwrap();
    assert_eq!(kubectl.json(["get", "pool", "pool"]).unwrap()["spec"]["replicas"], 3);
    let table = kubectl.output(["get", "lora"]).unwrap();
    let header: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["NAME", "BASE", "READY", "REASON", "SERVED", "RANK", "SINCE", "AGE"]);
    let by_base =
        kubectl.output(["get", "loras", "--field-selector=spec.baseModelRef.name=base", "-o", "name"]).unwrap();
    let accepted = CASES.iter().filter(|(kind, _, _, expected)| *kind == ADAPTER && expected.is_empty());
    let names: BTreeSet<String> = accepted.map(|(_, name, ..)| format!("loraadapter.lorafleet.dev/{name}")).collect();
    assert_eq!(by_base.lines().map(str::to_owned).collect::<BTreeSet<String>>(), names);
    Cluster::down(&Cache::open().unwrap(), cluster.settings()).unwrap();
}
