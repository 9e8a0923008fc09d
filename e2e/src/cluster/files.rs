//! The text of every configuration file, from the settings and the cluster's folder.
use std::path::Path;

use super::pki::{CLIENTS, Identity};
use super::settings::{Settings, containerd_socket};
use crate::demo;

/// Paths below the cluster's folder, and what they hold.
pub fn all(folder: &Path, settings: &Settings) -> Vec<(String, String)> {
    let root = folder.display().to_string();
    let mut files = vec![
        ("containerd.toml".to_owned(), containerd(folder)),
        ("cni/10-pods.conflist".to_owned(), pods_network(settings)),
        ("kubelet.yaml".to_owned(), kubelet(folder, settings)),
        ("kube-proxy.yaml".to_owned(), proxy(&root, settings)),
        ("Corefile".to_owned(), names(&root, settings)),
        // Pods that ask for the host's resolver find none: nothing in the cluster reaches outside.
        ("resolv.conf".to_owned(), String::new()),
    ];
    files.extend(CLIENTS.iter().map(|who| (format!("{}.kubeconfig", who.file), kubeconfig(&root, settings, who))));
    files
}

fn kubeconfig(root: &str, settings: &Settings, who: &Identity) -> String {
    // Where the demo is, so that a person finds it without a flag; whoever is no person names namespaces.
    let namespace = demo::NAMESPACE;
    let (server, context, file) = (settings.server(), format!("lorafleet-{}", settings.name), who.file);
    format!(
        "apiVersion: v1
kind: Config
current-context: {context}
clusters:
- name: {context}
  cluster: {{server: '{server}', certificate-authority: '{root}/pki/ca.crt'}}
users:
- name: {file}
  user: {{client-certificate: '{root}/pki/{file}.crt', client-key: '{root}/pki/{file}.key'}}
contexts:
- name: {context}
  context: {{cluster: {context}, user: {file}, namespace: {namespace}}}
"
    )
}

/// `restrict_oom_score_adj`: a machine without CAP_SYS_RESOURCE cannot lower it, and each sandbox would fail.
fn containerd(folder: &Path) -> String {
    let root = folder.display();
    let socket = containerd_socket(folder);
    let socket = socket.display();
    format!(
        r#"version = 2
root = "{root}/containerd/root"
state = "{root}/containerd/run"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{root}/cni"
"#
    )
}

/// The image that holds a pod's namespaces.
pub const PAUSE_IMAGE: &str = "lorafleet.local/pause:1";

/// Point-to-point links instead of a bridge: every packet passes the node's own tables, so that a service's reply is
/// translated back with or without the kernel's bridge filter.
fn pods_network(settings: &Settings) -> String {
    let pods = settings.pods();
    format!(
        r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {{"type": "ptp", "ipMasq": false, "ipam": {{"type": "host-local", "ranges": [[{{"subnet": "{pods}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
]}}
"#
    )
}

/// `syncFrequency`: after so long running pods see the new content of a Secret, instead of a minute and more.
fn kubelet(folder: &Path, settings: &Settings) -> String {
    let root = folder.display();
    let socket = containerd_socket(folder);
    let (socket, group, node) = (socket.display(), settings.control_group(), settings.node_ip());
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: '{root}/pki/ca.crt'}}}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: '{group}'
failCgroupV1: false
failSwapOn: false
clusterDNS: ['{node}']
clusterDomain: cluster.local
resolvConf: '{root}/resolv.conf'
syncFrequency: 10s
containerRuntimeEndpoint: 'unix://{socket}'
volumePluginDir: '{root}/kubelet/volume-plugins'
tlsCertFile: '{root}/pki/kubelet.crt'
tlsPrivateKeyFile: '{root}/pki/kubelet.key'
evictionHard: {{imagefs.available: 500Mi, nodefs.available: 500Mi, memory.available: 100Mi}}
imageGCHighThresholdPercent: 100
enforceNodeAllocatable: []
staticPodPath: ''
"
    )
}

fn proxy(root: &str, settings: &Settings) -> String {
    let pods = settings.pods();
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clientConnection: {{kubeconfig: '{root}/proxy.kubeconfig'}}
clusterCIDR: {pods}
hostnameOverride: node1
conntrack: {{maxPerCore: 0}}
"
    )
}

/// No cache: the answers come from memory, and a name that did not exist a second ago must be found now.
fn names(root: &str, settings: &Settings) -> String {
    let node = settings.node_ip();
    format!(
        ".:53 {{
    bind {node}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {root}/admin.kubeconfig
        pods insecure
    }}
}}
"
    )
}
