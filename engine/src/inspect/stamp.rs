//! Writing the base's digest into an adapter's metadata.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;

use anyhow::Context as _;
use lorafleet_artifact::{BASE_DIGEST_KEY, Claims, Digest, Policy, Safetensors, WEIGHTS_FILE};
use lorafleet_source::{Progress, read_adapter};

use super::look::Base;
use super::{StampArguments, everything};

pub(super) async fn stamp(arguments: &StampArguments, out: &mut impl Write) -> anyhow::Result<()> {
    let base = Base::read(&arguments.base).await.context("reading the base")?;
    let folder =
        arguments.adapter.canonicalize().with_context(|| format!("looking for {}", arguments.adapter.display()))?;
    let text = folder.to_str().with_context(|| format!("{} is not UTF-8", folder.display()))?;
    // What does not fit the base was not made for it, whatever is written into it.
    let policy = Policy { require_base_digest: false, ..Policy::default() };
    let read = async |policy: &Policy| {
        let (sources, uri) = everything(text)?;
        let progress = Progress::default();
        let read = read_adapter(&sources, &uri, Claims::default(), &base.shape, policy, false, &progress).await;
        let read = read.map_err(|error| anyhow::anyhow!("{}: {error}", error.code()))?;
        anyhow::Ok(read.verified)
    };
    let before = read(&policy).await?;
    let (path, digest) = (folder.join(WEIGHTS_FILE), base.digest);
    tokio::task::spawn_blocking(move || rewrite(&path, &before.header, digest)).await??;
    // Read again from disk, now with the claim: what is printed is what will be served.
    let strict = Policy { identities: vec![base.digest], ..Policy::default() };
    let after = read(&strict).await.context("reading the stamped adapter again")?;
    writeln!(out, "{text}\n  base     {}\n  adapter  {}", base.digest, after.digest)?;
    Ok(())
}

/// Beside the file first, then in its place: whoever reads meanwhile sees the old or the new one.
fn rewrite(path: &Path, header: &Safetensors, base: Digest) -> anyhow::Result<()> {
    let doing = || format!("writing {}", path.display());
    let mut old = File::open(path).with_context(doing)?;
    let folder = path.parent().context("the weights file has no folder")?;
    let mut new = tempfile::Builder::new().prefix(".stamp-").tempfile_in(folder).with_context(doing)?;
    new.write_all(&header.head_with_metadata(BASE_DIGEST_KEY, &base.to_string())?).with_context(doing)?;
    old.seek(SeekFrom::Start(header.data_start)).with_context(doing)?;
    let permissions = old.metadata().with_context(doing)?.permissions();
    let copied = std::io::copy(&mut old.take(header.data_bytes), new.as_file_mut()).with_context(doing)?;
    anyhow::ensure!(copied == header.data_bytes, "{} became shorter while it was read", path.display());
    new.as_file().set_permissions(permissions).with_context(doing)?;
    new.as_file().sync_all().with_context(doing)?;
    new.persist(path).with_context(doing)?;
    File::open(folder).and_then(|folder| folder.sync_all()).with_context(doing)
}
