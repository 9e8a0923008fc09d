//! Debian packages: what is missing is installed by name, and named in a printed line.
use std::path::Path;

use anyhow::{Result, bail};

use crate::progress;
use crate::shell::Shell;

/// A file that must exist (a program on the usual paths, or an absolute path), and the package that brings it.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    pub file: &'static str,
    pub package: &'static str,
}

const PATHS: [&str; 6] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"];

fn present(file: &str) -> bool {
    if file.starts_with('/') {
        return Path::new(file).exists();
    }
    PATHS.iter().any(|folder| Path::new(folder).join(file).exists())
}

/// Installs the packages of whatever is missing.
///
/// # Errors
/// When something is missing and this is not Debian, or not root, or the installation fails; the message names the packages.
pub fn ensure(needed: &[Needed]) -> Result<()> {
    let missing: Vec<Needed> = needed.iter().copied().filter(|need| !present(need.file)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing.iter().map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    let list = packages.join(" ");
    if !present("apt-get") {
        bail!("missing on this machine, which has no apt-get: install the equivalents of {list}");
    }
    if !is_root()? {
        bail!("missing, and only root can install them: apt-get install --no-install-recommends {list}");
    }
    progress::step(&format!("install Debian packages: {list}"), || {
        apt(&["update", "-qq"])?;
        apt(&[&["install", "-y", "-qq", "--no-install-recommends"][..], &packages].concat())
    })?;
    match missing.iter().find(|need| !present(need.file)) {
        Some(need) => bail!("package {} was installed but {} is still not there", need.package, need.file),
        None => Ok(()),
    }
}

/// Whether this process may do everything.
///
/// # Errors
/// When `id` cannot be started.
pub fn is_root() -> Result<bool> {
    Ok(Shell::new("id").arg("-u").output()?.trim() == "0")
}

/// In a session of its own, with somebody who reads what it prints: packages are installed to the end even if this run is ended,
/// since one that is half installed is left to the user to mend. The next run waits for it.
fn apt(args: &[&str]) -> Result<()> {
    let apt = r#"printed=$(apt-get -o DPkg::Lock::Timeout=300 "$@" 2>&1); code=$?; echo "$printed"; exit $code"#;
    Shell::new("setsid").args(["sh", "-c", apt, "apt-get"]).args(args).env("DEBIAN_FRONTEND", "noninteractive").run()
}
