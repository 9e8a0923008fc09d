//! `cargo xtask measure`: what the parts take and how fast they are, from the built programs on a machine that does nothing else.
use std::fmt::Write;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::progress::{print, say};
use crate::{images, repository, tools};

mod engine;
mod pods;
mod fleet;
mod adapter;
mod process;

/// What to do with the figures, and which to leave out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Put the table into docs/BENCHMARKS.md.
    pub write: bool,
    /// Nothing that needs a cluster.
    pub fast: bool,
    /// A pool with so many adapters, and nothing else.
    pub fleet: Option<u32>,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Figure {
    what: String,
    /// Measured, each in `unit`; their median is the figure.
    values: Vec<f64>,
    unit: &'static str,
    /// The median must be below it.
    goal: Option<f64>,
}

impl Figure {
    fn new(what: impl Into<String>, unit: &'static str, goal: Option<f64>, values: Vec<f64>) -> Self {
        Self { what: what.into(), values, unit, goal }
    }

    fn line(&self) -> String {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let median = median(&sorted);
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let range = match sorted.as_slice() {
            [first, .., last] => format!("{} to {} in {}", short(*first), short(*last), sorted.len()),
            _ => "one".to_owned(),
        };
        let goal = match self.goal {
            None => String::new(),
            Some(goal) if median < goal => format!("below {}{unit}", short(goal)),
            Some(goal) => format!("below {}{unit}: **missed**", short(goal)),
        };
        format!("| {} | **{}{unit}** | {range} | {goal} |", self.what, short(median))
    }
}

/// Of sorted values; of an even number the mean of the middle two; 0 of none.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match (sorted.get(middle.saturating_sub(1)), sorted.get(middle)) {
        (Some(below), Some(above)) if sorted.len().is_multiple_of(2) => f64::midpoint(*below, *above),
        (_, Some(value)) => *value,
        _ => 0.0,
    }
}

/// Three digits that matter.
fn short(value: f64) -> String {
    let decimals = match value.abs() {
        value if value >= 99.5 => 0,
        value if value >= 9.95 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

/// Measures, prints the table, and writes it where that was asked.
///
/// # Errors
/// When a program cannot be built or started, or does not answer as it must.
pub fn run(cache: &Cache, options: Options) -> Result<()> {
    images::programs()?;
    let (model, store) = (tools::model(cache)?, tools::s3_server(cache)?);
    let before = machine();
    say(&before);
    let scratch = Scratch::new(cache)?;
    let (command, figures) = if let Some(adapters) = options.fleet {
        ("measure --fleet", fleet::figures(cache, &scratch.folder, adapters)?)
    } else {
        let mut figures = engine::figures(&scratch.folder, &model, &store)?;
        if !options.fast {
            figures.extend(pods::figures(cache)?);
        }
        ("measure", figures)
    };
    let table = table(&before, &figures);
    print(&format!("\n{table}\n"));
    if options.write {
        write(&repository().join("docs/BENCHMARKS.md"), command, &table)?;
    }
    Ok(())
}

fn table(machine: &str, figures: &[Figure]) -> String {
    let mut text = format!("{machine}\n\n| | median | from, to | goal |\n|---|---|---|---|\n");
    for figure in figures {
        let _ = writeln!(text, "{}", figure.line());
    }
    text
}

fn write(path: &Path, command: &str, table: &str) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let text = replaced(&text, command, table);
    let text = text.with_context(|| format!("{} has no place for {command}", path.display()))?;
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// The document with another table between the two lines that name the command.
fn replaced(text: &str, command: &str, table: &str) -> Option<String> {
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- {edge}: written by cargo xtask {command} -->\n"));
    let (head, rest) = text.split_once(&begin)?;
    let (_, tail) = rest.split_once(&end)?;
    Some(format!("{head}{begin}{table}{end}{tail}"))
}

/// Processor, memory, kernel, build and how busy the machine is, in one sentence.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let processor = read("/proc/cpuinfo");
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let vectors =
        ["avx512f", "avx2"].into_iter().find(|&word| field(&processor, "flags").split(' ').any(|it| it == word));
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let memory: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or("?").to_owned();
    format!(
        "{}, {cores} cores, {}, {} GiB, Linux {}; the programs as the tests and the demo build them (opt-level 1, the engine's \
         arithmetic 3); load of the machine before: {load}.",
        field(&processor, "model name"),
        vectors.unwrap_or("no AVX2"),
        memory >> 20,
        read("/proc/sys/kernel/osrelease").trim(),
    )
}

/// A folder that goes when the run is over; what a killed run leaves goes by [`clear`].
struct Scratch {
    folder: PathBuf,
    /// One run at a time: they would measure each other, too.
    _alone: File,
}

const SCRATCH: &str = "measure";

impl Scratch {
    fn new(cache: &Cache) -> Result<Self> {
        let alone = cache.alone(SCRATCH)?;
        let folder = cache.root().join(SCRATCH);
        remove(&folder)?;
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        Ok(Self { folder, _alone: alone })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The next run clears it.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("clear {}", folder.display()))?;
    }
    Ok(())
}

/// Removes the folder of a run that was killed.
///
/// # Errors
/// When it cannot be removed.
pub fn clear(cache: &Cache) -> Result<()> {
    // Who is at work holds the lock, and clears up by itself.
    let Some(_alone) = cache.free(SCRATCH)? else { return Ok(()) };
    remove(&cache.root().join(SCRATCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_median_range_and_goal() {
        let line = |goal, values: &[f64]| Figure::new("start", "s", goal, values.to_vec()).line();
        assert_eq!(line(Some(3.0), &[2.0, 1.0, 4.0]), "| start | **2.00 s** | 1.00 to 4.00 in 3 | below 3.00 s |");
        assert_eq!(
            line(Some(2.0), &[250.4, 100.0]),
            "| start | **175 s** | 100 to 250 in 2 | below 2.00 s: **missed** |"
        );
        assert_eq!(line(None, &[12.34]), "| start | **12.3 s** | one |  |");
    }

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let text = |table: &str| {
            let edge = |word: &str| format!("<!-- {word}: written by cargo xtask it -->\n");
            format!("a\n{}{table}{}b\n", edge("begin"), edge("end"))
        };
        assert_eq!(replaced(&text("old\n"), "it", "new\n").unwrap(), text("new\n"));
        assert!(replaced(&text("old\n"), "it --more", "new\n").is_none());
    }
}
