#!/usr/bin/env python3
"""Tests and benches on a machine with a GPU and torch, where nothing is built and nothing can be fetched.

    make wheel       # on a machine with Rust: out/wheels holds evermoe and what it needs besides torch
    make test-gpu    # on the machine with a GPU, in this folder: the GPU tests, then some under compute-sanitizer
    make bench-gpu   # on that machine: each kernel's time, and the fraction of the copy bandwidth
    make gpu-contact # on one GPU of a new kind or driver: the tests, then what matters most, real NCCL included
    make gpu-node    # on a node of several GPUs: what only those can show

Where there is no make: `python tests/python/support/on_gpu.py test`, or `bench`, `contact`, `node`.

Each takes less than 10 minutes, and writes JSON to out/gpu after each step, so that a run which is cut off leaves what
it had. A step that hangs ends at its own limit. Without a GPU they say so and end well.

Two ranks on one GPU need NCCL 2.30 or newer: NCCL_LIBRARY=PATH names its libnccl.so.2, of the package nvidia-nccl-cu13.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WHEELS, OUT = ROOT / "out" / "wheels", ROOT / "out" / "gpu"
CHECKS = ("memcheck", "racecheck", "synccheck", "initcheck")
ONE_GIB = ["--layers", "4", "--hidden", "512", "--heads", "8", "--intermediate", "2048", "--experts", "10"]
"""A model of the demo whose state takes 1 GiB."""
BENCHES = {
    "kernels": (60, []),
    "ops": (65, ["--tokens", "8192", "65536", "--hidden", "1024", "4096", "--experts", "8", "256", "--seconds", "0.2"]),
    "optim": (45, ["--elements", str(1 << 28), "--seconds", "2"]),
    "copies": (45, []),
    "overlap": (60, ["--gib", "1", "8", "--seconds", "2"]),
    "overlap-32": (95, ["--gib", "32", "--seconds", "2"]),
    "profile": (40, []),
    "layer": (65, ["--tokens", "16384", "--hidden", "2048", "--intermediate", "1024", "--seconds", "2"]),
    "session": (90, ["--workers", "2", "--rounds", "1", "--kills", "0", "--steps", "12", *ONE_GIB]),
    "aborts": (90, []),
    "aborts-20": (150, ["--rounds", "20", "--states", "waits", "queue"]),
    "transformers": (60, ["--tokens", "8192", "--hidden", "2048"]),
    "session-8": (150, ["--workers", "8", "--rounds", "1", "--kills", "1", "--steps", "12", *ONE_GIB]),
}
"""By the name of the results: the most seconds, and options; a hyphen ends the name of the bench."""
COMMANDS = {
    "bench": ("kernels", "ops", "optim", "copies", "overlap", "overlap-32", "profile", "layer", "session"),
    "contact": ("kernels", "overlap", "overlap-32", "aborts", "transformers"),
    "node": ("aborts", "aborts-20", "session-8"),
}
"""Benches of each command, in order."""
SEVERAL_GPUS = ("comm/test_nccl_groups.py", "session/training/test_several_gpus.py", "pipeline/test_pipeline_on_gpu.py")
TESTS = (
    "comm/test_courier.py",
    "comm/test_nccl_groups.py",
    "comm/test_nccl_aborts.py",
    "ops",
    "pipeline/test_pipeline_on_gpu.py",
    "profile/test_profiler.py",
    "replay",
    "session/failures/test_sick_node.py",
    "session/training/test_gradients.py",
    "session/training/test_one_gpu.py",
    "session/training/test_several_gpus.py",
    "session/training/test_step_costs.py",
    "snapshot/test_gpu_source.py",
    "state/test_gpu_digests.py",
    "test_arbitrary_counts.py",
    "test_checkpointed_moe.py",
    "test_host_waits.py",
    "test_masters.py",
    "test_moe.py",
    "test_optim.py",
    "test_seeds.py",
)
"""Where tests are that need a GPU: to collect all others takes longer than some checks."""
KERNELS = (
    "adamw",
    "dequantize",
    "digest",
    "expert_histogram",
    "hash",
    "invert",
    "pack",
    "permute",
    "plan",
    "quantize",
    "regroup",
    "sgd",
    "split",
    "un",
)
"""Beginnings of the names of our kernels, for compute-sanitizer: torch's are many, and not ours to check."""
SANITIZED = ["tests/python/ops", "-k", "example"]
"""Tests that launch each kernel, and are small enough to run under a tool that slows kernels down a hundred times."""
TEST_SECONDS, CHECK_SECONDS, CONTACT_SECONDS, NODE_SECONDS = 240, 50, 200, 150
INTERRUPT_SECONDS = 5
PROCESSES = min(10, os.cpu_count() or 1)


def environment():
    """Variables with which Python finds evermoe: an installed one, else the wheels, unpacked here."""
    paths = [ROOT / "tests" / "python"]
    if importlib.util.find_spec("evermoe") is None:
        site = OUT / "site"
        shutil.rmtree(site, ignore_errors=True)
        for wheel in sorted(WHEELS.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(site)
        paths.append(site)
    return dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))


def has_gpu(variables):
    """Whether there is a GPU and a build with kernels; says so if not."""
    code = (
        "import torch, evermoe.ops as o, sys; sys.exit(0 if torch.cuda.is_available() and o.has_cuda_kernels() else 3)"
    )
    status = subprocess.run([sys.executable, "-c", code], check=False, env=variables).returncode
    if status == 3:
        print("skipped: no CUDA device, or no kernels in this build")
    elif status:
        sys.exit("evermoe or torch cannot be imported: `make wheel` fills out/wheels on a machine with Rust")
    return status == 0


def _listen_to_interrupts():
    """In the child: a job in the background of a shell ignores them, and its children would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def limited(command, seconds, variables):
    """The exit code of a command, or "time-out": then it was interrupted, so that it can say how far it came."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        start_new_session=True,
        preexec_fn=_listen_to_interrupts,  # noqa: PLW1509  # the child forks in a process without threads
    )
    for last_seconds, number in ((seconds, signal.SIGINT), (INTERRUPT_SECONDS, signal.SIGKILL)):
        try:
            status = process.wait(last_seconds)
            return status if last_seconds == seconds else "time-out"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    process.wait()
    return "time-out"


def pytest(variables, seconds, report, *options, prefix=()):
    """Runs pytest; returns what it found."""
    start = time.monotonic()
    report.unlink(missing_ok=True)
    fixed = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={report}"]
    status = limited([*prefix, sys.executable, *fixed, *options], seconds, variables)
    found = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if report.exists():
        suite = ET.parse(report).getroot()[0]
        found |= {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            case
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        found["failed"] = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return found


def sanitizer():
    """The path of compute-sanitizer, or none."""
    named = shutil.which("compute-sanitizer")
    places = [Path("/usr/local/cuda/bin/compute-sanitizer")]
    places += [Path(folder) / "nvidia" / "cu13" / "bin" / "compute-sanitizer" for folder in sys.path]
    return named or next((str(place) for place in places if place.exists()), None)


def run_tests(variables, seconds, files):
    """The GPU tests of these files."""
    together = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") else []
    return pytest(variables, seconds, OUT / "tests.xml", *together, *[f"tests/python/{path}" for path in files])


def test(variables):
    """The GPU tests, then those that are small under each check of compute-sanitizer."""
    results = {"tests": run_tests(variables, TEST_SECONDS, TESTS)}
    tool = sanitizer()
    if tool is None:
        print("compute-sanitizer not found: its checks are left out")
    for check in CHECKS if tool else ():
        prefix = [tool, f"--tool={check}", "--error-exitcode=1"]
        if check != "initcheck":  # which must see who else writes
            prefix += ["--kernel-name", f"regex=^({'|'.join(KERNELS)}).*"]
        results[check] = pytest(variables, CHECK_SECONDS, OUT / f"{check}.xml", *SANITIZED, prefix=prefix)
    write("tests", results)
    return all(result["status"] == 0 for result in results.values())


def bench(variables):
    """Each bench on the GPU."""
    return run_benches(variables, "bench", {})


def contact(variables):
    """The tests, then the benches that say first whether a GPU of a new kind, a driver or an NCCL does what we need."""
    return run_benches(variables, "contact", {"tests": run_tests(variables, CONTACT_SECONDS, TESTS)})


def node(variables):
    """The tests and benches that need several GPUs."""
    return run_benches(variables, "node", {"tests": run_tests(variables, NODE_SECONDS, SEVERAL_GPUS)})


def run_benches(variables, command, results):
    """The benches of a command, each with its table on the terminal and its JSON in a file."""
    write(command, results)
    for name in COMMANDS[command]:
        seconds, options = BENCHES[name]
        file = f"benches/bench_{name.partition('-')[0]}.py"
        start = time.monotonic()
        written = ["--device", "cuda", "--json", str(OUT / f"{name}.json")]
        status = limited([sys.executable, file, *written, *options], seconds, variables)
        results[name] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
        write(command, results)
    return all(result["status"] == 0 for result in results.values())


def write(name, results):
    """Results as JSON, in a file and on the terminal."""
    text = json.dumps(results, indent=1)
    (OUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def main():
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["test", *COMMANDS])
    what = {"test": test, "bench": bench, "contact": contact, "node": node}[parser.parse_args().what]
    OUT.mkdir(parents=True, exist_ok=True)
    variables = environment()
    sys.exit(0 if not has_gpu(variables) or what(variables) else 1)


if __name__ == "__main__":
    main()
