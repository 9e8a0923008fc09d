//! The processes of a node with all their flags, in the order in which they start.
use std::path::{Path, PathBuf};

use super::settings::{Parts, Settings};
use crate::tools::Tools;

/// One process of the node.
#[derive(Clone, Debug)]
pub struct Program {
    pub name: &'static str,
    pub path: PathBuf,
    pub args: Vec<String>,
    /// Whether it ends, or is of no use, before the API server answers.
    pub wants_server: bool,
}

/// Everything that runs on the node.
pub fn all(folder: &Path, settings: &Settings, tools: &Tools) -> Vec<Program> {
    let kubernetes = |name: &str| tools.kubernetes.join(name);
    let own = |path: &str| folder.join(path).display().to_string();
    let mut programs = vec![
        Program { name: "etcd", path: kubernetes("etcd"), args: etcd(&own), wants_server: false },
        Program {
            name: "apiserver",
            path: kubernetes("kube-apiserver"),
            args: api_server(&own, settings),
            wants_server: false,
        },
    ];
    if settings.parts == Parts::ApiServer {
        return programs;
    }
    programs.extend([
        Program {
            name: "containerd",
            path: "/usr/bin/containerd".into(),
            args: vec!["--config".into(), own("containerd.toml")],
            wants_server: false,
        },
        Program {
            name: "controller-manager",
            path: kubernetes("kube-controller-manager"),
            args: controllers(&own, settings),
            wants_server: true,
        },
        Program { name: "scheduler", path: kubernetes("kube-scheduler"), args: scheduler(&own), wants_server: true },
        Program { name: "kubelet", path: kubernetes("kubelet"), args: kubelet(&own, settings), wants_server: true },
        Program {
            name: "proxy",
            path: kubernetes("kube-proxy"),
            args: vec![format!("--config={}", own("kube-proxy.yaml"))],
            wants_server: true,
        },
        Program {
            name: "coredns",
            path: tools.coredns.clone(),
            args: vec!["-conf".into(), own("Corefile")],
            wants_server: true,
        },
    ]);
    programs
}

fn etcd(own: &dyn Fn(&str) -> String) -> Vec<String> {
    vec![
        format!("--data-dir={}", own("etcd")),
        "--listen-client-urls=http://127.0.0.1:2379".into(),
        "--advertise-client-urls=http://127.0.0.1:2379".into(),
        "--listen-peer-urls=http://127.0.0.1:2380".into(),
        // The data lives as long as the cluster.
        "--unsafe-no-fsync".into(),
        "--log-level=warn".into(),
    ]
}

fn api_server(own: &dyn Fn(&str) -> String, settings: &Settings) -> Vec<String> {
    vec![
        "--etcd-servers=http://127.0.0.1:2379".into(),
        "--bind-address=0.0.0.0".into(),
        "--secure-port=6443".into(),
        format!("--advertise-address={}", settings.node_ip()),
        format!("--tls-cert-file={}", own("pki/apiserver.crt")),
        format!("--tls-private-key-file={}", own("pki/apiserver.key")),
        format!("--client-ca-file={}", own("pki/ca.crt")),
        format!("--kubelet-client-certificate={}", own("pki/apiserver.crt")),
        format!("--kubelet-client-key={}", own("pki/apiserver.key")),
        format!("--kubelet-certificate-authority={}", own("pki/ca.crt")),
        // The node's name is in no name service: logs, exec and port-forward go to its address.
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-signing-key-file={}", own("pki/tokens.key")),
        format!("--service-account-key-file={}", own("pki/tokens.pub")),
        format!("--service-cluster-ip-range={}", settings.service_range()),
        "--authorization-mode=Node,RBAC".into(),
        "--allow-privileged=true".into(),
    ]
}

fn kubeconfigs(own: &dyn Fn(&str) -> String, file: &str) -> Vec<String> {
    ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
        .map(|flag| format!("--{flag}={}", own(file)))
        .to_vec()
}

fn controllers(own: &dyn Fn(&str) -> String, settings: &Settings) -> Vec<String> {
    let mut args = kubeconfigs(own, "controller-manager.kubeconfig");
    args.extend([
        format!("--service-account-private-key-file={}", own("pki/tokens.key")),
        format!("--root-ca-file={}", own("pki/ca.crt")),
        "--use-service-account-credentials=true".into(),
        "--leader-elect=false".into(),
        format!("--cluster-cidr={}", settings.pods()),
        format!("--flex-volume-plugin-dir={}", own("kubelet/volume-plugins")),
    ]);
    args
}

fn scheduler(own: &dyn Fn(&str) -> String) -> Vec<String> {
    let mut args = kubeconfigs(own, "scheduler.kubeconfig");
    args.push("--leader-elect=false".into());
    args
}

fn kubelet(own: &dyn Fn(&str) -> String, settings: &Settings) -> Vec<String> {
    vec![
        format!("--config={}", own("kubelet.yaml")),
        format!("--kubeconfig={}", own("kubelet.kubeconfig")),
        format!("--root-dir={}", own("kubelet")),
        format!("--cert-dir={}", own("kubelet/pki")),
        "--hostname-override=node1".into(),
        format!("--node-ip={}", settings.node_ip()),
        "--register-node=true".into(),
    ]
}
