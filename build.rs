//! Compiles `kernels/*.cu` to fat binaries that the crate embeds, when an nvcc can be found.
//!
//! | variable | meaning |
//! |---|---|
//! | `EVERMOE_CUDA` | `auto` (default): kernels if there is an nvcc; `off`: none; `require`: fail without one |
//! | `EVERMOE_CUDA_ARCHS` | comma-separated targets; default `sm_80,sm_90,compute_90` |
//! | `NVCC`, `CUDA_HOME`, `CUDA_PATH` | where nvcc is; else PATH, the Python environment, `/usr/local/cuda` |

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const KERNEL_FILES: [&str; 5] = ["histogram", "dispatch", "exchange", "replay", "copy"];
const DEFAULT_ARCHS: &str = "sm_80,sm_90,compute_90";
const INPUTS: [&str; 8] = [
    "EVERMOE_CUDA",
    "EVERMOE_CUDA_ARCHS",
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
    "PYO3_PYTHON",
    "VIRTUAL_ENV",
];
const HOW_TO_GET_NVCC: &str =
    "set NVCC or CUDA_HOME, or pip install nvidia-cuda-{nvcc,crt,runtime,cccl}==13.0.* nvidia-nvvm==13.0.*";

fn main() {
    for variable in INPUTS {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rustc-check-cfg=cfg(cuda_kernels)");
    let mode = env::var("EVERMOE_CUDA").unwrap_or_else(|_| "auto".into());
    assert!(
        ["auto", "off", "require"].contains(&&*mode),
        "EVERMOE_CUDA={mode}: expected auto, off or require"
    );
    if mode == "off" || env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    match find_nvcc() {
        Some(nvcc) => {
            for file in KERNEL_FILES {
                compile(&nvcc, file);
            }
            println!("cargo:rustc-cfg=cuda_kernels");
        }
        None if mode == "require" => panic!("EVERMOE_CUDA=require, but there is no nvcc: {HOW_TO_GET_NVCC}"),
        None => println!("cargo:warning=no nvcc found, building without CUDA kernels: {HOW_TO_GET_NVCC}"),
    }
}

/// The first nvcc that runs. One that was asked for by name must.
fn find_nvcc() -> Option<PathBuf> {
    if let Some(named) = env::var_os("NVCC") {
        let named = PathBuf::from(named);
        assert!(runs(&named), "NVCC={} does not run", named.display());
        return Some(named);
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let mut places: Vec<PathBuf> = homes.map(|home| Path::new(&home).join("bin/nvcc")).collect();
    places.push("nvcc".into());
    places.into_iter().find(|nvcc| runs(nvcc)).or_else(|| {
        let mut places = nvcc_of_python();
        places.push("/usr/local/cuda/bin/nvcc".into());
        places.into_iter().find(|nvcc| runs(nvcc))
    })
}

fn runs(nvcc: &Path) -> bool {
    Command::new(nvcc).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// The compilers of pip's `nvidia-cuda-nvcc` in the environments that may be meant, newest first.
fn nvcc_of_python() -> Vec<PathBuf> {
    const LIST: &str = "import glob, os, sys\nfor path in sys.path:\n    for nvcc in sorted(glob.glob(os.path.join(path, \
                        'nvidia', 'cu*', 'bin', 'nvcc')), reverse=True):\n        print(nvcc)";
    let mut pythons: Vec<PathBuf> = env::var_os("PYO3_PYTHON").map(PathBuf::from).into_iter().collect();
    pythons.extend(env::var_os("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python")));
    pythons.push(crate_root().join(".venv/bin/python"));
    pythons.push("python3".into());
    let mut found = Vec::new();
    for python in pythons {
        if let Ok(output) = Command::new(python).args(["-c", LIST]).output() {
            found.extend(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from));
        }
    }
    found
}

fn crate_root() -> PathBuf {
    env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default()
}

/// Compiles `kernels/<file>.cu` to `$OUT_DIR/<file>.fatbin`. Spills and warnings are errors.
fn compile(nvcc: &Path, file: &str) {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let archs = env::var("EVERMOE_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.into());
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "--compress-mode=size", "-Werror=all-warnings"]);
    command.args(["-Xptxas", "-Werror,--warn-on-spills,--warn-on-local-memory-usage"]);
    for arch in archs.split(',').map(str::trim) {
        let number = arch.trim_start_matches("sm_").trim_start_matches("compute_");
        command.arg(format!("-gencode=arch=compute_{number},code={arch}"));
    }
    // pip's layout keeps the headers of the CUDA runtime beside the compiler.
    if let Some(root) = nvcc.parent().and_then(Path::parent).filter(|root| root.join("include").is_dir()) {
        command.arg("-I").arg(root.join("include"));
    }
    command.arg("-o").arg(out_dir.join(format!("{file}.fatbin"))).arg(format!("kernels/{file}.cu"));
    let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
    assert!(
        output.status.success(),
        "{command:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
