"""Each script of `examples/` as a user runs it: in a process of its own, from another folder."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import evermoe

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_SECONDS = 300
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 60)
PRINTED = {
    "01_ops": ["the operations and the loop agree"],
    "02_moe_layer": [r"balance 0.1: loss \S+ -> \S+", r"layers found: \['experts'\]"],
    "03_session": ["recovered at step 10 with 2 workers", "30 steps committed, 0 lost"],
    "04_optimizer_calibration": [
        "evermoe.optim.AdamW +can be repeated: evermoe",
        "the replica of 2080 parameters has the trainer's bits: True",
    ],
    "05_replica_node": [
        r"worker 0 recovered at step 12; it fetched 2 units: \{'(peer|local memory)': 2\}",
        "30 steps, loss .*, 0 steps lost",
        "the replica node followed 30 steps and trained none",
    ],
    "06_pipeline": [
        "stage 0 lost its peer in step 6",
        "stage 1 is ready at step 6",
        "step 15: loss",
        "[1-9][0-9]* digests of states and copies compared, 0 differ",
    ],
    "07_trace": ["windows in which the network is idle", "the trace of 2 ranks has [1-9][0-9]+ spans"],
    "08_plan_api": ["balanced +busiest node 1.00 x the mean", "expert 11: replayed", "auto .* nothing is delayed"],
    "09_checkpoint": [
        "resumed training has the same bits as 40 uninterrupted steps: True",
        "a plain model has the same weights: True",
    ],
    "10_transformers": ["20 steps committed, 0 lost", r"transformers loads it: loss \d"],
    "11_torchrun": [
        r"start 0 of worker 0: a job of 2 that begins at step 0",
        r"start 1 of worker 0: a job of 2 that begins at step (10|11)",
        "30 steps, 0 lost",
    ],
    "12_larger_than_a_device": [r"worker 0 held [46] of 12 experts, then 6", "8 steps, 0 lost, loss"],
    "13_rl": [
        r"training resumes at step 7 with 2 members",
        r"training resumes at step 13 with 1 member",
        r"step 24: reward 0\.[4-9]\d, ratio to the rollout 1 ± \de-0[67], .* 1 workers",
        "24 steps committed, 0 lost",
    ],
    "14_upcycle": ["the first loss is that of the dense model: True", "16 steps committed, 0 lost"],
    "15_streaming": [
        "training resumes at step 4 with 2 members",
        "400 examples, each used once in each of 2 epochs: True",
    ],
    "17_islands": [
        r"step 10: 2 processes train",
        r"step \d+: 4 processes train",
        r"0 steps lost, loss \d",
    ],
    "16_packing": [
        "training resumes at step 9 with 2 members",
        "240 sequences, [23].% of the tokens are digits",
        "the sequences are those that one process reads: True",
    ],
}
"""By example, patterns of lines that it must print."""


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


def run(name, tmp_path, *arguments):
    """Run an example; return what it prints."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{name}: not done in {LIMIT_SECONDS} s; so far:\n{process.communicate()[0]}") from None
    assert process.returncode == 0, printed
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path != temporary]
    assert not [path for path in left if "torchinductor" not in path], f"{name} leaves files behind"
    return printed


@pytest.mark.parametrize("name", sorted(PRINTED))
@pytest.mark.few(1)
def test_example_runs_and_prints_what_it_promises(name, tmp_path):
    printed = run(name, tmp_path)
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed), f"{name}: expected {pattern!r} in\n{printed}"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def plain_rl():
    """Return the gradient's norm in each step of the loop in one process, without a session."""
    example = load("13_rl")
    torch.manual_seed(0)
    prompts, model = example.all_prompts(), example.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(prompts), batch_size=example.PROMPTS)
    norms = []
    for step in range(example.STEPS):
        indices = sampler.share(0, 1).indices
        sampler.advance()
        asked = prompts[indices].repeat_interleave(example.ANSWERS, 0)
        tokens, chances, ids = example.generate(model, asked, example.noise_of(indices, step))
        loss, drift = example.loss_of(model, tokens, chances, ids, example.advantages_of(tokens)[1])
        assert drift < 1e-5, "training computes the probabilities of the rollout"
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("phase", ["training", "generation"])
@pytest.mark.few(1)
def test_reinforcement_learning_equals_one_process_through_a_kill_in_either_phase(phase, tmp_path):
    printed = run("13_rl", tmp_path, phase)
    dies_in = load("13_rl").KILLS[phase][1]
    assert f"training resumes at step {dies_in} with 2 members" in printed
    found = re.findall(r"step +(\d+): .* norm ([\d.]+), (\d) workers", printed)
    assert [(int(step), int(size)) for step, _, size in found] == [(n, 3 - (n > dies_in)) for n in range(4, 25, 4)]
    for step, norm, _ in found:
        assert float(norm) == pytest.approx(plain_rl()[int(step) - 1], abs=1e-5)


@pytest.mark.full
def test_an_upcycled_model_computes_what_the_dense_one_does_until_columns_are_drawn_again(tmp_path):
    from evermoe.integrations.transformers import make_elastic

    example = load("14_upcycle")
    example.make_dense(tmp_path)
    dense = example.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = example.batches()[:20]
    with torch.no_grad():
        expected = dense(input_ids=tokens).logits
        found = make_elastic(example.upcycle(dense, 4, 2))(input_ids=tokens).logits
        other = example.upcycle(dense, 4, 2, drop=0.5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (other(input_ids=tokens).logits - expected).abs().max() > 1e-2
    experts, mlp = other.model.layers[0].mlp.experts, dense.model.layers[0].mlp
    for expert in range(4):
        kept = (experts.down_proj[expert] == mlp.down_proj.weight).all(0)
        assert kept.sum() == kept.numel() // 2
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal((experts.gate_up_proj[expert] == gate_up).all(1), kept.repeat(2))
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])
