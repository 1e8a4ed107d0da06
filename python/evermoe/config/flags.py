"""Command-line flags of options, derived from the fields of their dataclasses: name, type, default and docstring.

--replication 3 --expert-slots 2 --hang-timeout 10 --preset pec --pec.experts-per-save 2
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from evermoe.config.descriptions import descriptions, first_sentence
from evermoe.options import Options
from evermoe.planning.presets import PRESET_NAMES
from evermoe.presets import BY_NAME, PresetOptions

_Options = TypeVar("_Options", bound=Options)


def add_flags(
    parser: Any, options: type[Options], names: Collection[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> None:
    """Add the flags of a group of options to a parser, or to a group of its arguments.

    Args:
        parser: gets the flags.
        options: the dataclass.
        names: of the fields that get a flag; None for all that a command line can express.
        defaults: of this command, where they differ from those of the dataclass.
    """
    hints, texts, given = get_type_hints(options), descriptions(options), defaults or {}
    for each in fields(options):
        kinds = _kinds(hints[each.name])
        if each.name in (names or [each.name]) and kinds:
            default = given.get(each.name, each.default)
            text = first_sentence(texts.get(each.name, "")).replace("%", "%%")
            shown = "" if default is None or isinstance(default, bool) else f" (default: {default})"
            parser.add_argument(
                _flag(options, each),
                dest=_dest(options, each),
                default=given.get(each.name),
                help=text + shown,
                **_parsing(each, kinds),
            )


def add_preset_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and the options of each preset, `--PRESET.OPTION`."""
    parser.add_argument(
        "--preset", choices=PRESET_NAMES, default="auto", help="how the state is protected (default: %(default)s)"
    )
    for preset in BY_NAME.values():
        add_flags(parser.add_argument_group(f"options of --preset {preset.name}"), preset)


def given_options(arguments: argparse.Namespace, options: type[_Options], **more: Any) -> _Options:
    """Return the options that were given as flags, with the defaults of the others.

    Raises:
        ValueError: an option is wrong.
    """
    found = {each.name: getattr(arguments, _dest(options, each), None) for each in fields(options)}
    return options(**{name: value for name, value in found.items() if value is not None} | more)


def given_preset(arguments: argparse.Namespace) -> PresetOptions:
    """Return the preset that `--preset` names, with its options.

    Raises:
        ValueError: an option is wrong, or is one of another preset.
    """
    chosen = BY_NAME[arguments.preset]
    for kind in BY_NAME.values():
        for each in fields(kind):
            if kind is not chosen and getattr(arguments, _dest(kind, each), None) is not None:
                raise ValueError(
                    f"{_flag(kind, each)} is an option of the preset {kind.name}, and --preset is {chosen.name}: "
                    f"expected --preset {kind.name}, or only flags that begin with --{chosen.name}."
                )
    return given_options(arguments, chosen)


def as_flags(options: Options) -> list[str]:
    """Return the flags that give these options, except those that have their defaults."""
    found: list[str] = []
    for each in fields(options):
        value = getattr(options, each.name)
        if value != each.default:
            flag = _flag(type(options), each)
            found += [flag] if value is True else [flag, str(value)]
    return found


def _flag(options: type[Options], each: Field[Any]) -> str:
    prefix = f"{options.name}." if issubclass(options, PresetOptions) else ""
    return "--" + prefix + (each.metadata.get("flag") or each.name).replace("_", "-")


def _dest(options: type[Options], each: Field[Any]) -> str:
    """Return the attribute of the parsed arguments: the flag without dashes, such as `pec.experts_per_save`."""
    return _flag(options, each)[2:].replace("-", "_")


def _kinds(hint: Any) -> list[Any]:
    """Return the types of a field that a text can express; empty if it has none."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [kind for kind in kinds if kind in (bool, int, float, str) or get_origin(kind) is Literal]


def _parsing(each: Field[Any], kinds: list[Any]) -> dict[str, Any]:
    """Return how argparse reads a field: as its first type that a text can express."""
    kind = kinds[0]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind, "metavar": _metavar(each.name, kind)}


def _metavar(name: str, kind: type) -> str:
    endings = {"timeout": "SECONDS", "wait": "SECONDS", "interval": "STEPS", "steps": "STEPS", "limit": "BYTES"}
    by_part = {"bytes": "BYTES", "dir": "DIR", "url": "URL", "fraction": "FRACTION"}
    found = next((word for ending, word in endings.items() if name.endswith(ending)), None)
    found = found or next((word for part, word in by_part.items() if part in name.split("_")), None)
    return found or {int: "N", float: "X"}.get(kind, Path(name).name.upper().replace("_", "-"))
