//! `cargo xtask`: everything a contributor runs.
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::check::Clusters;
use lorafleet_e2e::cluster::{Cluster, Prefix, Settings};
use lorafleet_e2e::install::Images;
use lorafleet_e2e::place::{Place, Target};
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::{check, demo, guard, guest, images, measure, progress, repository, tools, ways};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Checks, cluster, images and demo of lorafleet")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every check that a change must pass; the last line is `N passed, N failed`.
    Test {
        /// Leave out the tests that need a cluster.
        #[arg(long, conflicts_with = "context")]
        fast: bool,
        #[command(flatten)]
        guest: Guest,
    },
    /// Start a one-node Kubernetes in namespaces of its own, or find it running.
    Up(Where),
    /// End every cluster that this command started and remove all but its logs; or take away what it made in yours.
    Down {
        /// Only the cluster of this name; that there is none is no error.
        #[arg(long, conflicts_with = "context")]
        name: Option<String>,
        /// The cluster of this context of your kubeconfig: remove there what `demo` and `test` made, and nothing else.
        #[arg(long)]
        context: Option<String>,
    },
    /// Show the logs of a cluster's processes: all names, or the end of the named one.
    Logs {
        /// A process, such as kubelet.
        process: Option<String>,
        /// Name of the cluster.
        #[arg(long, default_value = "dev")]
        name: String,
    },
    /// From nothing to chats with a base and two adapters: cluster, images, store, chart, manifests.
    Demo {
        #[command(flatten)]
        place: Where,
        #[command(flatten)]
        guest: Guest,
    },
    /// Write the custom resource definitions, their reference and the operator's rules anew from the types.
    Crds,
    /// Make the images as archives that containerd, Docker, kind and skopeo read, and say how they come to a cluster.
    Images,
    /// Measure start, memory, first token of a cold adapter and the demo, on a machine that does nothing else.
    Measure {
        /// Write the table into docs/BENCHMARKS.md as well.
        #[arg(long)]
        write: bool,
        /// Leave out what needs a cluster.
        #[arg(long)]
        fast: bool,
        /// A pool with so many adapters on one engine pod, and nothing else; some minutes.
        #[arg(long, value_name = "ADAPTERS", conflicts_with = "fast", value_parser = clap::value_parser!(u32).range(1..10_000))]
        fleet: Option<u32>,
    },
    /// What [`guard::start`] starts.
    #[command(name = guard::SUBCOMMAND, hide = true)]
    Guard {
        #[arg(long = guard::OF_TESTS)]
        of_tests: bool,
    },
}

/// A cluster of the harness's own.
#[derive(Args)]
struct Where {
    /// Name of the cluster: its folder, its control groups, its context [default: dev]
    #[arg(long)]
    name: Option<String>,
    /// The one network interface that the host sees [default: lf0, or that of the running cluster]
    #[arg(long)]
    interface: Option<String>,
    /// First two numbers of the pods' addresses [default: 10.88, or those of the running cluster]
    #[arg(long)]
    network: Option<Prefix>,
    /// First two numbers of the services' addresses [default: 10.96, or those of the running cluster]
    #[arg(long)]
    services: Option<Prefix>,
}

impl Where {
    /// What is not said is as it is in the cluster of this name that runs, if one does.
    fn settings(self, cache: &Cache) -> Result<Settings> {
        let Self { name, interface, network, services } = self;
        let usual = Settings::default();
        let asked = Settings { name: name.unwrap_or(usual.name.clone()), ..usual };
        asked.check(cache)?;
        let there = Cluster::running(cache, &asked.name).unwrap_or(asked);
        Ok(Settings {
            interface: interface.unwrap_or(there.interface.clone()),
            network: network.unwrap_or(there.network),
            services: services.unwrap_or(there.services),
            ..there
        })
    }

    fn is_said(&self) -> bool {
        let Self { name, interface, network, services } = self;
        name.is_some() || interface.is_some() || network.is_some() || services.is_some()
    }
}

/// A cluster of the user's.
#[derive(Args)]
struct Guest {
    /// Use the cluster of this context of your kubeconfig instead of an own one. `down --context` cleans up there.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// With --context: where that cluster finds the images, as REPOSITORY/operator:TAG and so on; see `images`.
    #[arg(long, default_value = "lorafleet.local", requires = "context")]
    repository: String,
    /// With --context: the images' tag.
    #[arg(long, default_value = "dev", requires = "context")]
    tag: String,
}

impl Guest {
    fn context(self) -> Option<(String, Images)> {
        let Self { context, repository, tag } = self;
        context.map(|name| (name, Images { repository, tag }))
    }
}

fn main() -> ExitCode {
    progress::outlive_readers();
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Guard { of_tests } => guard::watch(if of_tests { guard::Run::Tests } else { guard::Run::Command }),
        command => guarded(command),
    };
    guard::done();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn guarded(command: Command) -> Result<()> {
    let own = std::env::current_exe().context("find this program")?;
    guard::start(&own, guard::Run::Command)?;
    run(command)?;
    // One that failed may go on from there.
    tools::forget_builds(&Cache::open()?)
}

fn run(command: Command) -> Result<()> {
    let cache = Cache::open()?;
    match command {
        Command::Guard { .. } => Ok(()),
        Command::Test { fast, guest } => {
            let clusters = match guest.context() {
                Some((name, images)) => Clusters::Context { name, images },
                None if fast => Clusters::None,
                None => Clusters::Own,
            };
            check::run(&repository(), &cache, &clusters)
        }
        Command::Up(place) => {
            let target = Target::running(Cluster::up(&cache, &place.settings(&cache)?)?);
            progress::say("the cluster is up; to look around, and to end it:\n");
            progress::print(&ways::text(&target, None));
            Ok(())
        }
        Command::Down { name, context } => match (context, name) {
            (Some(context), _) => guest::leave(&cache, &context),
            (None, Some(name)) => Cluster::down_named(&cache, &name),
            (None, None) => Cluster::down_all(&cache),
        },
        Command::Logs { process, name } => logs(&cache, process.as_deref(), name),
        Command::Demo { place, guest } => {
            let place = match guest.context() {
                Some((context, _)) if place.is_said() => bail!(
                    "--name, --interface, --network and --services are for a cluster of this command's own, not for context {context}"
                ),
                Some((name, images)) => Place::Context { name, images },
                None => Place::Own(place.settings(&cache)?),
            };
            demo::run(&cache, &place)
        }
        Command::Crds => crds(),
        Command::Images => {
            for archive in images::make(&cache)?.archives {
                progress::print(&format!("{}\n", archive.path.display()));
            }
            progress::print(&format!("\n{}\n", guest::how_images_come(&Images::default())));
            Ok(())
        }
        Command::Measure { write, fast, fleet } => measure::run(&cache, measure::Options { write, fast, fleet }),
    }
}

/// The tests that hold the generated files against the types also write them, when asked to.
fn crds() -> Result<()> {
    let words = ["test", "--workspace", "--quiet", "--test", "crds_up_to_date", "--test", "rules_up_to_date"];
    Shell::new("cargo").args(words).env("UPDATE_GOLDEN", "1").folder(&repository()).run()?;
    progress::say("written: charts/lorafleet/files/crds, charts/lorafleet/files/rbac, docs/API.md");
    Ok(())
}

fn logs(cache: &Cache, process: Option<&str>, name: String) -> Result<()> {
    let settings = Settings { name, ..Settings::default() };
    settings.check(cache)?;
    let folder = settings.folder(cache).join("logs");
    ensure!(folder.is_dir(), "no cluster {} has run: there is no {}", settings.name, folder.display());
    match process {
        Some(name) => {
            let path = folder.join(format!("{name}.log"));
            ensure!(path.is_file(), "no log {}; `cargo xtask logs` lists those that there are", path.display());
            progress::print(&Shell::new("tail").args(["-n", "200"]).arg(path).output()?);
        }
        None => {
            let entries = std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
            for entry in entries {
                progress::print(&format!("{}\n", entry?.path().display()));
            }
        }
    }
    Ok(())
}
