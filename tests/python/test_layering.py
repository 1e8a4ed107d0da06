"""Imports of `python/evermoe` point one way, and nothing grows without limit: read from the sources."""

import ast
import re
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "python" / "evermoe"

ROOMS = [
    "errors",
    "options",
    "process",
    "events",
    "ops",
    "planning",
    "presets",
    "config",
    "simulate",
    "comm",
    "moe",
    "optim",
    "data",
    "profile",
    "state",
    "checkpoint",
    "copies",
    "recovery",
    "observe",
    "session",
    "pipeline",
    "evermoe",
    "integrations",
    "launch",
    "demo",
    "cli",
    "__main__",
]
"""Modules and folders in order of import: each may import only earlier ones. `evermoe` is the package's own head."""

MOST_ATTRIBUTES = 15
"""That a constructor sets: a class with more of them has more than one reason to change."""
TWINS = {
    "dispatch": "planner, and the ops that do it",
    "flags": "those of sessions' options, and of the demo",
    "checkpoints": "options, and a command",
    "membership": "options, and who takes part",
    "placement": "options, planner and executor",
    "presets": "planners of each preset, and its options",
    "plot": "each room draws its own picture",
    "protection": "planner and executor",
    "recovery": "planner and executor",
    "selection": "planner and executor",
}
"""Names that several Python modules have, and why."""
RUST_TWINS = {
    "copies": "options of copies, and simulated ones",
    "baft": "planner, and the paper's figures",
    "chunks": "ops, and their backends",
    "dispatch": "planner, and its typed face",
    "expert": "how its tokens are split, and what it is",
    "failures": "unlike: of real processes, in simulated time",
    "fp8": "ops, and their backends",
    "frame": "what fills it, and its memory",
    "ledger": "planner, and its typed face",
    "island": "the rule, and a process's place",
    "load": "planner, and its typed face",
    "migrate": "planner, and its typed face",
    "optim": "ops, and their backends",
    "owners": "planner, and its typed face",
    "place": "Rust's operations on objects, for Python",
    "trace": "planner, and its typed face",
    "version": "Rust's functions, for Python",
    "vote": "planner and executor",
    "watch": "threads that ask, and what follows from their answers",
    "windows": "planner, and its typed face",
    "fetch": "unlike: units after a failure, tensors of a GPU",
    "exchange": "unlike: gradients for replicas, rows of tokens",
    "launch": "unlike: processes, kernels",
    "manifest": "format, and its files",
    "memory": "unlike: free bytes, buffers of a plan, memory of the ops",
    "recovery": "planner and executor",
    "holders": "planner, and its typed face",
    "scenario": "simulator, and its typed face",
    "outcome": "unlike: of real processes, in simulated time",
    "options": "unlike: of a session, ways to protect a unit",
    "summary": "unlike: of a run of the demo, of a plan",
}
"""Names that Python modules share with files of `src/` outside `src/python`, which mirrors them; and why."""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def imports(path: Path) -> dict[str, int]:
    """Modules of evermoe that a module imports anywhere, also for type checkers alone; and in which line."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: expected an absolute import"
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [part if is_module(part) else node.module for part in parts]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == "evermoe" and name != "evermoe._native"]
        found |= {name.removeprefix("evermoe").removeprefix("."): node.lineno for name in ours}
    return found


def is_module(name: str) -> bool:
    return name == "evermoe._native" or name.removeprefix("evermoe.") in MODULES


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0] or "evermoe"


def test_every_module_has_a_place_in_the_order():
    assert {room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    place = ROOMS.index(room(module))
    for name, line in imports(MODULES[module]).items():
        is_fine = room(name) == room(module) or ROOMS.index(room(name)) < place
        assert is_fine, f"{MODULES[module]}:{line}: {module or 'evermoe'} may not import {name or 'evermoe'}"


def test_no_module_imports_itself_over_others():
    left = {module: set(imports(path)) - {module} for module, path in MODULES.items()}
    while free := [module for module, names in left.items() if not names & set(left)]:
        for module in free:
            del left[module]
    assert not left, f"modules in, or behind, a circle: {sorted(left)}"


def too_long(folder: Path, suffixes: tuple[str, ...], limit: int) -> set[str]:
    files = [path for path in folder.rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix() for path in files if len(path.read_text().splitlines()) > limit}


def test_modules_have_at_most_400_lines():
    assert not too_long(PACKAGE, (".py",), 400)


def test_tests_have_at_most_500_lines():
    found = too_long(ROOT / "tests", (".py", ".rs"), 500)
    assert not found


def test_every_file_of_rust_tests_runs():
    """Cargo finds none by itself: each is a module of `all.rs`, or a program in Cargo.toml."""
    folder = ROOT / "tests"
    files = {*folder.glob("*.rs"), *folder.glob("*/mod.rs"), *folder.glob("*/main.rs")}
    names = {path.parent.name if path.stem in ("mod", "main") else path.stem for path in files}
    programs = {each["name"] for each in tomllib.loads((ROOT / "Cargo.toml").read_text())["test"]}
    modules = set(re.findall(r"^mod (\w+);", (folder / "all.rs").read_text(), re.M))
    assert names == programs | modules | {"world"}, "world is a module of protocol_model.rs"


def test_classes_have_at_most_300_lines():
    large = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 300:
                large.add(f"{module}.{node.name}")
    assert not large


def attributes(constructor: ast.FunctionDef) -> set[str]:
    """Names of the attributes that a constructor sets."""
    stored = [each for each in ast.walk(constructor) if isinstance(each, ast.Attribute)]
    return {
        each.attr
        for each in stored
        if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def test_constructors_set_at_most_15_attributes():
    many = {}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    number = len(attributes(method))
                    if number > MOST_ATTRIBUTES:
                        many[node.name] = number
    assert not many


def stems(paths) -> list[str]:
    return [path.stem for path in paths if path.stem not in ("__init__", "__main__", "mod", "lib")]


def test_names_of_python_modules_occur_once():
    names = stems(MODULES.values())
    assert {name for name in names if names.count(name) > 1} == set(TWINS)


def test_names_of_test_modules_occur_once():
    names = stems((ROOT / "tests" / "python").rglob("*.py"))
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_python_and_rust_share_names_for_the_same_thing_alone():
    rust = [path for path in (ROOT / "src").rglob("*.rs") if "python" not in path.parts[len(ROOT.parts) :]]
    shared = set(stems(MODULES.values())) & set(stems(rust))
    assert shared <= set(RUST_TWINS), f"give these other names, or a reason: {sorted(shared - set(RUST_TWINS))}"


def compared(node: ast.Compare) -> set[str]:
    """Last names of what is compared: `b` of `a.b == c`."""
    every = [node.left, *node.comparators]
    return {part.attr for part in every if isinstance(part, ast.Attribute)} | {
        part.id for part in every if isinstance(part, ast.Name)
    }


def test_what_differs_between_presets_is_a_field_of_them():
    found = [
        f"{path}:{node.lineno}"
        for module, path in MODULES.items()
        if module != "planning.presets"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "preset" in compared(node)
    ]
    assert not found, f"give `Preset` a field in place of the names: {', '.join(found)}"
