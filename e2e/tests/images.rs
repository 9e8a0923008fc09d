//! The Dockerfiles, which nothing here can build, and the images that the harness makes without them are the same: program, user
//! and how it starts; and what a Dockerfile names is there.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use lorafleet_e2e::cache::Cache;
use lorafleet_e2e::shell::Shell;
use lorafleet_e2e::{images, repository};
use serde_json::Value;

/// What each instruction may be: nobody reads a Dockerfile with others without thinking of this test.
const INSTRUCTIONS: [&str; 6] = ["FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"];

/// Shared libraries of `distroless/cc-debian12`: those of Debian's libc6, libgcc-s1, libstdc++6, libgomp1 and openssl.
const LIBRARIES: [&str; 8] = [
    "ld-linux-",
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libgomp.so.1",
    "libssl.so.3",
    "libdl.so.2",
];

/// Instructions of a Dockerfile, each as its name and the rest; lines that go on are joined.
fn instructions(text: &str) -> Vec<(String, String)> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap_or_else(|| panic!("`{line}` is no instruction"));
            (name.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" "))
        })
        .collect()
}

/// What a Dockerfile leaves: user, the words that it starts with, and the file copied out of the build.
struct Made {
    user: String,
    entrypoint: Value,
    program: String,
}

/// Reads the Dockerfile of one program, and checks that its build makes what its image takes.
fn dockerfile(name: &str) -> Made {
    let text = std::fs::read_to_string(repository().join(name).join("Dockerfile")).unwrap();
    let found = instructions(&text);
    let unknown: Vec<_> = found.iter().filter(|(word, _)| !INSTRUCTIONS.contains(&word.as_str())).collect();
    assert!(unknown.is_empty(), "{name}: {unknown:?}");
    let all = |word: &str| {
        let rests = found.iter().filter(|(it, _)| it == word).map(|(_, rest)| rest.clone());
        rests.collect::<Vec<String>>()
    };
    // Built on the Debian on which it runs.
    let [build, run] = all("FROM").try_into().unwrap();
    assert!(build.ends_with("-bookworm AS build") && run.contains("-debian12:"), "{name}: {build}, {run}");

    let program = format!("lorafleet-{name}");
    let [command] = all("RUN").try_into().unwrap();
    let cargo = format!("cargo build --locked --release --package {program} && ");
    let install = format!("install -D target/release/{program} /out/{program}");
    assert!(command.ends_with(&format!("{cargo}{install}")), "{name}: {command}");
    let [context, copied] = all("COPY").try_into().unwrap();
    assert_eq!(context, ". .", "{name}");
    let words: Vec<&str> = copied.split(' ').collect();
    let ["--from=build", from, to] = words[..] else { panic!("{name}: COPY {copied}") };
    assert_eq!(from, format!("/out/{program}"), "{name}");
    let ([user], [entrypoint]) = (all("USER").try_into().unwrap(), all("ENTRYPOINT").try_into().unwrap());
    Made { user, entrypoint: serde_json::from_str(&entrypoint).unwrap(), program: to.to_owned() }
}

/// Files of a tar archive, each with its mode.
fn files(bytes: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (path, (entry.header().mode().unwrap(), bytes))
    });
    entries.collect()
}

/// Configuration and files of an image.
fn image(archive: &Path) -> (Value, BTreeMap<String, (u32, Vec<u8>)>) {
    let files_of_archive = files(&std::fs::read(archive).unwrap());
    let blob = |digest: &Value| {
        let path = format!("blobs/{}", digest.as_str().unwrap().replace(':', "/"));
        &files_of_archive.get(&path).unwrap_or_else(|| panic!("no {path} in {}", archive.display())).1
    };
    let index: Value = serde_json::from_slice(&files_of_archive["index.json"].1).unwrap();
    let manifest: Value = serde_json::from_slice(blob(&index["manifests"][0]["digest"])).unwrap();
    let config: Value = serde_json::from_slice(blob(&manifest["config"]["digest"])).unwrap();
    (config["config"].clone(), files(blob(&manifest["layers"][0]["digest"])))
}

#[test]
#[ignore = "builds the programs: cargo xtask test"]
fn images_are_what_the_dockerfiles_say() {
    let made = images::make(&Cache::open().unwrap()).unwrap();
    let metadata =
        Shell::new("cargo").args(["metadata", "--no-deps", "--offline", "--locked", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&metadata.folder(&repository()).output().unwrap()).unwrap();
    for name in ["operator", "gateway", "engine"] {
        let wanted = dockerfile(name);
        let program = format!("lorafleet-{name}");
        let package =
            metadata["packages"].as_array().unwrap().iter().find(|package| package["name"] == program).unwrap();
        let is_program = |target: &Value| target["name"] == program && target["kind"][0] == "bin";
        assert!(package["targets"].as_array().unwrap().iter().any(is_program), "no program {program} in the workspace");

        let archive = made.archives.iter().find(|archive| archive.image == name).unwrap();
        let (config, files) = image(&archive.path);
        assert_eq!((&config["Entrypoint"], &config["User"]), (&wanted.entrypoint, &Value::from(wanted.user)), "{name}");
        let (mode, bytes) = &files[wanted.program.trim_start_matches('/')];
        assert!(*mode == 0o755 && bytes.starts_with(b"\x7fELF"), "{name}: {mode:o}");
        assert_eq!(wanted.entrypoint[0], wanted.program, "{name}");
        let libraries = files.keys().filter(|path| path.contains(".so"));
        let file_name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let missing: Vec<String> = libraries
            .map(|path| file_name(path))
            .filter(|library| !LIBRARIES.iter().any(|known| library.starts_with(known)))
            .collect();
        assert!(missing.is_empty(), "{name}/Dockerfile: its last stage has no {missing:?}");
    }
}

/// A file that is left out of the build's context is missed by nobody but who builds there.
#[test]
fn the_context_holds_all_that_is_tracked() {
    let ignored = std::fs::read_to_string(repository().join(".dockerignore")).unwrap();
    let rules: Vec<&str> = ignored.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let tracked = Shell::new("git").args(["ls-files"]).folder(&repository()).output().unwrap();
    let left_out: Vec<&str> = tracked
        .lines()
        .filter(|path| {
            rules.iter().any(|rule| match (rule.strip_prefix('/'), rule.strip_prefix("**/*")) {
                (Some(folder), _) => path.starts_with(&format!("{folder}/")) || *path == folder,
                (None, Some(end)) => path.ends_with(end),
                (None, None) => panic!(".dockerignore: this test does not know rules like `{rule}`"),
            })
        })
        .collect();
    assert!(left_out.is_empty() && tracked.lines().count() > 100, "left out of the context: {left_out:?}");
}
