"""The jobs of `python -m benches.compare`, as real processes: judged by the workers' own logs and by plain PyTorch."""

from __future__ import annotations

import argparse
import itertools
import json

import pytest
import torch

from benches.compare.__main__ import main
from benches.compare.candidates import CANDIDATES
from evermoe.data.sampler import ElasticSampler
from evermoe.demo.corpus import Corpus
from evermoe.demo.train import build
from evermoe.process.reports import EventFile
from support.commands import call

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 32, "experts": 4, "top_k": 2, "sequence": 32}
FLAGS = {**SIZES, "batch": 12, "seed": 3, "held_out": 24, "limit": 250}
LIMIT = 500
"""Seconds: each candidate starts its processes, one after the other, and has its own limit in `FLAGS`."""
pytestmark = pytest.mark.timeout(LIMIT + 60)
TOLERANCE = 2e-3
"""Sums in another order; a kill changes that order from its step on."""


def compare(folder, *flags, code=0):
    """Runs it, and returns its JSON."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    sizes = [part for name, value in FLAGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    keep = ["--json", "out.json", "--keep", "kept"]
    done = call(main, *sizes, "--data", str(text), *keep, *flags, folder=folder, limit=LIMIT)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())["candidates"]


def log(folder, candidate, worker):
    """Return what a worker has written, to check the figures against."""
    return EventFile(folder / "kept" / candidate / f"events-{worker}.jsonl").read()


def steps_taken(rows):
    return [row["step"] for row in rows if row["event"] == "taken"]


def plain_loss(folder, steps):
    """The held-out loss of one process that knows of no failures and of no evermoe session."""
    options = argparse.Namespace(**FLAGS, balance=0.0, learning_rate=3e-3)
    model, optimizer = build(options, torch.device("cpu"))
    corpus = Corpus(str(folder / "text.txt"), options.sequence)
    sampler = ElasticSampler(len(corpus) - options.held_out, options.batch, seed=options.seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(corpus[sampler.batch()]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sampler.advance()
    with torch.no_grad():
        return float(model.loss(corpus[torch.arange(len(corpus) - options.held_out, len(corpus))]))


def check_figures(found, folder, steps):
    outcome = found["outcome"]
    assert found["failure"] is None
    assert outcome["steps"] == steps
    assert outcome["final_loss"] == pytest.approx(plain_loss(folder, steps), abs=TOLERANCE)
    assert outcome["peak_memory_bytes"] > 4 * 50e6
    assert outcome["sent_bytes"] is None or outcome["sent_bytes"] > 1e6


@pytest.mark.long
def test_restart_loses_exactly_the_steps_since_the_checkpoint(tmp_path):
    flags = ["--candidate", "ds", "--steps", "24", "--checkpoint-interval", "5", "--kill", "2@18"]
    found = compare(tmp_path, *flags)["ds"]
    check_figures(found, tmp_path, 24)
    rows = log(tmp_path, "ds", 0)
    starts = [row["step"] for row in rows if row["event"] == "resumed"]
    assert starts[0] == 0 and starts[1] in (10, 15)  # 15 may have been under way
    taken = steps_taken(rows)
    assert taken == [*range(18), *range(starts[1], 24)]
    again = len(taken) - len(set(taken))
    assert found["outcome"]["lost_steps"] == again == 18 - starts[1]
    tokens = FLAGS["batch"] * FLAGS["sequence"] * FLAGS["top_k"] * FLAGS["layers"]
    assert found["outcome"]["lost_tokens"] == again * tokens
    members = {row["members"] for row in rows if row["event"] == "taken" and row["step"] >= 18}
    assert members == {2}  # of three that are left, two fill a group


@pytest.mark.long
def test_group_that_loses_a_worker_is_dropped_completely(tmp_path):
    found = compare(tmp_path, "--candidate", "ds-ft", "--steps", "40", "--kill", "2@15")["ds-ft"]
    check_figures(found, tmp_path, 40)
    assert (found["outcome"]["kills"], found["outcome"]["lost_steps"]) == (1, 0)
    rows = log(tmp_path, "ds-ft", 0)
    assert steps_taken(rows) == list(range(40))
    assert [row["members"] for row in rows if row["event"] == "taken"] == [4] * 15 + [2] * 25
    fellow = log(tmp_path, "ds-ft", 3)
    assert steps_taken(fellow) == list(range(15))
    assert fellow[-1]["event"] == "idle"


@pytest.mark.long
def test_torchft_heals_who_joins(tmp_path):
    flags = ["--candidate", "torchft", "--steps", "600", "--kill", "2@10", "--join", "20", "--hang-timeout", "6"]
    found = compare(tmp_path, *flags)["torchft"]
    check_figures(found, tmp_path, 600)
    assert (found["outcome"]["kills"], found["outcome"]["joins"], found["outcome"]["lost_steps"]) == (1, 1, 0)
    assert sorted(set(steps_taken(log(tmp_path, "torchft", 0)))) == list(range(600))
    joined = log(tmp_path, "torchft", 4)
    healed = [row["step"] for row in joined if row["event"] == "resumed"]
    first = steps_taken(joined)[0]
    assert first in healed and first > 0


@pytest.mark.long
def test_group_is_formed_again_when_a_worker_joins(tmp_path):
    flags = ["--candidate", "ds-ft", "--steps", "1200", "--kill", "2@20", "--join", "30"]
    found = compare(tmp_path, *flags)["ds-ft"]
    check_figures(found, tmp_path, 1200)
    assert found["outcome"]["lost_steps"] == 0
    members = [row["members"] for row in log(tmp_path, "ds-ft", 0) if row["event"] == "taken"]
    assert [number for number, _ in itertools.groupby(members)] == [4, 2, 4]
    resumed = [row for row in log(tmp_path, "ds-ft", 4) if row["event"] == "resumed"]
    assert resumed[0]["source"] == "peers"


@pytest.mark.long
def test_all_go_back_to_a_checkpoint_when_no_complete_set_of_experts_is_left(tmp_path):
    flags = ["--kill", "0@33", "--kill", "2@33", "--ft-checkpoint-interval", "10"]
    found = compare(tmp_path, "--candidate", "ds-ft", "--steps", "40", *flags)["ds-ft"]
    check_figures(found, tmp_path, 40)
    rows = log(tmp_path, "ds-ft", 1)
    resumed = [row for row in rows if row["event"] == "resumed"][-1]
    assert (resumed["source"], resumed["members"]) == ("checkpoint", 2)
    assert found["outcome"]["lost_steps"] == 33 - resumed["step"]
    assert resumed["step"] in (20, 30)


@pytest.mark.long
def test_all_candidates_train_the_same_model_where_nothing_fails(tmp_path):
    found = compare(tmp_path, "--steps", "30", "--plot", "out.png")
    names = [name for name, each in CANDIDATES.items() if each.package is None]
    assert set(names) <= set(found)
    for name in found:
        check_figures(found[name], tmp_path, 30)
        assert (found[name]["outcome"]["lost_steps"], found[name]["outcome"]["plt"]) == (0, 0.0)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_trace_kills_and_joins_for_real(tmp_path):
    nodes = "".join(f"0,add,n{number}\n" for number in range(4))
    (tmp_path / "trace.csv").write_text(f"{nodes}20000,remove,n1\n30000,add,n9\n600000,remove,n2\n")
    trace = ["--trace", "trace.csv", "--speedup", "10"]
    found = compare(tmp_path, "--candidate", "auto", "--steps", "400", *trace)["auto"]
    check_figures(found, tmp_path, 400)
    assert (found["outcome"]["kills"], found["outcome"]["joins"]) == (1, 1)
    assert steps_taken(log(tmp_path, "auto", 4))
