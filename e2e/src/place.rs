//! Where lorafleet is put: a cluster of this harness's own, or one that the user has.
use anyhow::Result;

use crate::cache::{Cache, key};
use crate::cluster::{Cluster, Settings};
use crate::forward::Route;
use crate::guest;
use crate::images;
use crate::install::Images;
use crate::kubectl::Kubectl;
use crate::tools::{self, Tools};

/// Which cluster.
#[derive(Clone, Debug)]
pub enum Place {
    /// One of the harness's own, which is started where it does not run.
    Own(Settings),
    /// The user's, by a context of the kubeconfig; it must be able to get the images.
    Context { name: String, images: Images },
}

/// A cluster that answers, and what talks to it.
#[derive(Clone, Debug)]
pub struct Target {
    place: Place,
    kubectl: Kubectl,
    /// The harness's own cluster, where it is one.
    cluster: Option<Cluster>,
}

impl Target {
    /// Starts the harness's own cluster, or asks the user's whether it may be used.
    ///
    /// # Errors
    /// When it cannot be had; the message says what is missing and what to do.
    pub fn open(cache: &Cache, place: &Place) -> Result<Self> {
        match place {
            Place::Own(settings) => {
                Cluster::check(cache, settings)?;
                build_ahead(cache);
                Ok(Self::running(Cluster::up(cache, settings)?))
            }
            Place::Context { name, .. } => {
                let kubectl = Kubectl::context(&tools::kubectl(cache)?, name);
                guest::enter(&kubectl, name)?;
                Ok(Self { place: place.clone(), kubectl, cluster: None })
            }
        }
    }

    /// A cluster of the harness's own that runs.
    pub fn running(cluster: Cluster) -> Self {
        Self { place: Place::Own(cluster.settings().clone()), kubectl: cluster.kubectl(), cluster: Some(cluster) }
    }

    /// The user's cluster, which another process of this run has asked and prepared.
    ///
    /// # Errors
    /// When kubectl cannot be had.
    pub fn prepared(cache: &Cache, context: &str) -> Result<Self> {
        let kubectl = Kubectl::context(&tools::kubectl(cache)?, context);
        let place = Place::Context { name: context.to_owned(), images: Images::default() };
        Ok(Self { place, kubectl, cluster: None })
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// The harness's own cluster, where it is one.
    pub fn own(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    /// A name for it among all clusters, such as a lock wants.
    pub fn name(&self) -> String {
        match &self.place {
            Place::Own(settings) => format!("cluster-{}", settings.name),
            // A context's name may hold slashes.
            Place::Context { name, .. } => format!("context-{}", key(&[name.as_bytes()])),
        }
    }

    /// Names of images that the cluster has: made and brought into the own one, tried out in the user's.
    ///
    /// # Errors
    /// When they cannot be made, or the user's cluster cannot get or run one; the message says how they come there.
    pub fn images(&self, cache: &Cache) -> Result<Images> {
        match (&self.place, &self.cluster) {
            (Place::Context { name, images }, _) => {
                guest::try_images(&self.kubectl, name, images)?;
                Ok(images.clone())
            }
            (Place::Own(_), Some(cluster)) => own_images(cache, cluster),
            (Place::Own(settings), None) => anyhow::bail!("the cluster {} is not open", settings.name),
        }
    }

    /// A way from this machine to a port of `target` (`service/NAME` or `pod/NAME`).
    ///
    /// # Errors
    /// When there is no such thing, or nothing behind it.
    pub fn reach(&self, namespace: &str, target: &str, port: u16) -> Result<Route> {
        match &self.cluster {
            None => Route::forwarded(&self.kubectl, namespace, target, port),
            Some(_) => {
                let field = if target.starts_with("pod/") { "{.status.podIP}" } else { "{.spec.clusterIP}" };
                let words = ["get", target, "-o", &format!("jsonpath={field}")];
                let address = self.kubectl.namespace(namespace).output(words)?;
                Ok(Route::direct(format!("http://{}:{port}", address.trim())))
            }
        }
    }
}

/// What a first run compiles for many minutes, Go's part and cargo's beside each other, since they wait at different times. What
/// fails here is tried again where it is wanted, and fails there.
fn build_ahead(cache: &Cache) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = Tools::build(cache);
            // Go's part is over first.
            let _ = tools::s3_server(cache);
        });
        let _ = images::programs();
    });
}

/// Another content is another tag, so that running pods are replaced whenever a program has changed.
fn own_images(cache: &Cache, cluster: &Cluster) -> Result<Images> {
    let made = images::make(cache)?;
    let digests: Vec<&[u8]> = made.archives.iter().map(|archive| archive.digest.as_bytes()).collect();
    let images = Images { tag: format!("dev-{}", key(&digests)), ..Images::default() };
    let there = cluster.containerd(&["images", "list", "--quiet"]).output()?;
    if !images::NAMES.iter().all(|name| there.lines().any(|line| line == images.name(name))) {
        images::import(cluster, &made.archives, &images)?;
    }
    Ok(images)
}
