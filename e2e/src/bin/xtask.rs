//! `cargo xtask`: everything a contributor runs.
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::{check, repository};

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
    }
}
