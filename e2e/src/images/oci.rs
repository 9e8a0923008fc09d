//! Writes OCI image archives: one layer, made of files in memory, the same bytes for the same files.
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// One entry of an image's root file system, by its path without a leading slash.
#[derive(Clone, Debug)]
pub enum Entry {
    Folder { path: String, mode: u32 },
    File { path: String, mode: u32, bytes: Vec<u8> },
}

/// What an image holds and how it starts.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// Name with tag, such as `lorafleet.local/engine:dev`.
    pub name: String,
    pub entries: Vec<Entry>,
    pub entrypoint: Vec<String>,
    /// `uid:gid`.
    pub user: String,
    pub env: Vec<String>,
}

impl Image {
    /// Writes the archive that `ctr images import`, skopeo and Docker read; the digest of the manifest.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, archive: &Path) -> Result<String> {
        let layer = layer(&self.entries)?;
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "User": self.user, "Env": self.env, "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        });
        let config = serde_json::to_vec(&config)?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": described("application/vnd.oci.image.config.v1+json", &config),
            "layers": [described("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = serde_json::to_vec(&manifest)?;
        let mut entry = described("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({
            "io.containerd.image.name": self.name,
            "org.opencontainers.image.ref.name": self.name.rsplit(':').next(),
        });
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?;

        let mut files = vec![
            Entry::File {
                path: "oci-layout".into(),
                mode: 0o644,
                bytes: br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
            },
            Entry::File { path: "index.json".into(), mode: 0o644, bytes: index },
        ];
        let name = digest(&manifest);
        files.extend([layer, config, manifest].into_iter().map(|bytes| Entry::File {
            path: format!("blobs/{}", digest(&bytes).replace(':', "/")),
            mode: 0o644,
            bytes,
        }));
        // Renamed when whole: an archive that is there can be read.
        let writing = archive.with_extension("writing");
        fs::write(&writing, self::layer(&files)?).with_context(|| format!("write {}", writing.display()))?;
        fs::rename(&writing, archive).with_context(|| format!("write {}", archive.display()))?;
        Ok(name)
    }
}

/// The word of OCI for this machine's processor.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn described(kind: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
}

/// A tar archive of the entries: owned by root, without times.
fn layer(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for entry in entries {
        let mut header = Header::new_gnu();
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        match entry {
            Entry::Folder { path, mode } => {
                header.set_entry_type(EntryType::Directory);
                header.set_mode(*mode);
                header.set_size(0);
                tar.append_data(&mut header, format!("{path}/"), std::io::empty())
            }
            Entry::File { path, mode, bytes } => {
                header.set_entry_type(EntryType::Regular);
                header.set_mode(*mode);
                header.set_size(bytes.len() as u64);
                tar.append_data(&mut header, path, bytes.as_slice())
            }
        }
        .with_context(|| format!("pack {entry:.80?}"))?;
    }
    tar.into_inner().context("pack an archive")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_digest() {
        let folder = std::env::temp_dir().join(format!("lorafleet-oci-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let image = |text: &str| Image {
            name: "lorafleet.local/x:dev".into(),
            entries: vec![
                Entry::Folder { path: "tmp".into(), mode: 0o1777 },
                Entry::File { path: "x".into(), mode: 0o755, bytes: text.into() },
            ],
            entrypoint: vec!["/x".into()],
            ..Image::default()
        };
        let write = |text: &str| image(text).write(&folder.join("x.tar")).unwrap();
        let first = write("a");
        assert_eq!(first, write("a"));
        assert_ne!(first, write("b"));
        assert!(first.starts_with("sha256:") && first.len() == 71);
        fs::remove_dir_all(folder).unwrap();
    }
}
