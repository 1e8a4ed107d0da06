"""`evermoe plan --copies`: numbers that can be worked out by hand, what the planners say, flags and messages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from evermoe.cli.plan import show_copies
from evermoe.cli.plan.auto_plan import AutoReport, make_layout, plan_auto
from evermoe.cli.plan.compare import Cluster, compare
from evermoe.cli.plan.compare_presets import PresetRow, compare_presets
from evermoe.cli.plan.loads import read_load
from evermoe.cli.plan.setting import CopySetting
from evermoe.planning.presets import PRESET_NAMES
from evermoe.planning.protection import LOG_STEPS
from support.commands import Done, evermoe

SMALL = CopySetting(
    expert_parameters=1000,
    dense_parameters=4000,
    step_seconds=0.1,
    network_gbps=0.008,  # a byte takes a microsecond
    host_link_gbps=8,
)
"""An expert has 12 kB of state and 4 kB of gradient: 12 and 4 ms; so has each of 4 shards of the rest."""
FLAGS = "--expert-parameters 1000 --dense-parameters 4000 --step-seconds 0.1 --network-gbps 0.008 --host-link-gbps 8"


def report(load=None, cluster=(4, 2, 2, 1, (1, 2)), setting=SMALL, policies=("balanced",), **changes) -> AutoReport:
    """8 experts of one layer with the same load on 4 nodes of 2 slots: one replica each."""
    load_LE = np.ones((1, 8)) if load is None else np.array(load, float)
    comparison = compare(load_LE, Cluster(*cluster), policies)
    layout, placed = make_layout(load_LE, comparison, CopySetting(**vars(setting) | changes))
    return plan_auto(layout, placed.policy)


def rows(auto: AutoReport) -> dict[str, PresetRow]:
    found = compare_presets(auto.layout)
    assert tuple(row.preset for row in found) == PRESET_NAMES
    return {row.preset: row for row in found}


# ---- auto


def test_gradients_keep_single_replicas_and_nothing_keeps_the_rest():
    auto = report()
    active, replayed = auto.kinds
    assert (active.kind, active.experts, active.others, active.bytes, active.memory_bytes) == ("active", 0, 1, 0, 0)
    assert (replayed.kind, replayed.experts, replayed.others, replayed.most_lost_steps) == ("replayed", 8, 0, 0)
    assert replayed.tokens == pytest.approx(1)
    assert auto.bytes == replayed.bytes == 8 * 4000
    assert replayed.memory_bytes == 8 * (12_000 + LOG_STEPS * 4000)
    assert replayed.window_share == pytest.approx((2 * 8 * (4e-3 + 10e-6)) / (4 * 0.05))
    assert float(auto.survival[0].without_loss) == pytest.approx(1)
    assert auto.plan.delay_seconds == 0
    texts = [example.text for example in auto.examples]
    assert texts[0].startswith("layer 0, expert 0, the hottest of 8: active on node")
    assert texts[0].endswith(", its gradient sent each step; its gradient is smaller than its state")
    assert texts[1] == "the dense part: active on nodes 0, 1, 2, 3: nothing to copy; 4 domains train on it"


def test_two_replicas_need_no_copies_and_idle_experts_no_bytes():
    twice = report(cluster=(4, 4, 2, 1, (1,)))
    assert [row.kind for row in twice.kinds] == ["active"]
    assert twice.bytes == 0
    idle = report([[5, 3, 0, 0, 0, 0, 0, 0]])
    sent = [choice.bytes for choice in idle.plan.units]
    assert sent == [4000] * 2 + [0] * 6 + [0]
    assert "nothing to send; it is idle" in " ".join(example.text for example in idle.examples)


def test_snapshots_as_often_as_there_is_time():
    # in a step 2 experts go out and 2 come in: 48 ms, of which half has room in 25 ms
    auto = report(no_replay=True, network_idle=0.25, budget=0.0)
    (snapshots,) = [row for row in auto.kinds if row.experts]
    assert (snapshots.kind, snapshots.periods, snapshots.experts, snapshots.most_lost_steps) == (
        "snapshot",
        (2, 2),
        8,
        1,
    )
    assert snapshots.bytes == 8 * 6000
    assert snapshots.memory_bytes == 8 * 2 * 12_000
    row = rows(auto)["auto"]
    assert (row.steps_per_version, row.delay, row.repeated_steps) == (2, 0, 0)
    # the 2 experts of one node go back by 1 or 2 steps: a snapshot is complete with the next vote
    assert row.lost_steps == pytest.approx(1.5 / 4, rel=1e-3)
    assert "25.0% of a step and --budget 0 leave too little time" in show_copies.advise_copies(
        auto, [*rows(auto).values()]
    )


def test_without_memory_the_job_goes_back_to_the_store():
    auto = report(host_gib=0.0)
    assert [(row.kind, row.experts, row.most_lost_steps) for row in auto.kinds] == [
        ("active", 0, 0),
        ("uncovered", 8, 999),
    ]
    row = rows(auto)["auto"]
    assert (row.survives, row.repeated_steps, row.lost_steps) == (0, 499.5, 0)
    advice = show_copies.advise_copies(auto, [*rows(auto).values()])
    assert advice == (
        "8 of 9 units may lose steps, because 0 GiB of host memory are full: raise --host-gib, or give each expert "
        "2 replicas, which --expert-slots 4 --min-replicas 2 do."
    )


def test_shards_of_the_rest_are_units_of_their_own():
    auto = report(dense="sharded", dense_parameters=4002)
    assert auto.layout.dense == (1001, 1001, 1001, 999)  # rounded up until all are given out
    assert auto.layout.unit_name(9) == "dense shard 1"
    assert [choice.bytes for choice in auto.plan.units[8:]] == [4004, 4004, 4004, 3996]
    assert auto.layout.parameters == 8 * 1000 + 4002
    assert [unit.tokens for unit in auto.layout.units()[8:]] == [1.0] * 4  # every token needs it
    assert report(dense_parameters=0).layout.units()[8:] == []


@pytest.mark.parametrize("device_gib", [6e-5, 1e-4])
def test_the_kinds_add_up_to_what_the_planner_counts(device_gib):
    load = read_load("zipf:1.2", 4, 32, seed=3)
    auto = report(load, (8, 5, 1, 2, (1, 2)), host_gib=2e-4, device_gib=device_gib, network_idle=0.3)
    assert len(auto.kinds) == 4 and len({row.kind for row in auto.kinds}) >= 3
    nodes = auto.plan.nodes
    assert sum(row.bytes for row in auto.kinds) == sum(node.sent_bytes for node in nodes) == auto.bytes
    assert sum(row.memory_bytes for row in auto.kinds) == sum(node.host_bytes + node.device_bytes for node in nodes)
    windows = sum(row.window_share or 0.0 for row in auto.kinds) * 0.3 * 0.1 * 8
    assert windows == pytest.approx(sum(node.network_seconds for node in nodes), rel=1e-3)  # parts are rounded up
    assert sum(row.experts + row.others for row in auto.kinds) == len(auto.plan.units)
    assert sum(row.tokens for row in auto.kinds) == pytest.approx(1)
    for row, said in zip(auto.survival, auto.plan.survival, strict=True):
        assert float(row.without_loss) == pytest.approx(float(said.without_loss))
        assert float(row.with_loss) == pytest.approx(float(said.with_loss))
    assert sum(example.number for example in auto.examples) == len(auto.plan.units)


def test_the_placement_is_balanced_or_the_recommended_one():
    assert report(policies=("mro", "balanced")).policy == "balanced"
    assert report(policies=("compact",)).policy == "compact"


# ---- presets


def test_everything_in_as_many_steps_as_windows_need():
    found = rows(report())
    # 72 kB pass each node, in 50 ms of windows: a version takes 2 steps, and a failure undoes 2 or 3
    for name in ("gemini", "baft"):
        assert (found[name].peer_bytes, found[name].steps_per_version) == (6, 2)
        assert (found[name].survives, found[name].repeated_steps, found[name].lost_steps) == (1, 2.5, 0)
        assert (found[name].steps_in_windows, found[name].delay) == (2, 0)
    assert found["auto"].peer_bytes == pytest.approx(32_000 / 12_000)
    assert (found["auto"].delay, found["auto"].steps_per_version) == (0, 1)
    slow = rows(report(network_gbps=0.0001))["gemini"]  # more than 64 steps: what loses the least time
    assert slow.steps_per_version is not None and slow.steps_per_version <= 64
    assert slow.delay is not None and slow.delay > 0


def test_more_copies_are_sent_to_more_nodes():
    found = rows(report(replication=3))
    for name in ("gemini", "baft"):  # baft: to the two previous nodes
        assert found[name].peer_bytes * found[name].steps_per_version == 24
    assert found["moetion"].peer_bytes <= 2 * 12


def test_copies_are_in_other_racks():
    found = rows(report(cluster=(4, 2, 1, 2, (1,))))
    assert [found[name].survives for name in ("gemini", "baft", "moetion", "auto")] == [1] * 4
    assert (found["lazarus"].survives, found["lazarus"].repeated_steps) == (0, 499.5)
    found = rows(report(cluster=(4, 4, 2, 2, (1,))))
    assert {row.survives for row in found.values()} == {1}  # replicas of all are in two racks


def test_active_replicas_alone():
    assert rows(report(cluster=(4, 4, 2, 1, (1,))))["lazarus"].survives == 1
    alone = rows(report())["lazarus"]
    assert (alone.peer_bytes, alone.survives, alone.repeated_steps, alone.delay) == (0, 0, 499.5, 0)
    shards = rows(report(cluster=(4, 4, 2, 1, (1,)), dense="sharded"))["lazarus"]
    assert shards.survives == 0  # whose shards nobody else has


def test_pec_saves_a_part_in_turn():
    row = rows(report(experts_per_save=2, persist_steps=100))["pec"]
    # each of 8 experts every 4th time: 0 to 3 checkpoints of 100 steps behind, a fourth of them on the lost node
    # and 0 to 99 steps since the newest checkpoint, which only experts go back to: the rest trains on all nodes
    assert row.lost_steps == pytest.approx(((0 + 100 + 200 + 300) / 4 + 49.5) / 4)
    assert row.steps_per_version == 400
    assert (row.repeated_steps, row.survives, row.peer_bytes, row.delay) == (0, 0, 0, None)
    assert row.store_bytes == pytest.approx((4000 + 2 * 1000) * 12 / 12_000 / 100)
    assert (
        rows(report(dense="sharded", persist_steps=100))["pec"].repeated_steps == 49.5
    )  # a shard is on one node alone
    twice = rows(report(cluster=(4, 4, 2, 1, (1,)), experts_per_save=2))["pec"]
    assert (twice.lost_steps, twice.repeated_steps, twice.survives) == (0, 0, 1)  # each expert trains on two nodes


def test_pec_keeps_more_in_own_memory():
    auto = report()
    row = rows(auto)["pec"]
    assert (row.experts_per_save, row.experts_per_snapshot) == (2, 4)
    assert row.restart_lost_steps == pytest.approx(
        1 / 2
    )  # half of them have a snapshot of the step, half of that before
    lost = rows(report(experts_per_snapshot=2, snapshot_interval=10))["pec"].restart_lost_steps
    assert lost == pytest.approx((0 + 10 + 20 + 30) / 4)
    assert rows(report(experts_per_snapshot=8))["pec"].restart_lost_steps == 0
    assert rows(report(experts_per_save=6))["pec"].experts_per_snapshot == 6
    assert "2 of 8 experts of each layer go to the store each 1,000 steps, and 4" in show_copies._levels(auto, row)


def test_selection_by_budget():
    half = rows(report(remote_bytes_per_step=4 * 12_000))["moetion"]
    assert half.peer_bytes == pytest.approx(4 * 12_000 / 12_000)
    assert half.steps_per_version == 2
    assert half.lost_steps == pytest.approx(0.5 / 4)
    # room for all: each copy is a step old, and its gradient is enough
    room = {"remote_bytes_per_step": 8 * 12_000}
    roomy = rows(report(**room))["moetion"]
    assert roomy.peer_bytes == pytest.approx(8 * 4000 / 12_000)
    assert (roomy.steps_per_version, roomy.lost_steps, roomy.delay) == (1, 0, 0)
    assert rows(report(no_replay=True, **room))["moetion"].peer_bytes == pytest.approx(8 * 12_000 / 12_000)
    links = rows(report())["moetion"]  # the default: 4 links of 1 MB/s for 0.1 s, which is room for all
    assert links == roomy
    half = rows(report(network_gbps=0.00096))["moetion"]  # 4 links of 120 kB/s: 4 experts
    assert (half.peer_bytes, half.steps_per_version) == (4, 2)
    eighth = rows(report(remote_bytes_per_step=12_000))["moetion"]  # one expert at a time
    assert (eighth.peer_bytes, eighth.steps_per_version) == (1, 8)
    assert eighth.lost_steps == pytest.approx(sum(range(8)) / 8 / 4)
    twice = rows(report(cluster=(4, 4, 2, 1, (1,))))["moetion"]
    assert (twice.peer_bytes, twice.lost_steps) == (0, 0)  # what two nodes train is not followed
    none = rows(report(remote_bytes_per_step=11_999))["moetion"]
    assert (none.peer_bytes, none.steps_per_version) == (0, None)
    assert none.lost_steps == pytest.approx(499.5 / 4)


def test_a_single_node_has_nobody_to_send_to():
    found = rows(report(cluster=(1, 8, 1, 1, (1,))))
    assert {row.peer_bytes for row in found.values()} == {0}
    assert {row.survives for row in found.values()} == {0}
    assert "there is only 1 node for --replication 2" in show_copies.advise_copies(
        report(cluster=(1, 8, 1, 1, (1,))), [*found.values()]
    )


# ---- the command


def plan(*arguments: str, folder) -> Done:
    return evermoe("plan", *arguments, folder=folder)


def test_report_and_json(tmp_path):
    cluster = "--nodes 4 --expert-slots 2 --experts 8 --layers 1 --policy balanced --policy spread --fail 1..3"
    done = plan(*cluster.split(), "--copies", *FLAGS.split(), "--json", "o.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "…" not in done.stdout
    text = " ".join(done.stdout.split())
    assert "12 bytes of state and 4 of gradient each; experts placed by balanced" in text
    assert "replayed 8 0 100% 32.0 kB 32.1% 120.0 kB 0" in text
    assert "1 node: 100% without a lost step; 2 nodes at once: " in text
    found = json.loads((tmp_path / "o.json").read_text())["copies"]
    assert CopySetting(**found["setting"]) == SMALL
    assert (found["parameters"], found["placement"]) == (12_000, "balanced")
    auto = report()
    assert [unit["bytes"] for unit in found["units"]] == [choice.bytes for choice in auto.plan.units]
    assert found["units"][0]["holders"] == [holder._asdict() for holder in auto.plan.units[0].holders]
    assert (found["units"][3]["name"], found["units"][8]["name"]) == ("layer 0, expert 3", "the dense part")
    assert found["nodes"] == [node._asdict() for node in auto.plan.nodes]
    assert [row["failures"] for row in found["survival"]] == [1, 2, 3]
    assert found["presets"] == [vars(row) for row in rows(auto).values()]
    assert found["advice"] in text
    assert found["advice"] == (
        "auto survives any loss of 1 node without a lost step: 2.67 bytes a parameter in each step, where copies of "
        "everything (gemini) take 6."
    )


def test_without_the_flag_nothing_changes(tmp_path):
    done = plan("--nodes", "4", "--expert-slots", "2", "--experts", "8", "--json", "o.json", folder=tmp_path)
    assert "is protected" not in done.stdout
    assert "copies" not in json.loads((tmp_path / "o.json").read_text())


def test_help_has_every_flag(tmp_path):
    done = plan("--help", folder=tmp_path)
    assert all(f"--{name.replace('_', '-')} " in done.stdout for name in vars(SMALL))
    text = " ".join(done.stdout.split())
    assert "parameters of one expert (7e6)" in text and "parameters outside experts (5e8)" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host-gib", "64"], "--host-gib: expected --copies with it, which is missing"),
        (["--no-replay"], "--no-replay: expected --copies with it, which is missing"),
        (["--copies", "--expert-parameters", "0"], "--expert-parameters: expected 1 to 1e+15, got 0"),
        (["--copies", "--expert-parameters", "nan"], "--expert-parameters: expected 1 to 1e+15, got nan"),
        (
            ["--copies", "--expert-parameters", "1e15", "--replication", "64"],
            "--expert-parameters: expected fewer than 2^60 bytes in all",
        ),
        (["--copies", "--dense-parameters", "-1"], "--dense-parameters: expected 0 to"),
        (["--copies", "--dense", "half"], "argument --dense: invalid choice: 'half'"),
        (["--copies", "--state-bytes", "0"], "--state-bytes: expected 1 to 64, got 0"),
        (["--copies", "--gradient-bytes", "65"], "--gradient-bytes: expected 1 to 64, got 65"),
        (["--copies", "--step-seconds", "0"], "--step-seconds: expected 1e-06 to 1e+06, got 0"),
        (["--copies", "--network-gbps", "inf"], "--network-gbps: expected 0.001 to 1e+06, got inf"),
        (["--copies", "--network-idle", "40"], "--network-idle: expected 0 to 1, got 40"),
        (["--copies", "--host-link-gbps", "0"], "--host-link-gbps: expected 0.001 to"),
        (["--copies", "--host-gib", "-1"], "--host-gib: expected 0 to"),
        (["--copies", "--device-gib", "-1"], "--device-gib: expected 0 to"),
        (["--copies", "--mtbf-hours", "0"], "--mtbf-hours: expected 0.001 to"),
        (["--copies", "--replication", "0"], "--replication: expected 1 to 64, got 0"),
        (["--copies", "--budget", "2"], "--budget: expected 0 to 1, got 2"),
        (["--copies", "--persist-steps", "1"], "--persist-steps: expected 2 to 1e+06, got 1"),
        (["--copies", "--experts-per-save", "9"], "--experts-per-save: expected 1 to 8, the experts of a layer, got 9"),
        (
            ["--copies", "--experts-per-save", "3", "--experts-per-snapshot", "2"],
            "--experts-per-snapshot: expected 3 to 8",
        ),
        (["--copies", "--snapshot-interval", "0"], "--snapshot-interval: expected 1 to"),
        (["--copies", "--nodes", "131073"], "--nodes: expected at most 2^17 with --copies, got 131073"),
        (["--copies", "--layers", "40000"], "--copies: expected at most 2^18 experts, got 40000 × 8"),
    ],
)
def test_what_cannot_be_planned(tmp_path, capsys, monkeypatch, flags, message):
    from evermoe.cli.main import main

    monkeypatch.chdir(tmp_path)
    try:
        code = main(["plan", "--nodes", "4", "--expert-slots", "4", "--experts", "8", "--json", "out.json", *flags])
    except SystemExit as error:
        code = error.code
    assert code == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []
