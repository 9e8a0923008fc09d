//! Compiles every kernel and holds registers, spills and shared memory against `resources.txt`. Needs no GPU.
//!
//! `--install` first puts the compiler into the tool cache (from PyPI); `--bless` writes the table anew.

#[path = "../build/compiler.rs"]
mod compiler;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::{env, fs};

type Row = [u32; 4];
const HEADERS: [&str; 4] = ["registers", "spilled", "stack", "shared"];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let Some(unknown) = arguments.iter().find(|a| !["--install", "--bless"].contains(&a.as_str())) {
        return Err(format!("unknown argument {unknown}; there are --install and --bless"));
    }
    if arguments.iter().any(|a| a == "--install") {
        install()?;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let images = compiler::compile_all(&compiler::find()?, &folder.join("cuda"), &env::temp_dir())?;
    let mut table = BTreeMap::new();
    for image in &images {
        table
            .extend(read_report(&image.report).into_iter().map(|(kernel, row)| ((kernel, image.arch.to_owned()), row)));
    }
    print!("{}", print(&table));
    let committed = folder.join("resources.txt");
    if arguments.iter().any(|a| a == "--bless") {
        return fs::write(&committed, print(&table)).map_err(|e| format!("cannot write {}: {e}", committed.display()));
    }
    let text = fs::read_to_string(&committed).map_err(|e| format!("cannot read {}: {e}", committed.display()))?;
    let worse = compare(&parse(&text)?, &table);
    if worse.is_empty() { Ok(()) } else { Err(format!("{}\n(--bless accepts)", worse.join("\n"))) }
}

fn install() -> Result<(), String> {
    let target = compiler::install_folder().ok_or("neither LORAFLEET_CACHE nor HOME is set")?;
    if target.join("nvidia/cu13/bin/nvcc").exists() {
        return Ok(());
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"];
    let mut command = Command::new("python3");
    command.args(pip).arg(&target).args(compiler::PACKAGES);
    let status = command.status().map_err(|e| format!("cannot run python3: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("pip could not install the compiler: {status}")) }
}

/// What `ptxas -v` says of each kernel.
fn read_report(report: &str) -> Vec<(String, Row)> {
    let mut rows: Vec<(String, Row)> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            rows.push((rest.split('\'').next().unwrap_or_default().to_owned(), Row::default()));
        }
        let Some((_, row)) = rows.last_mut() else { continue };
        for (label, column) in
            [("registers", 0), ("bytes spill stores", 1), ("bytes stack frame", 2), ("bytes smem", 3)]
        {
            if let Some(n) = number_before(line, label) {
                row[column] = n;
            }
        }
    }
    rows
}

fn number_before(line: &str, label: &str) -> Option<u32> {
    line[..line.find(label)?].split_whitespace().last()?.parse().ok()
}

fn print(table: &BTreeMap<(String, String), Row>) -> String {
    let mut out = format!("{:32} {:8}", "kernel", "arch");
    HEADERS.iter().for_each(|h| out += &format!(" {h:>9}"));
    out.push('\n');
    for ((kernel, arch), row) in table {
        let _ = write!(out, "{kernel:32} {arch:8}");
        row.iter().for_each(|n| out += &format!(" {n:>9}"));
        out.push('\n');
    }
    out
}

fn parse(text: &str) -> Result<BTreeMap<(String, String), Row>, String> {
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let key = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut row = Row::default();
        for n in &mut row {
            *n = words.next()?.parse().ok()?;
        }
        Some((key, row))
    };
    text.lines().skip(1).map(|line| row(line).ok_or_else(|| format!("resources.txt: cannot read {line:?}"))).collect()
}

fn compare(committed: &BTreeMap<(String, String), Row>, found: &BTreeMap<(String, String), Row>) -> Vec<String> {
    let mut worse = Vec::new();
    for ((kernel, arch), row) in found {
        match committed.get(&(kernel.clone(), arch.clone())) {
            None => worse.push(format!("{kernel} {arch} is not in resources.txt")),
            Some(old) => {
                for ((name, new), old) in HEADERS.iter().zip(row).zip(old).filter(|((_, new), old)| new > old) {
                    worse.push(format!("{kernel} {arch}: {name} {new}, committed {old}"));
                }
            }
        }
    }
    let gone = committed.keys().filter(|key| !found.contains_key(*key));
    worse.extend(gone.map(|(kernel, arch)| format!("{kernel} {arch} is in resources.txt, but not compiled")));
    worse
}
