//! A real S3 server in the cluster, and what the tests and the demo put into it.
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::forward::Route;
use crate::kubectl::Kubectl;
use crate::shell::Shell;
use crate::wait;

/// Namespace of the server, and the Service that pods reach it by.
pub const NAMESPACE: &str = "lorafleet-store";
pub const ENDPOINT: &str = "http://s3.lorafleet-store:9000";
pub const REGION: &str = "us-east-1";
/// Keys of a server that lives as long as a test cluster.
pub const ACCESS_KEY_ID: &str = "demo";
pub const SECRET_ACCESS_KEY: &str = "demo-secret-key";

pub const PORT: u16 = 9000;
const PATIENCE: Duration = Duration::from_secs(300);

/// The server as seen from here.
#[derive(Clone, Debug)]
pub struct Store {
    route: Route,
}

impl Store {
    /// Applies the server's manifest and waits until it takes traffic.
    ///
    /// # Errors
    /// When it is not ready within five minutes.
    pub fn deploy(kubectl: &Kubectl, image: &str) -> Result<()> {
        kubectl.apply(&manifest(image))?;
        let rollout = ["rollout", "status", "deployment/s3", "--timeout", "300s"];
        kubectl.namespace(NAMESPACE).output(rollout).context("the S3 server")?;
        Ok(())
    }

    /// The server at the end of this route, once it answers.
    ///
    /// # Errors
    /// When nothing listens there within five minutes.
    pub fn at(route: Route) -> Result<Self> {
        let store = Self { route };
        wait::until("the S3 server answers", PATIENCE, || {
            let answer = ureq::get(store.url()).config().http_status_as_error(false).proxy(None).build().call()?;
            Ok((answer.status().as_u16() < 500).then_some(()))
        })?;
        Ok(store)
    }

    fn url(&self) -> &str {
        self.route.url()
    }

    /// Makes a bucket; one that is there already is as good.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn bucket(&self, name: &str) -> Result<()> {
        let made = self.curl().args(["--request", "PUT"]).arg(format!("{}/{name}", self.url())).finish()?;
        if made.success || made.stderr.contains("409") {
            return Ok(());
        }
        made.ok().map(drop)
    }

    /// Puts one file as `bucket/key`.
    ///
    /// # Errors
    /// When the file cannot be read or the server refuses.
    pub fn put(&self, file: &Path, path: &str) -> Result<()> {
        self.curl().arg("--upload-file").arg(file).arg(format!("{}/{path}", self.url())).run()
    }

    /// Puts many files, each as the `bucket/key` beside it, over one connection.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn put_all(&self, files: &[(PathBuf, String)]) -> Result<()> {
        // curl reads from standard input what would be too long for a command line.
        let lines = files
            .iter()
            .map(|(file, path)| format!("upload-file = \"{}\"\nurl = \"{}/{path}\"\n", file.display(), self.url()));
        self.curl().args(["--config", "-"]).input(lines.collect::<String>()).run()
    }

    /// Puts every file of a folder below `bucket/prefix`.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn put_folder(&self, folder: &Path, path: &str) -> Result<()> {
        let entries = std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            self.put(&entry.path(), &format!("{path}/{}", entry.file_name().to_string_lossy()))?;
        }
        Ok(())
    }

    /// Whether `bucket/key` is there.
    ///
    /// # Errors
    /// When curl cannot be started.
    pub fn holds(&self, path: &str) -> Result<bool> {
        Ok(self.curl().arg("--head").arg(format!("{}/{path}", self.url())).finish()?.success)
    }

    /// Removes `bucket/key`.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn delete(&self, path: &str) -> Result<()> {
        self.curl().args(["--request", "DELETE"]).arg(format!("{}/{path}", self.url())).run()
    }

    fn curl(&self) -> Shell {
        Shell::new("curl")
            .args(["--fail", "--silent", "--show-error", "--max-time", "120", "--noproxy", "*"])
            .args([
                "--aws-sigv4",
                &format!("aws:amz:{REGION}:s3"),
                "--header",
                "x-amz-content-sha256: UNSIGNED-PAYLOAD",
            ])
            .args(["--user", &format!("{ACCESS_KEY_ID}:{SECRET_ACCESS_KEY}")])
    }
}

/// The Secret `s3-credentials` that lets a `BaseModel` of this namespace read the store.
pub fn credentials(namespace: &str) -> String {
    format!(
        "apiVersion: v1
kind: Secret
metadata: {{name: s3-credentials, namespace: {namespace}}}
stringData: {{access-key-id: {ACCESS_KEY_ID}, secret-access-key: {SECRET_ACCESS_KEY}}}
"
    )
}

fn manifest(image: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: s3, namespace: {NAMESPACE}}}
spec:
  selector: {{matchLabels: {{app: s3}}}}
  strategy: {{type: Recreate}}
  template:
    metadata: {{labels: {{app: s3}}}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {{runAsNonRoot: true, fsGroup: 65532, seccompProfile: {{type: RuntimeDefault}}}}
      containers:
      - name: s3
        image: {image}
        args: [--host, 0.0.0.0, --port, '{PORT}', --access-key, {ACCESS_KEY_ID}, --secret-key, {SECRET_ACCESS_KEY}, /data]
        ports: [{{name: http, containerPort: {PORT}}}]
        readinessProbe: {{tcpSocket: {{port: http}}, periodSeconds: 1}}
        securityContext: {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
        volumeMounts: [{{name: data, mountPath: /data}}, {{name: tmp, mountPath: /tmp}}]
      volumes: [{{name: data, emptyDir: {{}}}}, {{name: tmp, emptyDir: {{}}}}]
---
apiVersion: v1
kind: Service
metadata: {{name: s3, namespace: {NAMESPACE}}}
spec:
  selector: {{app: s3}}
  ports: [{{name: http, port: {PORT}, targetPort: http}}]
"
    )
}
