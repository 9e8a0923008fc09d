//! The tools that the harness builds from the package registries, each pinned and kept in the cache.
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::cache::Cache;
use crate::shell::Shell;

/// A program of crates.io: built once with light optimisation, since it is run for seconds.
struct Crate {
    name: &'static str,
    version: &'static str,
    features: &'static str,
}

const CARGO_DENY: Crate = Crate { name: "cargo-deny", version: "0.20.2", features: "" };

/// Path of `cargo-deny`.
///
/// # Errors
/// When it cannot be built.
pub fn cargo_deny(cache: &Cache) -> Result<PathBuf> {
    install(cache, &CARGO_DENY).map(|bin| bin.join("cargo-deny"))
}

fn install(cache: &Cache, wanted: &Crate) -> Result<PathBuf> {
    let name = format!("{}-{}", wanted.name, wanted.version);
    let kept = cache.keep(&name, &[wanted.features.as_bytes()], |place| build(place, wanted))?;
    Ok(kept.join("bin"))
}

fn build(place: &Path, wanted: &Crate) -> Result<()> {
    let target = place.join("target");
    Shell::new("cargo")
        .args(["install", "--locked", "--quiet", "--no-track", "--version", wanted.version])
        .args(["--features", wanted.features])
        .arg("--root")
        .arg(place)
        .arg(wanted.name)
        .env("CARGO_TARGET_DIR", &target)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .folder(&crate::repository())
        .run()?;
    Ok(std::fs::remove_dir_all(target)?)
}
