//! Imports point one way, planners stay pure, and no file is long: read from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const PLANNERS: [&str; 12] = [
    "dispatch",
    "engine",
    "placement",
    "protection",
    "protocol",
    "random",
    "recovery",
    "replay",
    "schedule",
    "secret",
    "selection",
    "simulate",
];

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
const LAYERS: [(&str, &[&str]); 25] = [
    ("error", &[]),
    ("background", &[]),
    ("numa", &[]),
    ("random", &[]),
    ("secret", &["error"]),
    ("dispatch", &["error"]),
    ("placement", &["error", "dispatch", "random"]),
    ("protocol", &["error", "secret"]),
    ("reachability", &["error", "secret"]),
    ("mesh", &["error", "reachability"]),
    ("transport", &["error", "reachability", "secret"]),
    ("recovery", &["error", "protocol"]),
    ("schedule", &["error", "placement"]),
    ("protection", &["error", "dispatch", "placement", "recovery", "schedule"]),
    ("selection", &["error"]),
    (
        "engine",
        &["error", "dispatch", "placement", "protocol", "recovery", "schedule", "protection", "selection"],
    ),
    (
        "simulate",
        &[
            "error",
            "random",
            "dispatch",
            "placement",
            "protocol",
            "recovery",
            "protection",
            "schedule",
            "selection",
            "engine",
        ],
    ),
    ("cpu", &["error"]),
    ("replay", &["error", "cpu"]),
    ("snapshot", &["error", "background", "cpu"]),
    ("durable", &["error", "background", "snapshot"]),
    ("store", &["error"]),
    ("cuda", &["error", "numa", "cpu"]),
    ("nccl", &["error", "cuda"]),
    ("torch", &["error", "dispatch", "cpu", "cuda"]),
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
    for (place, (module, allowed)) in LAYERS.iter().enumerate() {
        for name in *allowed {
            let below = LAYERS[..place].iter().any(|(other, _)| other == name);
            assert!(below, "{module} may import {name}, which is not above it in LAYERS");
        }
    }
}

/// The paths of a use tree are added to `found`: `a::{b, c::d}` has `a::b` and `a::c::d`. Returns the text after it.
fn read_tree<'a>(mut text: &'a str, before: &[&'a str], found: &mut Vec<Vec<&'a str>>) -> &'a str {
    let mut path = before.to_vec();
    loop {
        if let Some(mut rest) = text.strip_prefix('{') {
            loop {
                rest = rest.trim_start_matches([' ', ',']);
                if let Some(after) = rest.strip_prefix('}') {
                    return after;
                }
                rest = read_tree(rest, &path, found);
            }
        }
        let end = text.find(|next: char| !next.is_alphanumeric() && next != '_').unwrap_or(text.len());
        // A glob, or a generic argument: one character that names nothing.
        let end = if end == 0 { text.chars().next().map_or(0, char::len_utf8) } else { end };
        path.push(&text[..end]);
        match text[end..].strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                found.push(path);
                return &text[end..];
            }
        }
    }
}

/// Paths of the crate that a text names, from the crate's root; `module` is the text's own.
fn crate_paths(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (start, _) in text.match_indices("super::").chain(text.match_indices("crate::")) {
        let inner = text[..start].ends_with(|before: char| before.is_alphanumeric() || "_:".contains(before));
        let mut paths = Vec::new();
        if !inner {
            read_tree(&text[start..], &[], &mut paths);
        }
        for path in paths {
            let up = path.iter().take_while(|name| **name == "super").count();
            let from = if path[0] == "crate" { &[] } else { &module[..module.len() - up] };
            let rest = path[up.max(usize::from(path[0] == "crate"))..].iter();
            found.push(from.iter().cloned().chain(rest.map(|name| (*name).to_owned())).collect());
        }
    }
    found
}

/// The module of a file, from the crate's root.
fn module_of(path: &Path) -> Vec<String> {
    let path = path.strip_prefix(src()).unwrap().with_extension("");
    let names = path.iter().map(|name| name.to_str().unwrap().to_owned());
    names.filter(|name| name != "mod" && name != "lib").collect()
}

/// A source without comments and unit tests, on one line.
fn text(path: &Path) -> String {
    let lines: Vec<String> = code(path).into_iter().map(|(_, line)| line).collect();
    let all = lines.join(" ");
    all.split("#[cfg(test)] mod ").next().unwrap_or_default().to_owned()
}

/// Names that a folder's `mod.rs` takes out of its files, with the file.
fn reexports(folder: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    if folder.join("mod.rs").is_file() {
        let text = text(&folder.join("mod.rs"));
        for tree in text.split("use ").skip(1) {
            let mut paths = Vec::new();
            read_tree(tree, &[], &mut paths);
            let inside = paths.iter().filter(|path| path.len() > 1);
            found.extend(inside.map(|path| (path[path.len() - 1].to_owned(), path[0].to_owned())));
        }
    }
    found
}

/// Which of a folder's files and folders uses which other ones; `mod.rs`, which joins them, is left out.
fn edges(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let place = module_of(folder);
    let reexports = reexports(folder);
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let inside: Vec<PathBuf> =
        files(folder).into_iter().filter(|path| module_of(path).len() > place.len()).collect();
    let children: BTreeSet<String> = inside.iter().map(|path| module_of(path)[place.len()].clone()).collect();
    for path in inside {
        let module = module_of(&path);
        let child = &module[place.len()];
        for used in crate_paths(&text(&path), &module) {
            let Some(name) = used.strip_prefix(&place[..]).and_then(|rest| rest.first()) else { continue };
            let used = children.get(name).or_else(|| reexports.get(name).and_then(|file| children.get(file)));
            if let Some(used) = used.filter(|used| *used != child) {
                edges.entry(child.clone()).or_default().insert(used.clone());
            }
        }
    }
    edges
}

/// What is left of the edges when files are taken away that use none of those that are left.
fn circles(mut edges: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let left: BTreeSet<String> = edges.keys().cloned().collect();
        edges.values_mut().for_each(|used| used.retain(|name| left.contains(name)));
        edges.retain(|_, used| !used.is_empty());
        if edges.len() == left.len() {
            return edges;
        }
    }
}

#[test]
fn files_of_a_folder_use_each_other_one_way() {
    let mut folders = vec![];
    let mut next = vec![src()];
    while let Some(folder) = next.pop() {
        let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        next.extend(entries.filter(|path| path.is_dir()));
        folders.push(folder);
    }
    let mut seen = 0;
    for folder in folders {
        let edges = edges(&folder);
        seen += edges.values().map(BTreeSet::len).sum::<usize>();
        let circles = circles(edges);
        assert!(circles.is_empty(), "{}: files use each other in a circle: {circles:?}", folder.display());
    }
    assert!(seen > 100, "only {seen} uses were found");
}

#[test]
fn circles_are_found() {
    let edge = |from: &str, to: &[&str]| (from.to_owned(), to.iter().map(|&to| to.to_owned()).collect());
    assert!(circles([edge("a", &["b", "c"]), edge("b", &["c"])].into()).is_empty());
    let found = circles([edge("a", &["b"]), edge("b", &["c", "d"]), edge("c", &["a"])].into());
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    let module = ["placement".to_owned(), "choose".to_owned()];
    let text =
        "use super::{cells::{build, cells as found}, place::*}; x(crate::cpu::Serial); super::super::error";
    let paths: Vec<String> = crate_paths(text, &module).iter().map(|path| path.join("::")).collect();
    let expected = ["placement::cells::build", "placement::cells::cells", "placement::place::*", "error"];
    assert!(expected.iter().all(|path| paths.contains(&(*path).to_owned())), "{paths:?}");
    assert!(paths.contains(&"cpu::Serial".to_owned()), "{paths:?}");
}

#[test]
fn no_source_is_longer_than_500_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for path in [files(&src()), files(&root.join("tests")), files(&root.join("build.rs"))].concat() {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(
            lines <= 500,
            "{} has {lines} lines; expected 500 or fewer: split it by topic",
            path.display()
        );
    }
}
