"""Flags and environment variables that are derived from the fields of options."""

import argparse
import ast
from dataclasses import fields
from pathlib import Path

import pytest

import evermoe
from evermoe import Checkpoints, Membership, Placement
from evermoe.config.copies import CopyConfig
from evermoe.config.descriptions import descriptions, first_sentence
from evermoe.config.flags import add_flags, add_preset_flags, as_flags, given_options, given_preset
from evermoe.config.variables import find_membership, from_environment
from evermoe.presets import BY_NAME, Auto, Gemini, Moetion, Pec, preset_options

GROUPS = [Membership, Placement, Checkpoints, *BY_NAME.values()]
GIVEN = [
    Membership(job="j", members=3, role="spare", allow_solo_resume=True, hang_timeout=1.5, on_lost="echo"),
    Placement(expert_slots=2, policy="safest", failures=2),
    Checkpoints(
        "s3://bucket/run",
        interval=3,
        keep_interval=9,
        upload_limit=1e6,
        resume_settings="script",
        resume_from="verified",
    ),
    Auto(replica_device="cuda:1", gradient_bucket_bytes=0, snapshot_memory="gpu"),
    Gemini(copy_pacing="blocking", window_share=0.5),
    Pec(experts_per_save=2, expert_selection="sequential"),
    Moetion(remote_bytes_per_step=5),
]


def parser_of(*kinds):
    parser = argparse.ArgumentParser()
    for kind in kinds:
        add_flags(parser, kind)
    return parser


@pytest.mark.parametrize("given", GIVEN)
def test_flags_say_what_options_say_and_back(given):
    flags = as_flags(given)
    assert given_options(parser_of(type(given)).parse_args(flags), type(given)) == given


@pytest.mark.parametrize("kind", GROUPS)
def test_no_flags_are_the_defaults(kind):
    assert given_options(parser_of(kind).parse_args([]), kind) == kind()
    assert as_flags(kind()) == []


def test_flags_have_names_that_say_what_they_are():
    options = parser_of(Membership, Placement, Checkpoints).format_help()
    for flag in ("--hang-timeout SECONDS", "--placement {", "--checkpoints URL", "--checkpoint-interval STEPS"):
        assert flag in options, options
    assert "--pec.experts-per-save N" in parser_of(Pec).format_help()


def test_help_is_the_first_sentence_of_a_field_and_its_default():
    found = " ".join(parser_of(Membership).format_help().split())
    assert "Name of the job, the same for all members" in found
    assert "Seconds that a collective waits for a silent peer (default: 30.0)" in found
    assert first_sentence(descriptions(Pec)["save_interval"]) == "Steps between saves to the checkpoint store"


@pytest.mark.parametrize("kind", GROUPS)
def test_each_option_is_documented_where_it_is_defined(kind):
    assert descriptions(kind).keys() == {each.name for each in fields(kind)}
    assert all(text.endswith(".") or text.endswith(")") for text in descriptions(kind).values())


def test_a_command_may_have_a_part_of_the_flags_and_defaults_of_its_own():
    parser = argparse.ArgumentParser()
    add_flags(parser, Membership, ["hang_timeout"], {"hang_timeout": 10.0})
    add_flags(parser, CopyConfig, ["replication"], {"replication": 2})
    found = parser.parse_args([])
    assert (vars(found), given_options(found, Membership)) == (
        {"hang_timeout": 10.0, "replication": 2},
        Membership(hang_timeout=10.0),
    )


def chosen(*flags):
    parser = argparse.ArgumentParser()
    add_preset_flags(parser)
    return given_preset(parser.parse_args(flags))


def test_options_of_a_preset_begin_with_its_name():
    assert chosen() == Auto()
    assert chosen("--preset", "pec", "--pec.experts-per-save", "2") == Pec(experts_per_save=2)
    with pytest.raises(
        ValueError, match=r"--pec.experts-per-save is an option of the preset pec, and --preset is auto"
    ):
        chosen("--pec.experts-per-save", "2")
    with pytest.raises(ValueError, match="expected experts_per_save to be a whole number or None, >= 1, got 0"):
        chosen("--preset", "pec", "--pec.experts-per-save", "0")


VARIABLES = {
    "EVERMOE_LIGHTHOUSE": ("lighthouse", "http://a:1", "http://a:1"),
    "EVERMOE_JOB": ("job", "j", "j"),
    "EVERMOE_NODE": ("node", "n", "n"),
    "EVERMOE_DOMAIN": ("domain", "zone/rack", "zone/rack"),
    "EVERMOE_ADDRESS": ("address", "10.0.0.1", "10.0.0.1"),
    "EVERMOE_MEMBERS": ("members", "3", 3),
    "EVERMOE_ROLE": ("role", "spare", "spare"),
    "EVERMOE_ALLOW_SOLO_RESUME": ("allow_solo_resume", "1", True),
    "EVERMOE_ON_LOST": ("on_lost", "echo", "echo"),
    "EVERMOE_MEMORY_DIR": ("memory_dir", "/tmp", "/tmp"),
}


def test_every_variable_that_fills_a_field_is_known():
    assert {each.metadata["env"] for each in fields(Membership) if each.metadata["env"]} == set(VARIABLES)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_fills_a_field_that_is_not_given(monkeypatch, variable):
    name, text, value = VARIABLES[variable]
    monkeypatch.setenv(variable, text)
    assert getattr(from_environment(Membership()), name) == value
    own = {"members": 5, "role": "replica", "allow_solo_resume": True}.get(name, "own")
    assert getattr(from_environment(Membership(**{name: own})), name) == own


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("EVERMOE_MEMBERS", "-3"),
        ("EVERMOE_MEMBERS", "two"),
        ("EVERMOE_ROLE", "x"),
        ("EVERMOE_ALLOW_SOLO_RESUME", "yes"),
    ],
)
def test_wrong_variables_are_refused_by_name(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"expected {variable} to be .* got '{text}'"):
        find_membership(Membership())


def test_a_preset_is_a_name_or_its_options():
    assert {name: preset_options(name) for name in BY_NAME} == {name: kind() for name, kind in BY_NAME.items()}
    given = Pec(experts_per_save=2)
    assert preset_options(given) is given
    with pytest.raises(ValueError, match=r"expected preset to be one of auto, gemini, .*, got 'fast'"):
        preset_options("fast")


def test_each_option_is_read_where_it_has_its_effect():
    """Of the sources outside of the options themselves: an option that nothing reads has no effect."""
    package = Path(evermoe.__file__).parent
    paths = [path for path in package.rglob("*.py") if path.name != "presets.py" and "config" not in path.parts]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {each.name for kind in GROUPS for each in fields(kind)} <= read
