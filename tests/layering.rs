//! Imports point one way, and planners stay pure: read from the sources.

use std::fs;
use std::path::{Path, PathBuf};

const PLANNERS: [&str; 6] = ["dispatch", "placement", "recovery", "replay", "schedule", "selection"];

/// What a planner may not even mention: clocks, files, sockets, randomness, Python, CUDA, and the layers above.
const IMPURE: [&str; 17] = [
    "std::time",
    "std::fs",
    "std::net",
    "std::env",
    "std::thread",
    "std::process",
    "std::io",
    "rand::",
    "libc",
    "pyo3",
    "numpy",
    "cudarc",
    "memmap2",
    "crate::torch",
    "crate::cuda",
    "crate::python",
    "crate::snapshot",
];

/// Module, and the modules of the crate that it may import, as `src/lib.rs` says.
const LAYERS: [(&str, &[&str]); 11] = [
    ("error", &[]),
    ("dispatch", &["error"]),
    ("placement", &["error", "dispatch"]),
    ("recovery", &["error"]),
    ("schedule", &["error", "placement"]),
    ("selection", &["error", "placement", "schedule"]),
    ("cpu", &["error"]),
    ("replay", &["error", "cpu"]),
    ("snapshot", &["error", "dispatch", "placement", "recovery", "selection", "cpu"]),
    ("cuda", &["error", "dispatch", "placement", "recovery", "selection", "cpu"]),
    ("torch", &["error", "dispatch", "placement", "recovery", "selection", "cpu", "cuda"]),
];

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The sources of a module: `src/name.rs`, or all of `src/name/`.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.with_extension("rs").is_file() {
        return vec![path.with_extension("rs")];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// The lines of a source without comments.
fn code(path: &Path) -> Vec<(usize, String)> {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim().to_owned()));
    lines.filter(|(_, line)| !line.starts_with("//")).collect()
}

#[test]
fn planners_know_no_clock_no_randomness_no_device_no_python_and_no_files() {
    for planner in PLANNERS {
        for path in files(&src().join(planner)) {
            for (number, line) in code(&path) {
                let word = IMPURE.iter().find(|word| line.contains(*word));
                assert!(word.is_none(), "{}:{number}: a planner uses {word:?}: {line}", path.display());
            }
        }
    }
}

/// Names that follow `crate::` in a line; macros and the crate's root are no modules.
fn imported(line: &str) -> Vec<&str> {
    let names = line.split("crate::").skip(1);
    names.filter_map(|rest| rest.split(|next: char| !next.is_alphanumeric() && next != '_').next()).collect()
}

#[test]
fn modules_import_one_way() {
    let modules: Vec<&str> = LAYERS.iter().map(|(module, _)| *module).chain(["python"]).collect();
    for (module, allowed) in LAYERS {
        for path in files(&src().join(module)) {
            for (number, line) in code(&path) {
                for name in imported(&line).into_iter().filter(|name| modules.contains(name)) {
                    let fine = name == module || allowed.contains(&name);
                    assert!(fine, "{}:{number}: {module} may not import {name}: {line}", path.display());
                }
            }
        }
    }
}

#[test]
fn every_module_has_a_layer() {
    for entry in fs::read_dir(src()).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let known =
            LAYERS.iter().any(|(name, _)| *name == module) || ["lib", "python"].contains(&module.as_str());
        assert!(known, "src/{module} is in no layer: add it to LAYERS and to src/lib.rs");
    }
}
