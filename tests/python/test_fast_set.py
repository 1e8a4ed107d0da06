"""`make test` leaves out what starts processes, except a test of each failure that the docs list and of each preset."""

import re
import subprocess

import pytest
import torch

from evermoe.planning.presets import PRESET_NAMES
from support import fast_set
from support.harness import SERVER, Job
from support.ranks import run_ranks

FAILURES = fast_set.FOLDER.parents[1] / "docs" / "operations" / "failures.md"
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def test_each_failure_of_the_table_has_a_quick_test():
    text = FAILURES.read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| failure \|.*\n\|[-|]+\n((?:\|.*\n)*)", text, re.M)
    rows = {LINK.sub(r"\1", row.strip("| ").split(" | ")[0]) for row in table.splitlines()}
    marks = set()
    for path in fast_set.FOLDER.rglob("test_*.py"):
        marks |= set(re.findall(r'mark\.quick\("([^"]+)"\)', path.read_text(encoding="utf-8")))
    assert rows == marks - set(PRESET_NAMES), (
        "give a test of this failure the mark `quick`, with the first cell of its row"
    )


def by_the_server():
    SERVER.Process(target=print).start()


def by_a_command():
    subprocess.run(["true"], check=True)


def by_a_helper(tmp_path):
    def compute(group):
        return group.rank

    return run_ranks(tmp_path, 2, compute)


def by_a_local_import(folder):
    from support.harness import Worker

    return Worker(folder)


def by_each_other(number):
    return by_way_of_another(number - 1) if number else by_a_command()


def by_way_of_another(number):
    return by_each_other(number)


def by_the_compiler(model):
    return torch.compile(model)


def in_this_process(number):
    return str(number) if number else in_this_process(number + 1)


@pytest.mark.parametrize(
    "function",
    [
        by_the_server,
        by_a_command,
        by_a_helper,
        by_a_local_import,
        by_way_of_another,
        by_each_other,
        by_the_compiler,
        Job,
    ],
)
def test_what_starts_a_process_or_compiles_is_left_out(function):
    assert fast_set.reaches_a_start(function)


def test_what_starts_none_runs():
    assert not fast_set.reaches_a_start(in_this_process)
