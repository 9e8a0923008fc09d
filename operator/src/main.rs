//! `lorafleet-operator crds [--write DIR]`: the kinds as YAML.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use lorafleet_crds::crdgen;

#[derive(Parser)]
#[command(version, about = "Operates base models, LoRA adapters and serving pools")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the CustomResourceDefinitions, or write one file per kind.
    Crds {
        /// Write the files into this folder instead of printing them.
        #[arg(long, value_name = "DIR")]
        write: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Crds { write } => crds(write),
    }
}

fn crds(write: Option<PathBuf>) -> anyhow::Result<()> {
    if let Some(folder) = write {
        return Ok(crdgen::write_to(&folder)?);
    }
    for file in crdgen::crd_files()? {
        println!("---\n{}", file.yaml.trim_end());
    }
    Ok(())
}
