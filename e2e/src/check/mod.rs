//! `cargo xtask test`: every check that a change must pass, in the order in which it is cheapest to fail.
use std::path::Path;

use anyhow::{Error, Result, bail};

use failures::Failure;
use libtest::Reader;

use crate::cache::Cache;
use crate::cluster::{Cluster, Settings};
use crate::install::{self, Images};
use crate::place::{Place, Target};
use crate::shell::Shell;
use crate::world::World;
use crate::{guest, progress, tools, world};

mod libtest;
mod failures;

/// Where the tests run that need a cluster.
#[derive(Clone, Debug)]
pub enum Clusters {
    /// Nowhere.
    None,
    /// In clusters of the harness's own.
    Own,
    /// In the user's, by this context; those that look into a node are left out.
    Context { name: String, images: Images },
}

/// Runs all checks in the repository at `root`, goes on after a failure, and prints what failed and, as its last line,
/// `N passed, N failed`.
///
/// # Errors
/// When any check failed, or a tool could not be built or started.
pub fn run(root: &Path, cache: &Cache, clusters: &Clusters) -> Result<()> {
    let mut tally = Tally::default();
    // Go's builds and cargo's wait at different times; where both are to be done, they are done beside each other.
    std::thread::scope(|scope| {
        scope.spawn(|| tools::ahead(cache, matches!(clusters, Clusters::Own)));
        all(root, cache, clusters, &mut tally);
    });
    let Tally { passed, failed, failures } = tally;
    progress::print(&format!("{}{passed} passed, {failed} failed\n", failures::section(&failures)));
    if failed > 0 {
        bail!("{failed} of {} checks failed; see above", passed + failed);
    }
    Ok(())
}

/// Tests and checks that passed and failed, and what the failed ones said.
#[derive(Debug, Default)]
struct Tally {
    passed: u64,
    failed: u64,
    failures: Vec<Failure>,
}

impl Tally {
    fn fail(&mut self, failure: Failure) {
        self.failed += 1;
        self.failures.push(failure);
    }
}

fn all(root: &Path, cache: &Cache, clusters: &Clusters, tally: &mut Tally) {
    check(tally, "formatting", || cargo(root, &["fmt", "--check"]));
    // First of all that builds: it brings the compiler, so that everything after has the images in it.
    check(tally, "kernels for sm_80, sm_90a and sm_100, held to kernels/resources.txt", || {
        cargo(root, &["run", "--package", "lorafleet-kernels", "--example", "compile", "--", "--install"])
    });
    check(tally, "clippy", || cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]));
    suite(tally, "unit and integration tests", |see| unit_tests(root, cache, see));
    let deny_name = "licences, bans and sources (the advisory database is not packaged, so it is not consulted)";
    check(tally, deny_name, || deny(root, cache));
    match clusters {
        Clusters::None => progress::say("cluster tests left out (--fast)"),
        Clusters::Own => suite(tally, "cluster tests", |see| own_cluster_tests(root, cache, see)),
        Clusters::Context { name, images } => {
            let name_of_suite = format!("cluster tests in context {name}");
            suite(tally, &name_of_suite, |see| context_tests(root, cache, name, images, see));
        }
    }
}

/// One check that counts as one.
fn check(tally: &mut Tally, name: &str, work: impl FnOnce() -> Result<()>) {
    match progress::step(name, work) {
        Ok(()) => tally.passed += 1,
        Err(error) => tally.fail(told(name, &error)),
    }
}

/// One test runner: its own lines are counted; a run that ends badly without saying which test failed counts as a failure.
fn suite(tally: &mut Tally, name: &str, work: impl FnOnce(&mut dyn FnMut(&str)) -> Result<bool>) {
    let mut reader = Reader::default();
    let done = progress::step(name, || work(&mut |line| reader.see(line)));
    let (passed, failed, failures) = reader.finish();
    tally.passed += passed;
    tally.failed += failed;
    tally.failures.extend(failures);
    match done {
        Ok(true) => {}
        Ok(false) if failed > 0 => {}
        Ok(false) => {
            tally.fail(Failure::of_check(name, "it ended badly and named no test; what it said stands further up"))
        }
        Err(error) => tally.fail(told(name, &error)),
    }
}

/// Prints an error in full where it happens.
fn told(name: &str, error: &Error) -> Failure {
    let text = format!("{error:#}\n");
    progress::print(&text);
    Failure::of_check(name, &text)
}

/// Tests on the real model and on the S3 server are `ignored` elsewhere, since they want the paths; those on a cluster come later, in a run of their own.
fn unit_tests(root: &Path, cache: &Cache, see: &mut dyn FnMut(&str)) -> Result<bool> {
    Shell::new("cargo")
        .args(["test", "--workspace", "--tests", "--no-fail-fast", "--", "--include-ignored", "--skip", CLUSTER_TEST])
        .env("LORAFLEET_TEST_GGUF", tools::model(cache)?)
        .env("LORAFLEET_TEST_S3S_FS", tools::s3_server(cache)?)
        .folder(root)
        .stream(see)
}

/// All of `e2e/tests/cluster`; the cluster ends afterwards, whatever came of it.
fn own_cluster_tests(root: &Path, cache: &Cache, see: &mut dyn FnMut(&str)) -> Result<bool> {
    let _alone = cache.alone("test")?;
    let settings = Settings::for_tests().tied();
    let done = World::up(cache, &Place::Own(settings.clone()))
        .and_then(|_| cluster_tests(root).env_remove(world::CONTEXT).env(world::PREPARED, "1").stream(see));
    Cluster::down(cache, &settings)?;
    done
}

/// Those of `e2e/tests/cluster` that want nothing but a cluster, in the user's; what was made there is taken away afterwards.
fn context_tests(root: &Path, cache: &Cache, name: &str, images: &Images, see: &mut dyn FnMut(&str)) -> Result<bool> {
    let place = Place::Context { name: name.to_owned(), images: images.clone() };
    // What could not be entered is not left either.
    let target = Target::open(cache, &place)?;
    let done = install::all(cache, &target)
        .and_then(|_| cluster_tests(root).args(["--skip", OWN_TEST]).env(world::CONTEXT, name).stream(see));
    guest::leave(cache, name)?;
    done
}

/// Features are those of [`unit_tests`]: nothing is compiled again.
fn cluster_tests(root: &Path) -> Shell {
    Shell::new("cargo")
        .args(["test", "--workspace", "--test", "cluster", "--", "--ignored", "--test-threads", "1"])
        .folder(root)
}

/// How the names of the files begin whose tests look into a node or start clusters.
const OWN_TEST: &str = "own_";

/// How the name of every test begins that needs a cluster.
const CLUSTER_TEST: &str = "on_a_cluster";

fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    Shell::new("cargo").args(args).folder(root).watch("cargo")
}

fn deny(root: &Path, cache: &Cache) -> Result<()> {
    let deny = tools::cargo_deny(cache)?;
    Shell::new(deny)
        .args(["--log-level", "warn", "--offline", "check", "--hide-inclusion-graph"])
        .args(["licenses", "bans", "sources"])
        .folder(root)
        .run()
}
