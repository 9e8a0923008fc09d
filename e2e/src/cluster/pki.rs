//! The cluster's certificates: one authority, made anew with each cluster, and what it signs.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use super::settings::Settings;

/// Who a certificate is for: Kubernetes reads the user from the common name and the group from the organisation.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    pub file: &'static str,
    pub user: &'static str,
    pub group: &'static str,
}

/// Everyone who talks to the API server with a certificate, besides the API server itself.
pub const CLIENTS: [Identity; 5] = [
    Identity { file: "admin", user: "admin", group: "system:masters" },
    Identity { file: "controller-manager", user: "system:kube-controller-manager", group: "" },
    Identity { file: "scheduler", user: "system:kube-scheduler", group: "" },
    Identity { file: "kubelet", user: "system:node:node1", group: "system:nodes" },
    Identity { file: "proxy", user: "system:kube-proxy", group: "system:node-proxier" },
];

const API_SERVER: Identity = Identity { file: "apiserver", user: "kube-apiserver", group: "system:masters" };

/// Makes the folder `pki`: `ca.crt`, a `.crt` and a `.key` for each identity, and the pair that signs service-account tokens.
///
/// # Errors
/// When a certificate cannot be made or a file cannot be written.
pub fn write(folder: &Path, settings: &Settings) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let authority_key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    params.distinguished_name.push(DnType::CommonName, format!("lorafleet-{}", settings.name));
    put(folder.join("ca.crt"), &params.self_signed(&authority_key)?.pem())?;
    let authority = Issuer::new(params, authority_key);

    let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1"];
    let mut served: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    served.extend([settings.first_service_ip(), settings.node_ip()]);
    sign(folder, &authority, API_SERVER, served)?;
    for client in CLIENTS {
        // The kubelet also serves logs and exec, at the node's address.
        let served = if client.file == "kubelet" { vec!["node1".to_owned(), settings.node_ip()] } else { Vec::new() };
        sign(folder, &authority, client, served)?;
    }

    let tokens = KeyPair::generate()?;
    put(folder.join("tokens.key"), &tokens.serialize_pem())?;
    put(folder.join("tokens.pub"), &tokens.public_key_pem())
}

fn sign(folder: &Path, authority: &Issuer<'_, KeyPair>, who: Identity, served: Vec<String>) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(served).with_context(|| format!("names of {}", who.file))?;
    params.distinguished_name.push(DnType::CommonName, who.user);
    if !who.group.is_empty() {
        params.distinguished_name.push(DnType::OrganizationName, who.group);
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.signed_by(&key, authority)?;
    put(folder.join(format!("{}.crt", who.file)), &certificate.pem())?;
    put(folder.join(format!("{}.key", who.file)), &key.serialize_pem())
}

fn put(path: PathBuf, text: &str) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&path).with_context(|| format!("make {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}
