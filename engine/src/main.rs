//! The command line: `serve`, `inspect`, `stamp`.

use std::io::IsTerminal as _;
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

fn main() -> ExitCode {
    let cli = Cli::parse();
    let serving = matches!(cli.command, Command::Serve(_));
    // A command for people stays quiet unless something is wrong. That keys were looked for in vain at a metadata service
    // is said by the error that follows from it, in fewer words.
    let default = if serving { "info" } else { "warn,aws_config=off" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("LORAFLEET_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    // Who types the command reads it; else it is a container's log, which machines read.
    let typed = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if typed {
        log.init()
    } else {
        log.json().init()
    }
    match start(cli.command) {
        Ok(code) => code,
        // One line with the whole chain: the last one of a container's log is what its pool's status repeats.
        Err(error) if serving && !typed => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(command: Command) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(run(command));
    // Whoever is told to end does not wait for what it has begun to read.
    runtime.shutdown_background();
    ended
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout();
    match command {
        Command::Serve(flags) => {
            let end = serve(flags.with_file()?.resolve(memory_bytes())?).await?;
            return Ok(ExitCode::from(end.exit_code()));
        }
        Command::Inspect(arguments) => {
            if !inspect(&arguments, &mut out).await? {
                return Ok(ExitCode::from(2));
            }
        }
        Command::Stamp(arguments) => stamp(&arguments, &mut out).await?,
    }
    Ok(ExitCode::SUCCESS)
}
