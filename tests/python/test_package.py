"""Modules that `import evermoe` and its parts load, and names that the package offers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evermoe

PATH = Path(evermoe.__file__).parent


def fresh(code: str) -> list[dict]:
    """Return each line of JSON that a fresh interpreter prints; PYTHONPATH is this package's."""
    command = [sys.executable, "-c", f"import json, os, sys\nbefore = dict(os.environ)\n{code}"]
    environment = {key: value for key, value in os.environ.items() if key != "RUST_LOG"}
    environment["PYTHONPATH"] = str(PATH.parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


TOLD = """
print(json.dumps({
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "evermoe"),
    "foreign": sorted({name.split(".")[0] for name in sys.modules}),
    "environment": {key: value for key, value in os.environ.items() if before.get(key) != value},
}))
"""


def test_imports_load_what_they_need_and_no_more():
    """The package alone, then the ops, then the session, which imports torchft on first use and quietly."""
    lines = ["import evermoe", "import evermoe.ops", "evermoe.Session\nevermoe.PipelineSession"]
    lines.append("from evermoe.comm._torchft import coordination\ncoordination().LighthouseClient")
    package, ops, session, first_use = fresh("".join(f"{line}\n{TOLD}\n" for line in lines))
    assert package["ours"] == ["evermoe"]
    assert "torch" not in package["foreign"]
    assert package["environment"] == ops["environment"] == session["environment"] == {}
    parts = ["_fakes", "_load", "dispatch", "routing_map"]
    assert ops["ours"] == ["evermoe", "evermoe._native", "evermoe.ops", *(f"evermoe.ops.{part}" for part in parts)]
    assert not {"torchft", "opentelemetry", "matplotlib", "safetensors"} & set(ops["foreign"])
    assert "torchft" not in session["foreign"]
    assert "torchft" in first_use["foreign"]
    assert first_use["environment"] == {"RUST_LOG": "warn"}


def test_every_public_name_exists():
    for name in evermoe.__all__:
        assert getattr(evermoe, name).__name__.endswith(name.rpartition(".")[2])
    assert set(evermoe.__all__) < set(dir(evermoe))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = evermoe.nothing


def test_type_checkers_see_what_is_imported_at_run_time():
    tree = ast.parse((PATH / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module.removeprefix("evermoe").removeprefix(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: home for name, home in imported.items() if home} == evermoe._HOMES
    assert sorted(imported) == sorted([*evermoe.__all__, *evermoe._MODULES])


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert evermoe.__version__ == version("evermoe")


@pytest.mark.parametrize("arguments, expected", [(["info"], "evermoe "), (["--help"], "usage: evermoe")])
def test_python_runs_the_command_as_a_module(arguments, expected):
    command = [sys.executable, "-m", "evermoe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
