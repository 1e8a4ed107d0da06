"""Plants mistakes in the engine and the planners, one at a time, and lists those that no test notices.

cargo-mutants compiles the crate and its tests for each mistake, which takes a minute. So each folder of planners is
made a crate of its own here, with its tests; the modules that it uses are another crate, which is compiled once. That
leaves a few seconds for each mistake.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "target/tools/bin/cargo-mutants"
LIST = ROOT / "tests/mutants.txt"
FOLDERS = {
    "engine": ["engine"],
    "selection": ["load_aware", "selection"],
    "schedule": ["schedule"],
    "placement": ["dominance", "holders", "migrate", "placement", "survival"],
}
"""Folders of `src`, and the modules of `tests/all.rs` that test each."""
MANIFEST = """
[package]
name = "{name}"
version = "0.1.0"
edition = "2024"
autotests = false

[features]
python = []

[dependencies]
{dependencies}

[dev-dependencies]
{for_tests}

[profile.dev]
opt-level = 1
debug = false
"""
TESTS = """
[[test]]
name = "all"
path = "tests/all.rs"

[workspace]
members = ["used"]
"""
SOME_MISSED, SOME_TIME_OUT = 2, 3
"""Exit statuses of cargo-mutants. A mistake for which a test never ends counts as noticed."""


def sources(module: str) -> list[Path]:
    """Source files of a module of the crate."""
    return [*(ROOT / "src" / module).rglob("*.rs"), *(ROOT / "src").glob(f"{module}.rs")]


def used_modules(folder: str) -> list[str]:
    """Modules of the crate that a folder uses, and those that they use."""
    found, new = {"error"}, {folder}
    while new:
        found |= new
        text = "".join(path.read_text() for module in new for path in sources(module))
        new = {module for module in re.findall(r"crate::(\w+)", text) if sources(module)} - found
    return sorted(found - {folder})


def copy(source: Path, to: Path) -> None:
    """Copy a module: a folder, or a file."""
    if source.is_dir():
        shutil.copytree(source, to)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.with_suffix(".rs"), to.with_suffix(".rs"))


def dependencies(kind: str | None) -> str:
    """Required dependencies of the crate: None for its own, "dev" for those of its tests."""
    command = ["cargo", "metadata", "--no-deps", "--format-version=1", f"--manifest-path={ROOT / 'Cargo.toml'}"]
    package = json.loads(subprocess.check_output(command))["packages"][0]

    def line(each: dict[str, Any]) -> str:
        default = str(each["uses_default_features"]).lower()
        features = json.dumps(each["features"])
        return f'{each["name"]} = {{ version = "{each["req"]}", default-features = {default}, features = {features} }}'

    return "\n".join(line(each) for each in package["dependencies"] if each["kind"] == kind and not each["optional"])


def write_crates(folder: str, to: Path) -> None:
    """Write a crate of a folder with its tests, and one of the modules that it uses."""
    modules, tests = used_modules(folder), ["common", *FOLDERS[folder]]
    for module in modules:
        copy(ROOT / "src" / module, to / "used/src" / module)
    for path in (to / "used/src").rglob("*.rs"):  # the folder may use what is private to the crate
        text = re.sub(r"pub\((crate|super)\)", "pub", path.read_text()).replace("pub use ensure;", "")
        path.write_text(text.replace("macro_rules! ensure", "#[macro_export]\nmacro_rules! ensure"))
    lines = "".join(f"pub mod {module};\n" for module in modules)
    (to / "used/src/lib.rs").write_text(f"{lines}pub use error::{{Error, Result}};\n")
    own = dependencies(None)
    (to / "used/Cargo.toml").write_text(MANIFEST.format(name="used", dependencies=own, for_tests=""))

    copy(ROOT / "src" / folder, to / "src" / folder)
    (to / "src/lib.rs").write_text(f"pub use used::*;\npub mod {folder};\n")
    for module in tests:
        copy(ROOT / "tests" / module, to / "tests" / module)
    (to / "tests/all.rs").write_text("".join(f"mod {module};\n" for module in tests))
    own += '\nused = { path = "used" }'
    manifest = MANIFEST.format(name="evermoe", dependencies=own, for_tests=dependencies("dev"))
    (to / "Cargo.toml").write_text(manifest + TESTS)
    shutil.copy(ROOT / "Cargo.lock", to)


def plant(folder: str, to: Path, jobs: int) -> set[str]:
    """Plant each mistake in a folder; return those that no test notices."""
    crate, out = to / folder, to / f"{folder}-mutants"
    for each in (crate, out):
        shutil.rmtree(each, ignore_errors=True)
    write_crates(folder, crate)
    options = [f"--jobs={jobs}", f"--file=src/{folder}/**", "--colors=never", "--gitignore=false"]
    command = [str(TOOL), "mutants", f"--dir={crate}", f"--output={out}", *options, "-C=--lib", "-C=--test=all"]
    status = subprocess.run(command, check=False).returncode
    if status not in (0, SOME_MISSED, SOME_TIME_OUT):
        raise SystemExit(f"cargo-mutants has ended with {status}")
    return {with_line(each, crate) for each in (out / "mutants.out/missed.txt").read_text().splitlines()}


def with_line(mutant: str, crate: Path) -> str:
    """Replace a mutant's numbers of line and column by the line itself, which stays when others of the file change."""
    path, line, _, what = mutant.split(":", 3)
    return f"{path}:{what}: {(crate / path).read_text().splitlines()[int(line) - 1].strip()}"


def main() -> None:
    """Plant the mistakes; fail if others are missed than those in the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), metavar="folder", help=f"of {', '.join(FOLDERS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "out/mutants", help="for crates and results")
    parser.add_argument("--jobs", type=int, default=2, help="mistakes that are tried at a time")
    arguments = parser.parse_args()
    missed = {each for folder in arguments.folders for each in plant(folder, arguments.out.resolve(), arguments.jobs)}
    prefixes = tuple(f"src/{folder}/" for folder in arguments.folders)
    listed = {line for line in LIST.read_text().splitlines() if line.startswith(prefixes)}
    for each in sorted(missed - listed):
        print("no test notices:", each)
    for each in sorted(listed - missed):
        print("is noticed or gone, but listed:", each)
    sys.exit(missed != listed)


if __name__ == "__main__":
    main()
