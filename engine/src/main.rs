//! The command line: `serve`.

use clap::{Parser, Subcommand};
use lorafleet_engine::config::{Flags, memory_bytes};
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
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("LORAFLEET_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    match cli.command {
        Command::Serve(flags) => {
            let config = flags.with_file()?.resolve(memory_bytes())?;
            tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(config))
        }
    }
}
