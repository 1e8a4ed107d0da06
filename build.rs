//! Compiles `kernels/*.cu` to fat binaries that the crate embeds, if an nvcc is found.
//!
//! | variable | meaning |
//! |---|---|
//! | `EVERMOE_CUDA` | `auto` (default): kernels if an nvcc is found; `off`: none; `require`: fail without one |
//! | `EVERMOE_CUDA_ARCHS` | comma-separated targets; default `sm_80,sm_90,sm_100,compute_90` |
//! | `NVCC`, `CUDA_HOME`, `CUDA_PATH` | location of nvcc; by default PATH, the Python environment, `/usr/local/cuda` |
//! | `EVERMOE_PTXAS` | assembler of CUDA 12.8, for drivers older than 580; by default from the Python environment;
//! empty: nvcc's own |

use std::collections::HashSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

const KERNEL_FILES: [&str; 7] = ["histogram", "plan", "rows", "fp8", "exchange", "replay", "copy"];
const DEFAULT_ARCHS: &str = "sm_80,sm_90,sm_100,compute_90";
/// Release of an assembler whose images are accepted by drivers from 525 on (sm_100: from 570 on), and of the PTX that
/// it reads.
const OLDER_RELEASE: &str = "12.8";
const OLDER_PTX: &str = "8.7";
const INPUTS: [&str; 9] = [
    "EVERMOE_CUDA",
    "EVERMOE_CUDA_ARCHS",
    "EVERMOE_PTXAS",
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
            let tools = Tools::find(nvcc);
            thread::scope(|scope| {
                for file in KERNEL_FILES {
                    scope.spawn(|| compile(&tools, file));
                }
            });
            println!("cargo:rustc-cfg=cuda_kernels");
            println!("cargo:rustc-env=EVERMOE_CUDA_RELEASE={}", tools.release);
        }
        None if mode == "require" => panic!("EVERMOE_CUDA=require, but there is no nvcc: {HOW_TO_GET_NVCC}"),
        None => println!("cargo:warning=no nvcc found, building without CUDA kernels: {HOW_TO_GET_NVCC}"),
    }
}

/// Finds the first nvcc that runs. One that was requested by name must run.
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

/// Compilers of pip's `nvidia-cuda-nvcc` in the candidate environments, newest first.
fn nvcc_of_python() -> Vec<PathBuf> {
    in_pythons("cu*/bin/nvcc")
}

/// Files of pip's nvidia wheels in the candidate environments.
fn in_pythons(pattern: &str) -> Vec<PathBuf> {
    const LIST: &str = "import glob, os, sys\nfor path in sys.path:\n    for found in sorted(glob.glob(os.path.join(path, \
                        'nvidia', sys.argv[1])), reverse=True):\n        print(found)";
    let mut pythons: Vec<PathBuf> = env::var_os("PYO3_PYTHON").map(PathBuf::from).into_iter().collect();
    pythons.extend(env::var_os("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python")));
    pythons.push(crate_root().join(".venv/bin/python"));
    pythons.push("python3".into());
    let mut found = Vec::new();
    for python in pythons {
        if let Ok(output) = Command::new(python).args(["-c", LIST, pattern]).output() {
            found.extend(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from));
        }
    }
    found
}

/// The programs that build the images.
struct Tools {
    nvcc: PathBuf,
    ptxas: PathBuf,
    /// Whether the assembler is older than nvcc, so that older drivers accept its images.
    is_older: bool,
    /// CUDA release of the assembler, as "12.8".
    release: String,
}

impl Tools {
    /// Finds an nvcc, with an assembler of CUDA 12.8 if there is one and nvcc is newer, or else its own.
    fn find(nvcc: PathBuf) -> Self {
        let named = env::var_os("EVERMOE_PTXAS").map(PathBuf::from);
        let older = match &named {
            Some(path) if path.as_os_str().is_empty() => None,
            Some(path) => {
                let found = release(path);
                assert!(found.is_some(), "EVERMOE_PTXAS={} does not run", path.display());
                Some(path.clone())
            }
            None => in_pythons("cuda_nvcc/bin/ptxas")
                .into_iter()
                .find(|path| release(path).as_deref() == Some(OLDER_RELEASE)),
        };
        let own = release(&nvcc).unwrap_or_default();
        let is_older = older.is_some() && own.split('.').next() != OLDER_RELEASE.split('.').next();
        let ptxas = older.filter(|_| is_older).unwrap_or_else(|| nvcc.with_file_name("ptxas"));
        Self { release: release(&ptxas).unwrap_or(own), nvcc, ptxas, is_older }
    }
}

/// CUDA release that a program reports; none if it does not run.
fn release(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (_, rest) = text.split_once("release ")?;
    rest.split(',').next().map(str::to_owned)
}

fn crate_root() -> PathBuf {
    env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default()
}

/// Compiles `kernels/<file>.cu` to `$OUT_DIR/<file>.fatbin`. Spills and warnings are errors.
fn compile(tools: &Tools, file: &str) {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let archs = env::var("EVERMOE_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.into());
    let (mut images, mut made) = (Vec::new(), HashSet::new());
    for arch in archs.split(',').map(str::trim) {
        let number = arch.trim_start_matches("sm_").trim_start_matches("compute_");
        let ptx = out_dir.join(format!("{file}.{number}.ptx"));
        if made.insert(number) {
            to_ptx(tools, file, number, &ptx);
        }
        let (kind, image) = match arch.strip_prefix("sm_") {
            None => ("ptx", ptx),
            Some(_) => {
                let image = out_dir.join(format!("{file}.{number}.cubin"));
                let mut ptxas = Command::new(&tools.ptxas);
                ptxas.args(["-O3", "-Werror", "--warn-on-spills", "--warn-on-local-memory-usage"]);
                run(ptxas.arg(format!("-arch={arch}")).arg("-o").arg(&image).arg(ptx));
                ("elf", image)
            }
        };
        images.push(format!("--image3=kind={kind},sm={number},file={}", image.display()));
    }
    // Older drivers cannot read the output of other modes.
    let mut fatbinary = Command::new(tools.nvcc.with_file_name("fatbinary"));
    fatbinary.args(["-64", "--compress-all", "--compress-mode=speed"]);
    run(fatbinary.arg(format!("--create={}", out_dir.join(format!("{file}.fatbin")).display())).args(images));
}

/// Compiles `kernels/<file>.cu` to PTX for an architecture's number.
fn to_ptx(tools: &Tools, file: &str, number: &str, ptx: &Path) {
    let mut nvcc = Command::new(&tools.nvcc);
    nvcc.args(["-ptx", "-O3", "-std=c++17", "-Werror=all-warnings"]).arg(format!("-arch=compute_{number}"));
    // pip's layout keeps the headers of the CUDA runtime next to the compiler's folder.
    let root = tools.nvcc.parent().and_then(Path::parent);
    if let Some(root) = root.filter(|root| root.join("include").is_dir()) {
        nvcc.arg("-I").arg(root.join("include"));
    }
    run(nvcc.arg("-o").arg(ptx).arg(format!("kernels/{file}.cu")));
    if tools.is_older {
        state_older_version(ptx);
    }
}

/// Sets the PTX version to one that ptxas of CUDA 12.8 accepts. A kernel that needs a newer one is then an error.
fn state_older_version(ptx: &Path) {
    let text = fs::read_to_string(ptx).unwrap_or_else(|error| panic!("{}: {error}", ptx.display()));
    let older = |line: &str| match line.strip_prefix(".version ") {
        Some(_) => format!(".version {OLDER_PTX}"),
        None => line.to_owned(),
    };
    let text: Vec<String> = text.lines().map(older).collect();
    fs::write(ptx, text.join("\n") + "\n").unwrap_or_else(|error| panic!("{}: {error}", ptx.display()));
}

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", Path::new(command.get_program()).display()));
    assert!(
        output.status.success(),
        "{command:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
