//! An admission policy of the cluster's owner, as long as it lives: what tests need to be refused by a real API server.
#![allow(clippy::unwrap_used)]

use lorafleet_e2e::wait;
use lorafleet_e2e::world::{Namespace, PATIENCE};

/// A ValidatingAdmissionPolicy and its binding to one namespace.
pub struct Policy<'a> {
    space: &'a Namespace<'a>,
    name: String,
}

impl<'a> Policy<'a> {
    /// Refuses writes to `resource` of `group` in this namespace unless `rule` holds, with these words. It is in force once
    /// `probe`, a kubectl command that writes nothing, is refused.
    pub fn refuse(
        space: &'a Namespace<'a>,
        group: &str,
        resource: &str,
        rule: &str,
        words: &str,
        probe: &[&str],
    ) -> Self {
        let name = format!("{}-{}", space.name, resource.replace('/', "-"));
        let manifests = format!(
            "apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {name}}}
spec:
  matchConstraints:
    resourceRules:
      - apiGroups: [{group}]
        apiVersions: ['*']
        operations: [CREATE, UPDATE]
        resources: [{resource}]
  validations:
    - expression: {rule:?}
      message: {words:?}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {name}}}
spec:
  policyName: {name}
  validationActions: [Deny]
  matchResources:
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {space}}}}}
",
            space = space.name
        );
        let policy = Self { space, name };
        space.world.kubectl().apply(&manifests).unwrap();
        wait::until("the policy is in force", PATIENCE, || {
            let told = space.kubectl.args(probe.iter().copied()).shell().finish()?;
            Ok(told.stderr.contains(words).then_some(()))
        })
        .unwrap();
        policy
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
            let _ = self.space.world.kubectl().output(["delete", kind, &self.name, "--ignore-not-found"]);
        }
    }
}
