//! The least root file system that a dynamically linked program runs in: its libraries, a user, certificates, `/tmp`.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::oci::Entry;
use crate::shell::Shell;

/// User and group of every image.
pub const USER: &str = "65532:65532";

const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Entries of an image that holds `program` as `/usr/local/bin/NAME`.
///
/// # Errors
/// When the program or one of its libraries cannot be read.
pub fn of(program: &Path, name: &str) -> Result<Vec<Entry>> {
    let text = |path: &str, text: &str| Entry::File { path: path.into(), mode: 0o644, bytes: text.into() };
    let mut entries = vec![
        Entry::Folder { path: "tmp".into(), mode: 0o1777 },
        text("etc/passwd", "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin\n"),
        text("etc/group", "root:x:0:\nnonroot:x:65532:\n"),
        text("etc/nsswitch.conf", "hosts: files dns\n"),
        file(Path::new(CERTIFICATES), 0o644)?,
    ];
    for library in libraries(program)? {
        entries.push(file(&library, 0o755)?);
    }
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    entries.push(Entry::File { path: format!("usr/local/bin/{name}"), mode: 0o755, bytes });
    Ok(entries)
}

/// A file of this machine at the same path.
fn file(path: &Path, mode: u32) -> Result<Entry> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    Ok(Entry::File { path: path.display().to_string().trim_start_matches('/').to_owned(), mode, bytes })
}

/// The shared libraries and the loader, as `ldd` prints them; none for a static program.
fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let printed = Shell::new("ldd").arg(program).finish()?;
    Ok(paths(&printed.stdout))
}

fn paths(printed: &str) -> BTreeSet<PathBuf> {
    printed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_ldd_prints() {
        let printed =
            "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found: Vec<String> = paths(printed).iter().map(|path| path.display().to_string()).collect();
        let wanted =
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(found, wanted);
        assert!(paths("\tstatically linked\n").is_empty());
    }
}
