//! The product's images, made without a container engine from what `cargo build` leaves.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::cluster::{Cluster, PAUSE_IMAGE};
use crate::progress;
use crate::repository;
use crate::shell::Shell;
use crate::tools::{self, Tools};
use oci::{Entry, Image};

mod oci;
mod root;

/// The product's programs; image `lorafleet.local/NAME:dev` holds `lorafleet-NAME`.
const PROGRAMS: [&str; 3] = ["operator", "gateway", "engine"];

/// An image as a file.
#[derive(Clone, Debug)]
pub struct Archive {
    pub name: String,
    pub digest: String,
    pub path: PathBuf,
}

/// Builds the workspace's programs as its tests are built, and writes one archive per image into `images` of the cache.
///
/// # Errors
/// When the build fails or a file cannot be written.
pub fn make(cache: &Cache) -> Result<Vec<Archive>> {
    let folder = cache.root().join("images");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    progress::step("build the programs", build)?;
    let mut archives = Vec::new();
    for name in PROGRAMS {
        let program = format!("lorafleet-{name}");
        let stripped = folder.join(format!("{program}.{}", std::process::id()));
        Shell::new("strip").arg("-o").arg(&stripped).arg(target().join("debug").join(&program)).run()?;
        let made = write(&folder, name, &stripped, &program);
        fs::remove_file(&stripped).with_context(|| format!("remove {}", stripped.display()))?;
        archives.push(made?);
    }
    archives.push(write(&folder, "s3", &tools::s3_server(cache)?, "s3s-fs")?);
    for archive in &archives {
        let size = fs::metadata(&archive.path)?.len();
        progress::say(format!("image {} {} ({:.1} MB)", archive.name, archive.digest, size as f64 / 1e6));
    }
    Ok(archives)
}

/// Makes the images and puts them into the cluster's node.
///
/// # Errors
/// As [`make`], and when containerd refuses one.
pub fn load(cache: &Cache, cluster: &Cluster) -> Result<Vec<Archive>> {
    let archives = make(cache)?;
    import(cluster, &archives)?;
    Ok(archives)
}

/// Puts archives into the cluster's node.
///
/// # Errors
/// When containerd refuses one.
pub fn import(cluster: &Cluster, archives: &[Archive]) -> Result<()> {
    progress::step("import the images", || archives.iter().try_for_each(|archive| cluster.import(&archive.path)))
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
    let image_name = format!("lorafleet.local/{image}:dev");
    let path = folder.join(format!("{image}.tar"));
    let image = Image {
        name: image_name.clone(),
        entries: root::of(program, name)?,
        entrypoint: vec![format!("/usr/local/bin/{name}")],
        user: root::USER.to_owned(),
        env: vec!["PATH=/usr/local/bin".to_owned(), "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt".to_owned()],
    };
    let digest = image.write(&path)?;
    Ok(Archive { name: image_name, digest, path })
}

/// Where cargo puts what it builds.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// All packages in one command, with all targets' features: what the tests built is used again.
fn build() -> Result<()> {
    let built =
        Shell::new("cargo").args(["build", "--workspace", "--bins", "--quiet"]).folder(&repository()).stream(|_| {})?;
    if !built {
        bail!("cargo build failed");
    }
    Ok(())
}
