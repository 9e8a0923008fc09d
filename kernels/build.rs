//! Embeds an image of every kernel for every architecture. Without a compiler the crate builds all the same, and
//! asking for an image says what is missing.

#[path = "build/compiler.rs"]
mod compiler;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), String> {
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=LORAFLEET_NVCC");
    println!("cargo::rerun-if-env-changed=LORAFLEET_CACHE");
    if let Some(folder) = compiler::install_folder() {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut text = String::from("pub const IMAGES: &[(&str, Arch, &[u8])] = &[\n");
    let missing = match compiler::find() {
        Err(why) => why,
        Ok(found) => {
            for image in compiler::compile_all(&found, Path::new("cuda"), &out)? {
                let arch = image.arch.replace("sm_", "Sm");
                let copy = out.join(format!("{}-{}.cubin", image.module, image.arch));
                fs::copy(&image.cubin, &copy).map_err(|e| format!("cannot copy {}: {e}", image.cubin.display()))?;
                writeln!(text, "    ({:?}, Arch::{arch}, include_bytes!({copy:?})),", image.module)
                    .map_err(|e| e.to_string())?;
            }
            String::new()
        }
    };
    writeln!(text, "];\npub const MISSING: &str = {missing:?};").map_err(|e| e.to_string())?;
    fs::write(out.join("images.rs"), text).map_err(|e| format!("cannot write images.rs: {e}"))
}
