//! The product's images, made without a container engine from what `cargo build` leaves.
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::cluster::{Cluster, PAUSE_IMAGE};
use crate::debian::{self, Needed};
use crate::install::Images;
use crate::progress;
use crate::repository;
use crate::shell::Shell;
use crate::tools::{self, Tools};
use oci::{Entry, Image};

mod oci;
mod root;

/// The product's programs; image `lorafleet.local/NAME:dev` holds `lorafleet-NAME`.
const PROGRAMS: [&str; 3] = ["operator", "gateway", "engine"];

const PACKAGES: [Needed; 2] = [
    Needed { file: "strip", package: "binutils" },
    Needed { file: "/etc/ssl/certs/ca-certificates.crt", package: "ca-certificates" },
];

/// Every image that the demo and the tests run: the product's, and the S3 server.
pub const NAMES: [&str; 4] = ["operator", "gateway", "engine", S3];
const S3: &str = "s3";

/// An image as a file.
#[derive(Clone, Debug)]
pub struct Archive {
    /// One of [`NAMES`].
    pub image: String,
    /// `lorafleet.local/IMAGE:dev`.
    pub name: String,
    pub digest: String,
    pub path: PathBuf,
}

/// What [`make`] has made. As long as it is held, no other run writes other archives in their places.
#[derive(Debug)]
pub struct Made {
    pub archives: Vec<Archive>,
    _alone: File,
}

/// Builds the workspace's programs as its tests are built, and writes one archive per image into `images` of the cache.
///
/// # Errors
/// When the build fails or a file cannot be written.
pub fn make(cache: &Cache) -> Result<Made> {
    debian::ensure(&PACKAGES)?;
    let folder = cache.root().join("images");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    programs()?;
    let alone = cache.alone("images")?;
    let stripped = folder.join("stripped");
    let mut archives = Vec::new();
    for name in PROGRAMS {
        Shell::new("strip").arg("-o").arg(&stripped).arg(built(name)).run()?;
        archives.push(write(&folder, name, &stripped, &format!("lorafleet-{name}"))?);
    }
    fs::remove_file(&stripped).with_context(|| format!("remove {}", stripped.display()))?;
    archives.push(write(&folder, S3, &tools::s3_server(cache)?, "s3s-fs")?);
    for archive in &archives {
        let size = fs::metadata(&archive.path)?.len();
        progress::say(format!("image {} {} ({:.1} MB)", archive.name, archive.digest, size as f64 / 1e6));
    }
    Ok(Made { archives, _alone: alone })
}

/// Puts archives into the cluster's node, and gives them these names there.
///
/// # Errors
/// When containerd refuses one.
pub fn import(cluster: &Cluster, archives: &[Archive], names: &Images) -> Result<()> {
    progress::step(&format!("import the images as {}", names.name("*")), || {
        archives.iter().try_for_each(|archive| {
            cluster.import(&archive.path)?;
            let name = names.name(&archive.image);
            cluster.containerd(&["images", "tag", "--force", &archive.name, &name]).run()
        })
    })
}

/// The image that holds a pod's namespaces, as an archive in `folder`.
///
/// # Errors
/// When a file cannot be read or written.
pub fn pause(tools: &Tools, folder: &Path) -> Result<PathBuf> {
    let bytes = fs::read(&tools.pause).with_context(|| format!("read {}", tools.pause.display()))?;
    let image = Image {
        name: PAUSE_IMAGE.to_owned(),
        entries: vec![Entry::File { path: "pause".into(), mode: 0o755, bytes }],
        entrypoint: vec!["/pause".to_owned()],
        user: root::USER.to_owned(),
        env: Vec::new(),
    };
    let path = folder.join("pause.tar");
    image.write(&path)?;
    Ok(path)
}

fn write(folder: &Path, image: &str, program: &Path, name: &str) -> Result<Archive> {
    let archive_name = Images::default().name(image);
    let path = folder.join(format!("{image}.tar"));
    let made = Image {
        name: archive_name.clone(),
        entries: root::of(program, name)?,
        entrypoint: vec![format!("/usr/local/bin/{name}")],
        user: root::USER.to_owned(),
        env: vec!["PATH=/usr/local/bin".to_owned(), "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt".to_owned()],
    };
    let digest = made.write(&path)?;
    Ok(Archive { image: image.to_owned(), name: archive_name, digest, path })
}

/// Builds the workspace's programs; [`built`] says where they are.
///
/// # Errors
/// When the build fails.
pub fn programs() -> Result<()> {
    progress::step("build the programs", build)
}

/// Path of the program `lorafleet-NAME` as cargo leaves it.
pub fn built(name: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    target.join("debug").join(format!("lorafleet-{name}"))
}

/// One test among the targets makes cargo choose features as `cargo test --workspace` does: what either has built, the
/// other uses.
fn build() -> Result<()> {
    let words = ["build", "--workspace", "--bins", "--test", "tidy"];
    Shell::new("cargo").args(words).folder(&repository()).watch("cargo")
}
