//! Finds nvcc and makes images with it. Shared by the build script and `examples/compile.rs`.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, io, thread};

/// The compiler of the tool cache: its driver is the oldest of CUDA 13, so its images run on every driver of 13.
#[allow(dead_code)] // The build script installs nothing.
pub const PACKAGES: [&str; 4] =
    ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-runtime==13.0.96"];
const FOLDER: &str = "cuda-13.0.88";

pub const ARCHES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// `${LORAFLEET_CACHE:-~/.cache/lorafleet}`.
pub fn cache() -> Option<PathBuf> {
    match env::var_os("LORAFLEET_CACHE") {
        Some(folder) => Some(folder.into()),
        None => Some(PathBuf::from(env::var_os("HOME")?).join(".cache/lorafleet")),
    }
}

#[allow(dead_code)]
pub fn install_folder() -> Option<PathBuf> {
    Some(cache()?.join(FOLDER))
}

/// An nvcc that answered, and what it said of its version.
pub struct Compiler {
    pub path: PathBuf,
    pub version: String,
}

/// `LORAFLEET_NVCC`, then the tool cache, then the path.
pub fn find() -> Result<Compiler, String> {
    let mut tried = Vec::new();
    let asked = env::var_os("LORAFLEET_NVCC").map(PathBuf::from);
    let cached = cache().map(|cache| cache.join(FOLDER).join("nvidia/cu13/bin/nvcc"));
    for path in [asked, cached, Some("nvcc".into())].into_iter().flatten() {
        match Command::new(&path).arg("--version").output() {
            Ok(out) if out.status.success() => {
                return Ok(Compiler { path, version: String::from_utf8_lossy(&out.stdout).into_owned() });
            }
            Ok(out) => tried.push(format!("{} ({})", path.display(), out.status)),
            Err(e) => tried.push(format!("{} ({e})", path.display())),
        }
    }
    Err(format!("no CUDA compiler when this was built; tried {}", tried.join(", ")))
}

/// One image: where it lies, and what ptxas said of its kernels.
#[allow(dead_code)] // The build script reads the image, the table the report.
pub struct Image {
    pub module: String,
    pub arch: &'static str,
    pub cubin: PathBuf,
    pub report: String,
}

/// Compiles every `*.cu` of `sources` for every architecture, as many at a time as there are cores. What was compiled
/// before from the same text by the same compiler comes from the cache.
pub fn compile_all(compiler: &Compiler, sources: &Path, fallback: &Path) -> Result<Vec<Image>, String> {
    let images = cache().map_or(fallback.to_path_buf(), |cache| cache.join("cuda-images"));
    let images = if fs::create_dir_all(&images).is_ok() { images } else { fallback.to_path_buf() };
    let texts = read_sources(sources).map_err(|e| format!("cannot read {}: {e}", sources.display()))?;
    let headers: Vec<&(String, String)> = texts.iter().filter(|(name, _)| name.ends_with(".cuh")).collect();
    let mut jobs = Vec::new();
    for (name, text) in texts.iter().filter(|(name, _)| name.ends_with(".cu")) {
        // A file that names an architecture is for that one alone.
        let only = ARCHES.iter().find(|arch| name.ends_with(&format!("_{}.cu", arch.replace('_', ""))));
        for arch in ARCHES.into_iter().filter(|arch| only.is_none_or(|only| only == arch)) {
            let mut hasher = DefaultHasher::new();
            (&headers, name, text, arch, &compiler.version).hash(&mut hasher);
            jobs.push((name.trim_end_matches(".cu").to_owned(), arch, format!("{:016x}", hasher.finish())));
        }
    }
    let (queue, done) = (Mutex::new(jobs), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let Some((module, arch, key)) = queue.lock().ok().and_then(|mut jobs| jobs.pop()) else { return };
                    let image = compile(compiler, sources, &images, &module, arch, &key);
                    if let Ok(mut done) = done.lock() {
                        done.insert((module, arch), image);
                    }
                }
            });
        }
    });
    done.into_inner().map_err(|e| e.to_string())?.into_values().collect()
}

fn read_sources(folder: &Path) -> io::Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        texts.push((entry.file_name().to_string_lossy().into_owned(), fs::read_to_string(entry.path())?));
    }
    texts.sort();
    Ok(texts)
}

fn compile(
    compiler: &Compiler,
    sources: &Path,
    images: &Path,
    module: &str,
    arch: &'static str,
    key: &str,
) -> Result<Image, String> {
    let cubin = images.join(format!("{module}-{arch}-{key}.cubin"));
    let notes = cubin.with_extension("txt");
    if let (true, Ok(report)) = (cubin.exists(), fs::read_to_string(&notes)) {
        return Ok(Image { module: module.to_owned(), arch, cubin, report });
    }
    let number = arch.trim_start_matches("sm_");
    // Under a name of its own until it is whole: two builds may make the same image at one time.
    let partial = images.join(format!("{module}-{arch}-{key}-{}.partial", std::process::id()));
    let out = Command::new(&compiler.path)
        .args(["-cubin", "-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings"])
        .arg(format!("-gencode=arch=compute_{number},code={arch}"))
        .arg("-o")
        .arg(&partial)
        .arg(sources.join(format!("{module}.cu")))
        .output()
        .map_err(|e| format!("cannot run {}: {e}", compiler.path.display()))?;
    let report = String::from_utf8_lossy(&out.stderr).into_owned();
    if !out.status.success() {
        return Err(format!("{module}.cu does not compile for {arch}:\n{report}"));
    }
    let write = || -> io::Result<()> {
        fs::write(&notes, &report)?;
        fs::rename(&partial, &cubin)
    };
    write().map_err(|e| format!("cannot keep {}: {e}", cubin.display()))?;
    Ok(Image { module: module.to_owned(), arch, cubin, report })
}
