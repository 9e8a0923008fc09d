//! `cargo xtask test`: every check that a change must pass, in the order in which it is cheapest to fail.
use std::path::Path;

use anyhow::{Result, bail};

pub use tally::Tally;

use crate::cache::Cache;
use crate::cluster::{Cluster, Settings};
use crate::progress;
use crate::shell::Shell;
use crate::tools;
use crate::world::World;

mod tally;

/// What to leave out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// No cluster tests.
    pub fast: bool,
}

/// Runs all checks in the repository at `root`, goes on after a failure, and prints `N passed, N failed` as its last line.
///
/// # Errors
/// When any check failed, or a tool could not be built or started.
pub fn run(root: &Path, cache: &Cache, options: Options) -> Result<()> {
    let mut tally = Tally::default();
    check(&mut tally, "formatting", || cargo(root, &["fmt", "--check"]));
    check(&mut tally, "clippy", || {
        cargo(root, &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])
    });
    suite(&mut tally, "unit and integration tests", |see| unit_tests(root, cache, see));
    check(
        &mut tally,
        "licences, bans and sources (the advisory database is not packaged, so it is not consulted)",
        || deny(root, cache),
    );
    if options.fast {
        progress::say("cluster tests left out (--fast)");
    } else {
        suite(&mut tally, "cluster tests", |see| cluster_tests(root, cache, see));
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed > 0 {
        bail!("{} of {} checks failed; see above", tally.failed, tally.passed + tally.failed);
    }
    Ok(())
}

/// One check that counts as one.
fn check(tally: &mut Tally, name: &str, work: impl FnOnce() -> Result<()>) {
    let done = progress::step(name, work);
    if let Err(error) = &done {
        println!("{error:#}");
    }
    tally.check(done.is_ok());
}

/// One test runner: its own lines are counted; a run that ends badly without saying which test failed counts as a failure.
fn suite(tally: &mut Tally, name: &str, work: impl FnOnce(&mut dyn FnMut(&str)) -> Result<bool>) {
    let before = tally.failed;
    let done = progress::step(name, || work(&mut |line| tally.see(line)));
    match done {
        Ok(true) => {}
        Ok(false) if tally.failed > before => {}
        Ok(false) => tally.check(false),
        Err(error) => {
            println!("{error:#}");
            tally.check(false);
        }
    }
}

/// Tests on the real model and on the S3 server are `ignored` elsewhere, since they want the paths; those on a cluster come later, in a run of their own.
fn unit_tests(root: &Path, cache: &Cache, see: &mut dyn FnMut(&str)) -> Result<bool> {
    Shell::new("cargo")
        .args(["test", "--workspace", "--no-fail-fast", "--", "--include-ignored", "--skip", CLUSTER_TEST])
        .env("LORAFLEET_TEST_GGUF", tools::model(cache)?)
        .env("LORAFLEET_TEST_S3S_FS", tools::s3_server(cache)?)
        .folder(root)
        .stream(see)
}

/// The files `cluster_*.rs`; their clusters are ended afterwards, whatever came of it.
fn cluster_tests(root: &Path, cache: &Cache, see: &mut dyn FnMut(&str)) -> Result<bool> {
    let settings = Settings::for_tests();
    let done = World::up(cache, &settings).and_then(|_| {
        Shell::new("cargo")
            .args(["test", "--workspace", "--no-fail-fast", "--test", "cluster_*"])
            .args(["--", "--ignored", "--test-threads", "1"])
            .folder(root)
            .stream(see)
    });
    Cluster::down(cache, &settings)?;
    done
}

/// How the name of every test begins that needs a cluster.
const CLUSTER_TEST: &str = "on_a_cluster";

fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    if Shell::new("cargo").args(args).folder(root).stream(|_| {})? {
        return Ok(());
    }
    bail!("cargo {} failed", args.join(" "))
}

fn deny(root: &Path, cache: &Cache) -> Result<()> {
    let deny = tools::cargo_deny(cache)?;
    Shell::new(deny)
        .args(["--log-level", "warn", "--offline", "check", "--hide-inclusion-graph"])
        .args(["licenses", "bans", "sources"])
        .folder(root)
        .run()
}
