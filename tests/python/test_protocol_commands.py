"""The commands of the commit protocol, each of which Python carries out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from evermoe.session import protocol

EVENTS = Path(__file__).parents[2] / "src" / "protocol" / "event.rs"


def test_each_command_of_the_protocol_is_carried_out():
    enum = re.search(r"^pub enum Command \{\n(.*?)^\}", EVENTS.read_text(encoding="utf-8"), flags=re.M | re.S)
    variants = re.findall(r"^    ([A-Z]\w+)\b", enum.group(1), flags=re.M)
    names = [re.sub(r"(?<!^)([A-Z])", r"_\1", each).lower() for each in variants]
    tree = ast.parse(Path(protocol.__file__).read_text(encoding="utf-8"))
    table = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == "_all_commands")
    found = next(each for each in ast.walk(table) if isinstance(each, ast.Dict))
    assert sorted(key.value for key in found.keys) == sorted(names)
    assert len(names) > 20, "the variants are found"
