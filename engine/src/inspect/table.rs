//! Facts as a table for people.

use std::io::Write;

use super::look::{Facts, Verdict};

pub(super) fn print(found: &[Facts], out: &mut impl Write) -> std::io::Result<()> {
    let head = ["ADAPTER", "DIGEST", "BASE", "RANK", "MODULES", "TYPE", "FILE", "PER GIB", "VERDICT"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(found.iter().map(row));
    let mut widths = vec![0; head.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    for facts in found {
        if let (Some(reason), Some(message)) = (&facts.reason, &facts.message) {
            writeln!(out, "\n{}: {reason}\n  {message}", facts.source)?;
        }
        if let Some(note) = &facts.note {
            writeln!(out, "\n{}: accepted, but\n  {note}", facts.source)?;
        }
    }
    Ok(())
}

fn row(facts: &Facts) -> Vec<String> {
    let short =
        |digest: Option<lorafleet_artifact::Digest>| digest.map_or_else(|| "-".to_owned(), |digest| digest.short());
    let name = facts.source.trim_end_matches('/').rsplit('/').next().unwrap_or(&facts.source);
    let verdict = match facts.verdict {
        Verdict::Accepted if facts.note.is_some() => "accepted, names no base".to_owned(),
        Verdict::Accepted => "accepted".to_owned(),
        Verdict::NotJudged => "well-formed (no --model)".to_owned(),
        Verdict::Refused => format!("refused: {}", facts.reason.as_deref().unwrap_or("")),
    };
    vec![
        name.to_owned(),
        short(facts.digest),
        short(facts.base_digest),
        if facts.rank == 0 { "-".to_owned() } else { facts.rank.to_string() },
        modules(facts),
        if facts.types.is_empty() { "-".to_owned() } else { facts.types.join("+") },
        bytes(facts.file_bytes),
        if facts.per_gib == 0 { "-".to_owned() } else { facts.per_gib.to_string() },
        verdict,
    ]
}

/// `4: q v`, with ranks where they differ: `14: down=7 q=4,16`.
fn modules(facts: &Facts) -> String {
    if facts.modules == 0 {
        return "-".to_owned();
    }
    let uniform = facts.ranks.values().flatten().collect::<std::collections::BTreeSet<_>>().len() <= 1;
    let kind = |(kind, ranks): (&String, &Vec<u64>)| {
        let kind = kind.strip_suffix("_proj").unwrap_or(kind);
        let ranks: Vec<String> = ranks.iter().map(u64::to_string).collect();
        if uniform { kind.to_owned() } else { format!("{kind}={}", ranks.join(",")) }
    };
    let kinds: Vec<String> = facts.ranks.iter().map(kind).collect();
    format!("{}: {}", facts.modules, kinds.join(" "))
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0 => "-".to_owned(),
        1..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
