//! The command line: `serve`, `inspect`, `stamp`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use lorafleet_engine::config::{Flags, memory_bytes};
use lorafleet_engine::inspect::{InspectArguments, StampArguments, inspect, stamp};
use lorafleet_engine::serve::serve;

/// One frozen base model, thousands of adapters.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a base model and its adapters over HTTP.
    Serve(Box<Flags>),
    /// Say what adapters are, what they cost, and whether a base would take them (exit code 2 if not).
    Inspect(InspectArguments),
    /// Write into an adapter's metadata which base it was trained on.
    Stamp(StampArguments),
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let serving = matches!(cli.command, Command::Serve(_));
    // A command for people stays quiet unless something is wrong.
    let default = if serving { "info" } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("LORAFLEET_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run(cli.command))
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout();
    match command {
        Command::Serve(flags) => serve(flags.with_file()?.resolve(memory_bytes())?).await?,
        Command::Inspect(arguments) => {
            if !inspect(&arguments, &mut out).await? {
                return Ok(ExitCode::from(2));
            }
        }
        Command::Stamp(arguments) => stamp(&arguments, &mut out).await?,
    }
    Ok(ExitCode::SUCCESS)
}
