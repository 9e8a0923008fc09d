//! `inspect`: what adapters are, what they cost, and whether a base would take them. `stamp`: which base one was made
//! for.

mod look;
mod stamp;
mod table;

use std::io::Write;
use std::path::PathBuf;

use lorafleet_source::{Access, ReadLimits, SourceError, Sources};

pub use look::{Facts, Verdict};

#[derive(Clone, Debug, clap::Args)]
pub struct InspectArguments {
    /// Folders or s3:// URIs that hold adapter_config.json and adapter_model.safetensors. For S3, AWS's own variables and
    /// files count: AWS_ENDPOINT_URL_S3, AWS_REGION (us-east-1 without one), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.
    #[arg(required = true)]
    pub adapters: Vec<String>,
    /// The base to judge them for: a folder, a GGUF file, or a URI.
    #[arg(long)]
    pub model: Option<String>,
    /// Print a JSON list instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, clap::Args)]
pub struct StampArguments {
    /// Folder of the adapter.
    pub adapter: PathBuf,
    /// The base that it was trained on: a folder, a GGUF file, or a URI.
    #[arg(long)]
    pub base: String,
}

/// Looks at each adapter and prints what it found. Whether all would be accepted: the exit code is 0 then, else 2.
///
/// # Errors
/// If the base cannot be read, or nothing can be printed. An adapter's own fault is a row, not an error.
pub async fn inspect(arguments: &InspectArguments, out: &mut impl Write) -> anyhow::Result<bool> {
    let base = match &arguments.model {
        None => None,
        Some(model) => Some(look::Base::read(model).await?),
    };
    let mut found = Vec::new();
    for adapter in &arguments.adapters {
        found.push(look::look(adapter, base.as_ref()).await);
    }
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &found)?;
        writeln!(out)?;
    } else {
        table::print(&found, out)?;
    }
    Ok(found.iter().all(|facts| facts.verdict != Verdict::Refused))
}

/// Writes the digest of its base into an adapter's metadata, whole or not at all, and prints the adapter's new digest.
///
/// # Errors
/// If the adapter does not fit the base, or a file cannot be read or written.
pub async fn stamp(arguments: &StampArguments, out: &mut impl Write) -> anyhow::Result<()> {
    stamp::stamp(arguments, out).await
}

/// The command line's user may read whatever the process may; S3 takes AWS's own environment variables.
fn everything(source: &str) -> Result<(Sources, lorafleet_artifact::SourceUri), SourceError> {
    let absolute = std::path::absolute(source).ok().and_then(|path| path.to_str().map(str::to_owned));
    let text = if source.contains("://") { source.to_owned() } else { absolute.unwrap_or_else(|| source.to_owned()) };
    let uri: lorafleet_artifact::SourceUri = text.parse()?;
    // Links may lead anywhere: model caches are made of them.
    let prefix = if source.contains("://") && !source.starts_with("file:") { uri.clone() } else { "/".parse()? };
    Ok((Sources::new([Access::ambient(prefix)], ReadLimits::default()), uri))
}
