//! `lorafleet-gateway run`: the front door of one pool.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use lorafleet_gateway::limits::Limits;
use lorafleet_gateway::run::{self, Settings};

#[derive(Parser)]
#[command(name = "lorafleet-gateway", version, about = "The OpenAI front door of a lorafleet pool")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a pool until SIGTERM.
    Run(RunArgs),
}

#[derive(Args)]
struct RunArgs {
    /// Namespace of the pool.
    #[arg(long, env = "LORAFLEET_NAMESPACE")]
    namespace: String,
    /// Name of the ServingPool.
    #[arg(long, env = "LORAFLEET_POOL")]
    pool: String,
    /// Where clients connect.
    #[arg(long, env = "LORAFLEET_LISTEN", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// Where `/metrics`, `/healthz` and `/readyz` are.
    #[arg(long, env = "LORAFLEET_METRICS_LISTEN", default_value = "0.0.0.0:8081")]
    metrics_listen: SocketAddr,
    /// File with the key for the engines' inference routes.
    #[arg(long, env = "LORAFLEET_ENGINE_KEY_FILE")]
    engine_key_file: PathBuf,
    /// Folder with one entry per client: {"key": "...", "models": ["smollm2", "support"]}. Without it every client may use
    /// every model.
    #[arg(long, env = "LORAFLEET_API_KEYS_DIR")]
    api_keys_dir: Option<PathBuf>,
    #[command(flatten)]
    limits: Limits,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Command::Run(args) = Cli::parse().command;
    run::log();
    let settings = Settings {
        namespace: args.namespace,
        pool: args.pool,
        listen: args.listen,
        metrics_listen: args.metrics_listen,
        engine_key_file: args.engine_key_file,
        api_keys_dir: args.api_keys_dir,
        limits: args.limits,
    };
    match run::run(settings).await {
        Ok(end) => ExitCode::from(end.exit_code()),
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
