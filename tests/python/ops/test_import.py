"""The errors of `import evermoe.ops` where torch is missing, or too old."""

import os
import subprocess
import sys
from pathlib import Path

import evermoe

PACKAGE_ROOT = str(Path(evermoe.__file__).parent.parent)


def import_ops(tmp_path, stub):
    """Imports in a fresh interpreter, with `stub` as the package torch; returns the last line on stderr."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(stub)
    path = os.pathsep.join([str(tmp_path), PACKAGE_ROOT])
    code = [sys.executable, "-c", "import evermoe.ops"]
    done = subprocess.run(code, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_old_torch_is_named(tmp_path):
    last = import_ops(tmp_path, '__version__ = "2.9.0+cu128"')
    assert last == "ImportError: evermoe needs PyTorch 2.10 or newer, found 2.9.0+cu128: pip install 'torch>=2.10'"


def test_missing_torch(tmp_path):
    last = import_ops(tmp_path, "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    assert last == "ImportError: evermoe needs PyTorch 2.10 or newer: pip install 'torch>=2.10'"


def test_torch_that_does_not_load_libtorch(tmp_path):
    last = import_ops(
        tmp_path,
        '__version__ = "2.10.0"\nclass Tensor: ...\n',
    )
    assert last == ("ImportError: libtorch_cpu.so is not loaded in this process: `import torch` first")
