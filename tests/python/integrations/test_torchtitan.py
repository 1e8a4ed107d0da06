"""torchtitan's DeepSeek-V3 debug model in two islands of FSDP2: `examples/torchtitan/`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import evermoe

pytest.importorskip("torchtitan")
EXAMPLE = Path(__file__).parents[3] / "examples/torchtitan"
LIMIT_SECONDS = 300
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 60)


@pytest.fixture
def world_of_one():
    """A group of torch.distributed with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def example(monkeypatch):
    """The example's modules, as its script imports them."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import train

    return train


def train_by_torchtitan(example):
    """Return the losses of torchtitan's own steps in one process, without a session."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_

    config = example.configure()
    alone = ParallelDims.from_config(config.parallelism, 1)
    model, loss_function = example.build(config, alone), config.loss.loss_fn.build()
    optimizers = config.optimizer.build(model_parts=[model])
    config.model_spec.post_optimizer_build_fn(optimizers, [model], alone)
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=example.STEPS)
    data, found = example.samples(), []
    sampler = evermoe.ElasticSampler(len(data), batch_size=example.BATCH_SIZE)
    for _ in range(example.STEPS):
        batch = data[sampler.share(0, 1).indices]
        sampler.advance()
        labels = batch[:, 1:]
        loss, _ = loss_function(model(batch[:, :-1]), labels, torch.tensor(labels.numel()))
        optimizers.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizers.step()
        schedulers.step()
        found.append(loss.item())
    return found


def test_an_override_replaces_the_routed_experts_by_ones_that_start_and_compute_the_same(example):
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    experts = []
    for config in (deepseek_v3_debugmodel(), example.configure()):
        experts.append(config.model_spec.model.layers[1].moe.routed_experts.build())
        torch.manual_seed(1)
        experts[-1].init_states()
    theirs, ours = experts
    assert isinstance(theirs, RoutedExperts)
    assert isinstance(ours.inner_experts, evermoe.Experts)
    inner, views = theirs.inner_experts, ours.inner_experts.expert.views(ours.inner_experts.weights)
    for name, own in example.elastic.NAMES.items():
        assert torch.equal(getattr(inner, name), views[own])
    x_BLD = torch.randn(2, 24, 256)
    scores_BLE = torch.randn(2, 24, 8).softmax(-1)
    scores_BLK, ids_BLK = scores_BLE.topk(3)
    counts_E = torch.bincount(ids_BLK.flatten(), minlength=8)
    found = [layer(x_BLD, scores_BLK, ids_BLK, counts_E) for layer in experts]
    # torchtitan computes experts in bfloat16.
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2 * found[0].abs().max().item())


@pytest.mark.usefixtures("world_of_one")
def test_a_model_of_torchtitan_trains_in_islands_as_in_one_process_though_one_dies(example):
    printed = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py")],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=LIMIT_SECONDS,
    ).stdout
    steps = re.findall(r"step +(\d+): loss ([\d.]+), (\d) processes", printed)
    assert [int(size) for _, _, size in steps] == [4] * example.DIES_IN + [2] * (example.STEPS - example.DIES_IN)
    assert [float(loss) for _, loss, _ in steps] == pytest.approx(train_by_torchtitan(example), rel=1e-5, abs=1e-5)
    assert f"{example.STEPS} steps committed, 0 lost" in printed
