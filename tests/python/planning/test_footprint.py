"""Memory from sizes alone: by hand for small models, against the session's own constants, and for known models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import evermoe
from evermoe.planning import protection, seating
from evermoe.planning.footprint import PHASES, footprint
from evermoe.planning.models import MODELS, ModelShape
from evermoe.planning.nccl_buffers import nccl_bytes
from evermoe.planning.seating import FootprintOptions, Seating
from evermoe.state.model_shape import shape_of
from evermoe.state.placement import place_layers

SMALL = ModelShape(dense_parameters=1000, largest_module=400, layers=3, experts=8, expert_parameters=500)
FOUR = FootprintOptions(workers=4, weights="float32", expert_slots=2)


def peak(phase, shape=SMALL, **options):
    return footprint(shape, replace(FOUR, **options)).peak(phase, lambda use: use.process + use.snapshots)[1]


def test_a_share_is_what_a_worker_trains():
    held = 1000 + 3 * 2 * 500
    use = peak("step", replication=0)
    assert (use.parameters, use.masters, use.moments, use.gradients) == (4 * held, 0, 8 * held, 4 * held)
    assert use.share == 16 * held
    half = peak("step", replication=0, weights="bfloat16")
    assert (half.parameters, half.masters, half.moments, half.gradients) == (2 * held, 4 * held, 8 * held, 2 * held)
    momentum = peak("step", replication=0, moments=1)
    assert momentum.moments == 4 * held


def test_there_are_no_gradients_at_the_start_nor_while_units_move():
    found = footprint(SMALL, replace(FOUR, preset="gemini"))
    without = [each for each in found.moments if each.name not in ("gradients are reduced", "the loss")]
    assert [each.name for each in without] == [
        "weights exist",
        "copies are made",
        "units arrive",
        "copies are made",
    ]
    assert all(use.gradients == 0 for each in without for use in each.uses)


def test_sharded_masters_and_moments_are_divided():
    complete, parts = peak("step", replication=0), footprint(SMALL, replace(FOUR, replication=0, shard_optimizer=True))
    steps = next(each.uses for each in parts.moments if each.phase == "step")
    assert all(use.parameters == complete.parameters for use in steps), "weights are on all"
    assert sum(use.moments for use in steps) == 8 * (1000 + 4 * 3 * 2 * 500), "each module's moments are on one"
    assert max(use.moments for use in steps) < complete.moments


def test_snapshots_of_everything_take_two_versions_on_each_node_that_keeps_it():
    for copies in (2, 3):
        step = footprint(SMALL, replace(FOUR, preset="gemini", replication=copies)).moments[-4]
        assert step.phase == "step"
        complete = 12 * SMALL.parameters
        assert sum(use.snapshots for use in step.uses) == 2 * copies * complete


def test_replicas_and_local_snapshots_of_auto_hold_an_expert_once_and_the_rest_twice():
    step = footprint(SMALL, FOUR).moments[2]
    assert sum(use.replicas for use in step.uses) == 12 * 3 * 8 * 500, "each expert is followed by one other worker"
    kept = SMALL.parameters + SMALL.dense_parameters
    assert sum(use.snapshots for use in step.uses) == 2 * 12 * kept, "an expert stays on its node, the rest on two"
    steps = protection.batch_steps(500) + protection.LOGGED_STEPS
    assert [use.log for use in step.uses] == [6 * (2000 + seating.RECORD_BYTES) * steps] * 4


def test_a_log_is_bounded_and_what_does_not_fit_becomes_snapshots():
    bounded = 3 * 2 * (2000 + seating.RECORD_BYTES)
    step = footprint(SMALL, replace(FOUR, replay_log_bytes=bounded)).moments[2]
    assert all(use.log == bounded for use in step.uses)
    followed = sum(use.replicas for use in step.uses)
    assert 0 < followed < 12 * 3 * 8 * 500
    others = 12 * SMALL.parameters - followed
    assert sum(use.snapshots for use in step.uses) >= 2 * (2 * others)


def test_a_recovery_has_the_previous_copies_until_the_new_ones_are_complete():
    old = footprint(SMALL, replace(FOUR, preset="gemini"))
    *_, arriving, protecting = old.moments
    three = footprint(SMALL, replace(FOUR, preset="gemini", workers=3))
    total = sum(use.snapshots for use in protecting.uses)
    assert total == sum(use.snapshots for use in old.moments[2].uses[:3]) + 4 * 12 * SMALL.parameters
    # The lost worker's 2 experts of each layer now train on the others, which hold 3 places each.
    assert three.moments[2].uses[0].parameters == 4 * (1000 + 3 * 3 * 500)
    assert sum(use.fetched for use in arriving.uses) >= 12 * 3 * 2 * 500


def test_gpus_have_buffers_of_nccl_for_each_peer():
    each, pool = 12 << 20, 2 * 32 * 16 * (128 << 10)
    assert [nccl_bytes(workers, 8) for workers in (1, 2, 8)] == [0, 2 * 32 * each, 8 * 32 * each]
    assert [nccl_bytes(workers, 8) for workers in (16, 64, 128, 1024)] == [
        (32 + 7 * channels) * each + pool for channels in (4, 4, 2, 1)
    ]
    assert nccl_bytes(2, 1) == nccl_bytes(64, 1) == 32 * each + pool, "no peer is on the same node"
    for shape, communicators in ((SMALL, 1), (MODELS["gpt-l-moe"], 2)):
        found = footprint(shape, FootprintOptions(workers=16, workers_per_node=8))
        assert {use.network for moment in found.moments[:3] for use in moment.uses} == {
            communicators * nccl_bytes(16, 8)
        }
        assert {use.network for use in found.moments[-1].uses} == {communicators * nccl_bytes(8, 8)}
        use = found.peak("step")[1]
        assert use.device - use.network == use.share + use.working == use.process - use.host


def test_no_recovery_where_nobody_is_left():
    alone = footprint(SMALL, FootprintOptions(workers=1, replication=0))
    assert {each.phase for each in alone.moments} == {"start", "step"}
    node = footprint(SMALL, replace(FOUR, workers_per_node=4, replication=0))
    assert {each.phase for each in node.moments} == {"start", "step"}
    two = footprint(SMALL, replace(FOUR, workers_per_node=2))
    assert len(two.moments[-1].uses) == 2, "a node's workers are lost together"


def test_what_is_frozen_has_weights_alone():
    held = 1000 + 3 * 2 * 500
    experts = peak("step", SMALL.with_frozen_experts(), replication=0)
    assert (experts.parameters, experts.moments, experts.gradients) == (4 * held, 8 * 1000, 4 * 1000)
    dense = peak("step", SMALL.with_frozen_dense(), replication=0)
    assert (dense.parameters, dense.moments, dense.gradients) == (4 * held, 8 * (held - 1000), 4 * (held - 1000))
    adapters = peak("step", SMALL.with_adapters(60), replication=0)
    assert (adapters.parameters, adapters.moments, adapters.gradients) == (4 * (held + 60), 8 * 60, 4 * 60)
    of_experts = peak("step", SMALL.with_adapters(60, are_of_experts=True), replication=0)
    second = 4 * 3 * 2 * 500 + 4 * 2 * 500 * 4 // 3
    assert of_experts.working == second, "all changed matrices until backward, and the gradients of a layer's"
    half = peak("step", replace(SMALL, frozen_layers=2), replication=0)
    assert (half.parameters, half.moments) == (4 * held, 8 * (1000 + 2 * 500))


def test_copies_of_what_is_frozen_are_its_weights():
    frozen = SMALL.with_frozen_experts()
    (step,) = (each for each in footprint(frozen, FOUR).moments if each.phase == "step")
    assert sum(use.replicas for use in step.uses) == 4 * 3 * 8 * 500
    assert all(use.log <= 6 * protection.RECORD_BYTES * protection.LOG_STEPS for use in step.uses), "headers alone"
    assert sum(use.snapshots for use in step.uses) == 2 * (4 * 3 * 8 * 500 + 2 * 12 * 1000)
    owned = footprint(SMALL.with_adapters(60), replace(FOUR, preset="gemini", shard_optimizer=True)).moments
    (step,) = (each for each in owned if each.phase == "step")
    assert sum(use.moments for use in step.uses) == 8 * 60
    assert sum(use.snapshots for use in step.uses) == 2 * 2 * (4 * (SMALL.parameters + 60) + 8 * 60)


@pytest.mark.parametrize("preset", ["auto", "gemini", "baft", "moetion", "lazarus", "pec"])
def test_more_memory_is_never_taken_by_more_workers(preset):
    options = FootprintOptions(workers=2, preset=preset)
    peaks = []
    for workers in (4, 8, 16, 64):
        found = footprint(MODELS["gpt-l-moe"], replace(options, workers=workers))
        peaks.append([found.peak(phase)[1].device for phase in PHASES])
    assert all(a >= b for more, fewer in zip(peaks, peaks[1:], strict=False) for a, b in zip(more, fewer, strict=True))


def test_experts_are_where_a_session_begins():
    options = FootprintOptions(workers=5, expert_slots=4, preset="gemini")
    placing = evermoe.Placement(expert_slots=4, min_replicas=1, policy=options.choices.placement)
    none = {"moe": np.zeros((5, 16), np.int64)}
    found = place_layers({"moe": 16}, [[1.0] * 16], none, options.nodes, placing, {})
    placed_RE = Seating(MODELS["gpt-l-moe"], options, options.nodes).placed_RE
    assert np.array_equal(placed_RE, found["moe"] > 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers: expected 1 or more"),
        ({"workers": -1}, "workers: expected an integer"),
        ({"weights": "int8"}, "weights: expected one of"),
        ({"preset": "none"}, "preset: expected one of"),
        ({"replication": -1}, "replication: expected"),
        ({"shard_optimizer": True, "preset": "lazarus"}, "shard_optimizer: expected False with preset lazarus"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        replace(FOUR, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts": 0}, "experts: expected 1 or more"),
        ({"largest_module": 2000}, "largest_module: expected at most"),
        ({"layers": -1}, "layers: expected an integer"),
        ({"frozen_layers": 4}, "frozen_layers: expected at most layers, 3, got 4"),
        (
            {"frozen_dense_parameters": 700},
            "largest_module: expected at most the trained ones of dense_parameters, 300",
        ),
        (
            {"frozen_layers": 3, "frozen_dense_parameters": 1000, "largest_module": 0},
            "the model is frozen: expected parameters that are trained",
        ),
    ],
)
def test_shapes_that_are_none(sizes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **sizes)


# ---- models


def test_the_shape_of_an_existing_model():
    with torch.device("meta"):
        layers = [evermoe.MoE(16, 32, num_experts=4) for _ in range(2)]
        model = torch.nn.Sequential(torch.nn.Embedding(50, 16), *layers, torch.nn.Linear(16, 50))
    shape = shape_of(model)
    assert (shape.trained_parameters, shape.largest_frozen_module) == (shape.parameters, 0)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.experts, shape.largest_module) == (2, 4, 850)
    assert shape.expert_parameters == layers[0].experts.weights.shape[1]
    layers[0].experts.requires_grad_(False)
    model[0].requires_grad_(False)
    model[-1].weight.requires_grad_(False)
    tuned = shape_of(model)
    assert (tuned.frozen_layers, tuned.frozen_dense_parameters, tuned.largest_frozen_module) == (1, 1600, 800)
    assert (tuned.largest_module, tuned.parameters) == (64, shape.parameters), "a router is larger than a bias"
    with pytest.raises(ValueError, match="the model is frozen"):
        shape_of(model.requires_grad_(False))
    with pytest.raises(ValueError, match="no MoE layer"):
        shape_of(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        mixed = torch.nn.Sequential(evermoe.MoE(16, 32, num_experts=4), evermoe.MoE(16, 32, num_experts=2))
    with pytest.raises(ValueError, match=r"2 of .* parameters, 4 of"):
        shape_of(mixed)


def configs():
    """The published configuration of each known model, as transformers has it."""
    import transformers

    qwen = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
    mixtral = transformers.MixtralConfig
    return {
        "mixtral-8x7b": mixtral(),
        "mixtral-8x22b": mixtral(
            hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48
        ),
        "qwen3-30b-a3b": transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768, **qwen
        ),
        "qwen3-235b-a22b": transformers.Qwen3MoeConfig(
            hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536, **qwen
        ),
        "deepseek-v3": transformers.DeepseekV3Config(),
        "gpt-oss-20b": transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        "gpt-oss-120b": transformers.GptOssConfig(),
    }


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gpt-") or "oss" in name])
def test_a_known_model_has_the_parameters_that_transformers_gives_it(name):
    from transformers import AutoModelForCausalLM

    from evermoe.integrations.transformers import make_elastic

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configs()[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name].parameters
    found = shape_of(make_elastic(model))
    padding = found.expert_parameters - MODELS[name].expert_parameters
    assert 0 <= padding < 64, "rows of experts are padded to cache lines"
    for field in ("dense_parameters", "largest_module", "layers", "experts"):
        assert getattr(found, field) == getattr(MODELS[name], field), field


@pytest.mark.parametrize(
    ("name", "millions", "expert_mib"), [("gpt-s-moe", 521, 63), ("gpt-m-moe", 1300, None), ("gpt-l-moe", 1700, 112)]
)
def test_lazarus_models_have_the_sizes_of_the_paper(name, millions, expert_mib):
    """Table 1, and section 6.4: an expert's weights and optimizer state, 14 bytes a parameter, are 63 and 112 MB."""
    shape = MODELS[name]
    assert shape.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    if expert_mib is not None:
        assert shape.expert_parameters * 14 / 2**20 == pytest.approx(expert_mib, abs=0.5)


def test_known_models_need_neither_torch_nor_transformers():
    code = "import sys; from evermoe.planning.models import MODELS; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
