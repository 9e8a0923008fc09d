//! `lorafleet-operator run` operates; `lorafleet-operator crds` prints the kinds as YAML.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};
use lorafleet_crds::crdgen;
use lorafleet_listen::Told;
use lorafleet_operator::{Settings, rbac};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(version, about = "Operates base models, LoRA adapters and serving pools")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Operate the cluster that the environment or the kubeconfig names.
    Run(Box<Settings>),
    /// Print the CustomResourceDefinitions.
    Crds {
        /// Write what the chart carries instead: `crds/` with one file per kind, `rbac/` with the rules, in this folder.
        #[arg(long, value_name = "DIR")]
        write: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Run(settings) => run(*settings),
        Command::Crds { write } => crds(write),
    }
}

/// Two threads are plenty: what is slow waits for the network.
fn run(settings: Settings) -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let client = kube::Client::try_default().await.context("finding the cluster")?;
        let mut told = Told::new()?;
        let stop = async move {
            told.next().await;
            tracing::info!("stopping");
        };
        Ok(lorafleet_operator::run(client, settings, stop).await?)
    })
}

fn crds(write: Option<PathBuf>) -> anyhow::Result<()> {
    if let Some(folder) = write {
        crdgen::write_to(&folder.join("crds"))?;
        return Ok(rbac::write_to(&folder.join("rbac"))?);
    }
    for file in crdgen::crd_files()? {
        println!("---\n{}", file.yaml.trim_end());
    }
    Ok(())
}
