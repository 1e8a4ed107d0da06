"""`evermoe plan`: flags, files and messages; the advice on constructed comparisons."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from evermoe.cli.plan.advice import advise, best, percent
from evermoe.cli.plan.compare import Cluster, Comparison, Heavy, LoadSummary, Result, compare
from evermoe.cli.plan.loads import read_load
from evermoe.planning import allocate, place, recovery_probability
from evermoe.planning.dispatch import imbalance
from evermoe.planning.placement import POLICIES
from evermoe.planning.survival import Survival
from support.commands import Done, evermoe, evermoe_process

SMALL = ["--nodes", "4", "--expert-slots", "4", "--experts", "8"]


def plan(*arguments: str, folder) -> Done:
    return evermoe("plan", *arguments, folder=folder)


# ---- the command


def test_report_of_the_documented_example(tmp_path):
    example = "--nodes 32 --expert-slots 9 --experts 256 --layers 58 --load zipf:1.0 --fail 1..4"
    done = plan(*example.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in done.stdout and "\x1b" not in done.stdout
    text = " ".join(done.stdout.split())
    assert "32 nodes × 9 slots = 288 for 256 experts; min_replicas 2: lowered to 1; 16 slots per" in text
    assert "zipf:1.0, 58 layers; hottest expert 16.3% of its layer's tokens" in text
    for policy in POLICIES:
        assert sum(line.split()[:1] == [policy] for line in lines) == 1 + 4  # the table and four charts
    assert "survival when 1 node fails" in text and "survival when 4 nodes fail" in text
    assert "16 slots per node instead of 9 (2 × 256 / 32, rounded up) give each two" in text
    assert list(tmp_path.iterdir()) == []


def test_json_is_what_the_planners_say(tmp_path):
    flags = "--nodes 6 --expert-slots 5 --experts 12 --layers 3 --load lognormal:1.2 --seed 7"
    flags += " --min-replicas 2 --fail 1,3..4"
    policies = ["--policy", "spread", "--policy", "balanced", "--policy", "spread"]
    files = ["--json", "new/out.json", "--plot", "new/out.png"]
    done = plan(*flags.split(), *policies, "--domain-size", "1", *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote new/out.json" in done.stdout and "wrote new/out.png" in done.stdout
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out.json", "out.png"]
    assert (tmp_path / "new/out.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "new/out.json").read_text())
    load = np.array(found["load"])
    np.testing.assert_array_equal(load, read_load("lognormal:1.2", 3, 12, seed=7))
    assert (found["layers"], found["experts"], found["failures"], found["seed"]) == (3, 12, [1, 3, 4], 7)
    replicas = [allocate(row, 6, 5) for row in load]
    np.testing.assert_array_equal(found["replicas"], replicas)
    assert list(found["policies"]) == ["spread", "balanced"]
    for policy, result in found["policies"].items():
        matrices = [place(r, 6, 5, policy, load=row).matrix for r, row in zip(replicas, load, strict=True)]
        held = [[np.bincount(experts, minlength=12) for experts in layer] for layer in result["experts_of_nodes"]]
        np.testing.assert_array_equal(held, matrices)
        pairs = list(zip(matrices, load, strict=True))
        assert result["imbalance_even"] == [imbalance(matrix, row) for matrix, row in pairs]
        assert result["imbalance_balanced"] == [imbalance(matrix, row, "balanced") for matrix, row in pairs]
        joined = np.hstack(matrices)
        assert result["distinct_domains"] == (joined > 0).sum(0).min()
        for row in result["survival"]:
            assert row["probability"] == recovery_probability(joined, row["failures"]).probability
            assert (row["error"], row["samples"]) == (0.0, None)
    assert found["recommended"] in found["policies"]
    assert found["advice"]
    assert " ".join(found["advice"]) in " ".join(done.stdout.split())


def test_domains_fail_together(tmp_path):
    done = plan(*SMALL, "--domain-size", "2", "--layers", "2", "--load", "zipf:1", "--json", "o.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 nodes in 2 domains of 2" in done.stdout
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["failures"] == [1, 2]  # the default stops at all domains
    spread, compact = found["policies"]["balanced"], found["policies"]["compact"]
    assert [row["probability"] for row in spread["survival"]] == [1.0, 0.0]
    assert (spread["distinct_domains"], compact["distinct_domains"]) == (2, 1)
    assert compact["survival"][0]["probability"] == 0.0


FILES = {
    "row.npy": lambda path: np.save(path, np.array([4, 1, 1, 2])),
    "layers.npy": lambda path: np.save(path, np.array([[4.0, 1, 1, 2]])),
    "row.json": lambda path: path.write_text("[4, 1, 1, 2]"),
    "layers.json": lambda path: path.write_text("[[4, 1, 1, 2]]"),
    "commas.csv": lambda path: path.write_text("4,1, 1,2\n\n"),
    "blanks.txt": lambda path: path.write_text("4 1 1 2"),
}


@pytest.mark.parametrize("name", FILES)
def test_load_files(tmp_path, name):
    FILES[name](tmp_path / name)
    load = read_load(str(tmp_path / name), None, 4, seed=0)
    assert load.dtype == np.float64
    np.testing.assert_array_equal(load, [[4, 1, 1, 2]])


def test_a_file_says_how_many_layers_and_experts_there_are(tmp_path):
    (tmp_path / "load.csv").write_text("4,1,1,2\n0,0,0,0\n0,0,5,5\n")
    flags = ["--nodes", "4", "--expert-slots", "2", "--load", "load.csv"]
    done = plan(*flags, "--json", "o.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "load.csv, 3 layers; hottest expert 50.0% of its layer's tokens (expert 0 of layer 0;" in done.stdout
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["layers"], found["experts"]) == (3, 4)
    assert found["load_summary"] == {
        "hottest_share": 0.5,
        "hottest_layer": 0,
        "hottest_expert": 0,
        "mean_share": pytest.approx((0.5 + 0.25 + 0.5) / 3),
        "top2_share": 1.0,
    }
    assert "--layers: load.csv has 3, got 2" in plan(*flags, "--layers", "2", folder=tmp_path).stderr
    assert "--experts: load.csv has 4, got 8" in plan(*flags, "--experts", "8", folder=tmp_path).stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not a readable .json file"),
        ("a.json", "[" * 100_000, "not a readable .json file"),
        ("a.json", '{"load": [1]}', "expected numbers, a row of experts"),
        ("a.json", '["a", "b"]', "expected numbers, a row of experts"),
        ("a.json", "[[1, 2], [3]]", "the rows are not equally long"),
        ("a.json", "[1, NaN]", "expected numbers that are finite"),
        ("a.json", "[]", "expected numbers, a row of experts"),
        ("a.csv", "expert,load\n", "not a readable .csv file"),
        ("a.csv", "1,-2", "finite and 0 or more"),
        ("a.csv", "1,1e400", "finite and 0 or more"),
        ("a.txt", "1\n2\n3", "write experts side by side"),
        ("a.npy", "no numpy file", "not a readable .npy file"),
        ("a.npy", "", "No data left"),
        ("a.parquet", "", "--load: expected uniform, zipf:S"),
    ],
)
def test_load_files_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"--load") as caught:
        read_load(str(tmp_path / name), None, None, seed=0)
    assert message in str(caught.value)


def test_missing_and_pickled_files(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.npy: No such file"):
        read_load(str(tmp_path / "gone.npy"), None, None, seed=0)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a readable"):
        read_load(str(tmp_path / "objects.npy"), None, None, seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "0"], "--nodes: expected 1 to 1048576, got 0"),
        (["--nodes", "9" * 30], "--nodes: expected 1 to 1048576, got 999"),
        (["--expert-slots", "-1"], "--expert-slots: expected 1 to"),
        (["--expert-slots", "1"], "8 experts do not fit in 4 nodes × 1 slots = 4; use at least 2 slots"),
        (["--experts", "0"], "--experts: expected 1 or more, got 0"),
        (["--experts", "9" * 30], "--experts: expected at most 2^24"),
        (["--layers", "0"], "--layers: expected 1 or more, got 0"),
        (
            ["--nodes", "999999", "--experts", "32", "--expert-slots", "1"],
            "expected at most 2^24 nodes × experts and 2^26",
        ),
        (["--min-replicas", "0"], "--min-replicas: expected 1 to"),
        (["--seed", "-1"], "--seed: expected 0 or more, got -1"),
        (["--domain-size", "5"], "--domain-size: expected at most 4, the number of nodes, got 5"),
        (["--fail", "0"], "--fail 0: expected numbers from 1 to 4"),
        (["--fail", "5"], "--fail 5: expected numbers from 1 to 4"),
        (["--fail", "3..1"], "--fail 3..1: expected numbers from 1 to 4"),
        (["--fail", "one"], "--fail one: expected numbers from 1 to 4, such as 2, or 1..4, or 1,3"),
        (["--fail", "3", "--domain-size", "2"], "--fail 3: expected numbers from 1 to 2"),
        (["--nodes", "99", "--fail", "1..99"], "--fail 1..99: expected at most 64 numbers"),
        (["--load", "zipf"], "--load zipf: expected zipf:S"),
        (["--load", "zipf:nan"], "--load zipf:nan: expected zipf:S"),
        (["--load", "lognormal:-1"], "--load lognormal:-1: expected lognormal:SIGMA"),
        (["--load", "hot:87"], "--load hot:87: expected hot:PERCENT@COUNT"),
        (["--load", "hot:101@2"], "--load hot:101@2: expected hot:PERCENT@COUNT"),
        (["--load", "hot:50@8"], "--load hot:50@8: expected fewer hot experts than 8"),
        (["--load", "uniform:1"], "--load uniform:1: uniform has no argument"),
        (["--load", "poisson:1"], "--load: expected uniform, zipf:S, lognormal:SIGMA, hot:PERCENT@COUNT, or a file"),
        (["--policy", "best"], "argument --policy: invalid choice: 'best'"),
        (["--json", "."], "--json .: cannot be written"),
        (["--plot", "out.png", "--json", "."], "--json .: cannot be written: Is a directory"),
        (["--plot", "out.png", "--json", "file/out.json"], "--json file/out.json: cannot be written"),
    ],
)
def test_what_cannot_be_planned(tmp_path, capsys, monkeypatch, flags, message):
    from evermoe.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    try:
        code = main(["plan", *SMALL, "--json", "out.json", *flags])
    except SystemExit as error:
        code = error.code
    assert code == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.startswith(("evermoe plan: ", "usage: evermoe plan"))
    assert told.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_experts_are_needed_without_a_file(tmp_path):
    done = plan("--nodes", "4", "--expert-slots", "2", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "evermoe plan: missing: --experts, those of each layer (or --load with a file)\n"


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("plan", ["--nodes", "--expert-slots", "--experts"]),
        ("plan --model Qwen/Qwen3-30B-A3B", ["--nodes", "--memory"]),
        ("simulate", ["--model", "--step-seconds", "--nodes"]),
        ("simulate --model OpenAI/GPT-OSS-20b", ["--step-seconds", "--nodes"]),
        ("export", ["--to", "CHECKPOINT", "OUT"]),
    ],
)
def test_all_missing_flags_are_named_at_once_in_one_line(tmp_path, flags, missing):
    done = evermoe(*flags.split(), folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert all(flag in done.stderr for flag in missing)


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_says_what_to_install(tmp_path, missing):
    flags = [*SMALL, "--policy", "spread"]
    done = evermoe_process("plan", *flags, "--plot", "never-written.png", folder=tmp_path, missing=missing)
    assert done.returncode == 2
    assert f"evermoe plan needs {missing}" in done.stderr and "evermoe[cli,plot]" in done.stderr
    assert done.stdout == ""
    alone = evermoe_process("plan", *flags, folder=tmp_path, missing=missing)
    assert alone.returncode == (2 if missing == "rich" else 0)  # matplotlib is for --plot alone


def test_help_has_every_flag_and_an_example(tmp_path):
    done = plan("--help", folder=tmp_path)
    assert done.returncode == 0
    flags = "nodes expert-slots domain-size experts layers load seed min-replicas fail policy plot json"
    assert all(f"--{flag} " in done.stdout for flag in flags.split())
    assert (
        "evermoe plan --nodes 32 --expert-slots 9 --experts 256 --layers 58 --load zipf:1.0 --fail 1..4" in done.stdout
    )


def test_ascii_where_the_terminal_has_nothing_else(tmp_path):
    command = [sys.executable, "-m", "evermoe", "plan", *SMALL]
    environment = {"PYTHONIOENCODING": "ascii:replace", "PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"balanced ########################################" in done.stdout


# ---- synthetic loads


def test_synthetic_loads():
    zipf = read_load("zipf:2", 3, 4, seed=1)
    np.testing.assert_allclose(np.sort(zipf, axis=1)[:, ::-1], [[1, 1 / 4, 1 / 9, 1 / 16]] * 3)
    hot = read_load("hot:87@2", 2, 10, seed=1)
    np.testing.assert_allclose(np.sort(hot, axis=1), [[0.13 / 8] * 8 + [0.435] * 2] * 2)
    np.testing.assert_array_equal(read_load("uniform", None, 3, seed=1), [[1, 1, 1]])
    assert np.isfinite(read_load("lognormal:1e300", 2, 50, seed=1)).all()
    logs = np.log(read_load("lognormal:1.5", 1, 20_000, seed=1))
    assert abs(logs.std() - 1.5) < 0.03


def test_each_layer_and_each_seed_has_its_own_order():
    load = read_load("zipf:1", 4, 64, seed=0)
    assert len({tuple(row) for row in load}) == 4
    np.testing.assert_array_equal(load, read_load("zipf:1", 4, 64, seed=0))
    assert not np.array_equal(load, read_load("zipf:1", 4, 64, seed=1))


# ---- the comparison


def test_a_replica_that_is_too_heavy_is_found_and_its_cure_works():
    load = np.array([[1.0] * 8, [93.0, *[1.0] * 7]])
    found = compare(load, Cluster(4, 2, 1, 1, (1,)), ("balanced",))
    heavy = found.heavy
    assert heavy is not None
    assert (heavy.layer, heavy.expert, heavy.replicas) == (1, 0, 1)
    assert heavy.times_mean == pytest.approx(4 * 0.93)
    assert max(found.results[0].balanced) >= heavy.times_mean  # no split helps
    assert compare(load, Cluster(4, heavy.slots, 1, 1, (1,)), ("balanced",)).heavy is None
    assert compare(load, Cluster(4, heavy.slots - 1, 1, 1, (1,)), ("balanced",)).heavy is not None


def test_no_replica_is_too_heavy_where_nodes_can_be_even():
    assert compare(np.ones((2, 8)), Cluster(8, 1, 1, 1, (1,)), ("spread",)).heavy is None
    assert compare(np.zeros((1, 6)), Cluster(3, 2, 1, 1, (1,)), ("spread",)).heavy is None


def test_the_last_domain_may_be_smaller():
    assert Cluster(5, 1, 1, 2, ()).domains == [[0, 1], [2, 3], [4]]


# ---- the advice

SUMMARY = LoadSummary(0.5, 0, 0, 0.5, 0.6)


def result(
    policy, balanced: float, *survival: float, even: float = 2.0, distinct: int = 2, error: float = 0.0
) -> Result:
    found = tuple(Survival(value, error, 1000 if error else None) for value in survival)
    return Result(policy, (1.0, even), (1.0, balanced), distinct, found, 0.001, ())


def comparison(
    *results: Result, failures=(1, 2), replicas=((2, 2, 4),), cluster=(4, 2, 2, 1), heavy=None
) -> Comparison:
    return Comparison(Cluster(*cluster, tuple(failures)), SUMMARY, np.array(replicas), heavy, results)


def test_takes_the_most_even_of_those_that_are_safe_enough():
    mro, balanced = result("mro", 1.63, 1.0, 0.972), result("balanced", 1.01, 1.0, 0.968)
    found = comparison(mro, balanced)
    assert best(found) == (balanced, 1)
    assert advise(found)[0] == (
        "Take balanced: busiest node 1.01 × the mean in the worst layer against 1.63 with mro, and 96.8% of all losses "
        "of 2 nodes at once survived against 97.2%."
    )


def test_evenness_may_not_cost_more_than_five_points():
    mro = result("mro", 1.63, 1.0, 0.972)
    assert best(comparison(mro, result("spread", 1.0, 1.0, 0.93)))[0].policy == "spread"
    found = comparison(mro, result("spread", 1.0, 1.0, 0.92))
    assert best(found)[0] is mro
    assert "Take mro: busiest node 1.63 × the mean in the worst layer against 1.00 with spread" in advise(found)[0]


def test_a_loss_that_can_be_survived_for_sure_must_be():
    safe = result("safest", 1.9, 1.0, 0.90)
    found = comparison(result("compact", 1.0, 0.97, 0.96, distinct=1), safe)
    assert best(found) == (safe, 0)  # two losses cannot undo what one decided
    assert "100% of all losses of 1 node survived against 97.0%." in advise(found)[0]


def test_the_error_of_samples_counts_in_favour():
    sampled = result("spread", 1.0, 1.0, 0.915, error=0.01)
    assert best(comparison(result("mro", 1.6, 1.0, 0.972), sampled))[0] is sampled
    assert "91.5%±1.0" in advise(comparison(sampled))[0]


def test_balance_decides_where_little_survives_anyway():
    mro, balanced = result("mro", 2.99, 0.125, 0.01, distinct=1), result("balanced", 1.01, 0.0, 0.0, distinct=1)
    found = comparison(mro, balanced)
    assert best(found) == (balanced, None)
    assert advise(found)[0] == (
        "No policy survives half of all losses of 1 node, so evenness decides. Take balanced: busiest node 1.01 × the "
        "mean in the worst layer against 2.99 with mro, and 0% of all losses of 1 node survived against 12.5%."
    )


def test_one_policy_and_equal_policies():
    mro, spread = result("mro", 1.0, 1.0, 0.9), result("spread", 1.0, 1.0, 0.9)
    assert advise(comparison(mro))[0] == (
        "mro: busiest node 1.00 × the mean in the worst layer, 90.0% of all losses of 2 nodes at once survived."
    )
    assert advise(comparison(spread, mro))[0].startswith("Take mro: ")
    assert advise(comparison(spread, mro))[0].endswith("survived; no other policy is better at either.")


def test_tells_what_one_loss_takes_and_what_helps():
    alone = result("balanced", 1.0, 0.0, 0.0, distinct=1)
    few = comparison(alone, replicas=[[1, 1, 1, 1, 1, 1, 2]])  # 7 experts on 4 nodes × 2 slots
    assert "6 of 7 have a single replica: 4 slots per node instead of 2 (2 × 7 / 4, rounded up)" in advise(few)[1]
    asked_for_one = comparison(alone, replicas=[[1, 3, 4]])
    assert "--min-replicas 2 gives each two in the same 2 slots" in advise(asked_for_one)[1]
    together = comparison(replace(alone, policy="compact"))
    assert "compact puts them into one node; balanced and safest avoid that" in advise(together)[1]
    uneven = comparison(alone, cluster=(4, 2, 2, 3))
    assert "sizes of the domains" in advise(uneven)[1]
    one_domain = comparison(alone, cluster=(4, 2, 2, 4), failures=(1,))
    assert advise(one_domain)[1] == "There is only one domain: no placement survives its loss."
    assert all("loses experts" not in line for line in advise(comparison(result("mro", 1.0, 1.0, 0.9))))


def test_copies_add_one_node():
    assert "any loss of 2 nodes at once is survived" in advise(comparison(result("mro", 1.0, 1.0, 0.9)))[-1]
    everywhere = comparison(result("mro", 1.0, 1.0, 1.0, distinct=4))
    assert "any loss of 3 nodes at once is survived" in advise(everywhere)[-1]
    assert "do not look at domains" in advise(comparison(result("mro", 1.0, 1.0, 0.9), cluster=(4, 2, 2, 2)))[-1]
    single = comparison(result("mro", 1.0, 0.0, distinct=1), cluster=(1, 2, 2, 1), failures=(1,))
    assert "need a second node" in advise(single)[-1]


def test_names_the_replica_that_is_too_heavy():
    heavy = Heavy(layer=3, expert=7, replicas=2, times_mean=1.859, slots=5)
    assert advise(comparison(result("mro", 2.0, 1.0, 0.9), heavy=heavy))[-1] == (
        "Expert 7 of layer 3 is too hot for any placement, as each of its 2 replicas bears 1.86 × a node's mean load: "
        "5 slots per node instead of 2 would avoid that."
    )


def test_percent_never_rounds_to_certainty():
    assert [percent(part) for part in (0.0, 1e-15, 1e-9, 0.5, 0.9994, 0.99951, math.nextafter(1, 0), 1.0)] == [
        "0%",
        "0%",
        "<0.1%",
        "50.0%",
        "99.9%",
        ">99.9%",
        "100%",
        "100%",
    ]
