//! `cargo xtask`: everything a contributor runs.
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::cluster::{Cluster, Parts, Prefix, Settings};
use lorafleet_e2e::demo::{self, Place};
use lorafleet_e2e::install::Images;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::{check, images, progress, repository};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks, cluster, images and demo of lorafleet")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every check that a change must pass; the last line is `N passed, N failed`.
    Test {
        /// Leave out the tests that need a cluster.
        #[arg(long)]
        fast: bool,
    },
    /// Start a one-node Kubernetes in namespaces of its own, or find it running.
    Up(Where),
    /// End that cluster and remove everything but its logs.
    Down(Where),
    /// Show the logs of that cluster's processes: all names, or the end of the named one.
    Logs {
        /// A process, such as kubelet.
        process: Option<String>,
        #[command(flatten)]
        place: Where,
    },
    /// From nothing to chats with a base and two adapters: cluster, images, store, chart, manifests.
    Demo {
        #[command(flatten)]
        place: Where,
        /// Use the cluster of this context of your kubeconfig instead of an own one.
        #[arg(long)]
        context: Option<String>,
        /// With --context: where that cluster finds the images; REPOSITORY/operator:TAG and so on.
        #[arg(long, default_value = "lorafleet.local")]
        repository: String,
        /// With --context: the images' tag.
        #[arg(long, default_value = "dev")]
        tag: String,
    },
    /// Write the custom resource definitions, their reference and the operator's rules anew from the types.
    Crds,
    /// Make the images as archives, and import them where the cluster runs.
    Images(Where),
}

/// Which cluster.
#[derive(Args)]
struct Where {
    /// Name of the cluster: its folder, its control groups, its context.
    #[arg(long, default_value = "dev")]
    name: String,
    /// The one network interface that the host sees.
    #[arg(long, default_value = "lf0")]
    interface: String,
    /// First two numbers of the pods' addresses.
    #[arg(long, default_value = "10.88")]
    network: Prefix,
    /// First two numbers of the services' addresses.
    #[arg(long, default_value = "10.96")]
    services: Prefix,
}

impl Where {
    fn settings(self) -> Settings {
        let Self { name, interface, network, services } = self;
        Settings { name, interface, network, services, parts: Parts::Node }
    }
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let cache = Cache::open()?;
    match cli.command {
        Command::Test { fast } => check::run(&repository(), &cache, check::Options { fast }),
        Command::Up(place) => {
            let cluster = Cluster::up(&cache, &place.settings())?;
            progress::say("the cluster is up:");
            println!("export KUBECONFIG={}", cluster.kubeconfig().display());
            println!("export PATH={}:$PATH", cluster.tools().kubernetes.display());
            Ok(())
        }
        Command::Down(place) => Cluster::down(&cache, &place.settings()),
        Command::Logs { process, place } => logs(&cache, process.as_deref(), &place.settings()),
        Command::Demo { place, context, repository, tag } => {
            let images = Images { repository, tag };
            let place = match context {
                Some(name) => Place::Context { name, images },
                None => Place::Own(place.settings()),
            };
            demo::run(&cache, &place)
        }
        Command::Crds => crds(),
        Command::Images(place) => match Cluster::running(&cache, &place.settings())? {
            Some(cluster) => images::load(&cache, &cluster).map(drop),
            None => images::make(&cache).map(drop),
        },
    }
}

/// The tests that hold the generated files against the types also write them, when asked to.
fn crds() -> Result<()> {
    let words = ["test", "--workspace", "--quiet", "--test", "crds_up_to_date", "--test", "rules_up_to_date"];
    Shell::new("cargo").args(words).env("UPDATE_GOLDEN", "1").folder(&repository()).run()
}

fn logs(cache: &Cache, process: Option<&str>, settings: &Settings) -> Result<()> {
    let folder = settings.folder(cache).join("logs");
    match process {
        Some(name) => {
            let path = folder.join(format!("{name}.log"));
            print!("{}", Shell::new("tail").args(["-n", "200"]).arg(path).output()?);
        }
        None => {
            let entries = std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
            for entry in entries {
                println!("{}", entry?.path().display());
            }
        }
    }
    Ok(())
}
