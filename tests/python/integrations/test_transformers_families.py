"""Every MoE family of transformers trains through a kill as on one process, or is listed here with the reason."""

import re
from pathlib import Path

import pytest
import torch

import evermoe
from support.families import build_family, class_of
from support.hub import Loss, build
from support.optimizers import make_optimizer
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")
from evermoe.integrations.transformers import make_elastic  # noqa: E402
from evermoe.moe.experts import expert_layers  # noqa: E402

OWN_LAYOUT = "its experts have a layout of their own; `make_elastic` says so"
ONE_BY_ONE = "only its experts are tested, module by module: in the small, its vision or audio part is a large one"
NOT_TRAINED = {
    "bamba": "dense: num_experts is 1",
    "dbrx": f"{OWN_LAYOUT}: the matrices of all experts are one",
    "doge": f"{OWN_LAYOUT}: they are rows of embeddings",
    "jetmoe": f"{OWN_LAYOUT}: one stack for each of two products, in attention, too",
    "longcat_flash": f"{OWN_LAYOUT}: some return their input, and have only a part of the weights",
    "nllb_moe": f"{OWN_LAYOUT}: modules of their own, with a capacity",
    "switch_transformers": f"{OWN_LAYOUT}: modules of their own, with a capacity",
    "vitpose_backbone": "its experts are data sets, and have no router",
    "deepseek_ocr2": ONE_BY_ONE,
    "diffusion_gemma": ONE_BY_ONE,
    "ernie4_5_vl_moe": ONE_BY_ONE,
    "glm5_next": ONE_BY_ONE,
    "mistral_large4": ONE_BY_ONE,
    "muse_spark": ONE_BY_ONE,
    "phimoe": "its router draws random numbers in training, so that no two runs are equal",
    "qwen3_omni_moe": ONE_BY_ONE,
    "qwen4_exp": "only its experts are tested, module by module: its indexed attention has no small size",
    "unlimited_ocr": ONE_BY_ONE,
}
"""Families with experts that no job trains here, and the reason."""
MODELS = Path(transformers.__file__).parent / "models"
SIGNS = re.compile(
    r"^class \w*Experts\w*\(|\b(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)\b", re.M
)


def families():
    """The folders of models whose code has experts, or reads a number of them."""
    return sorted({path.parent.name for path in MODELS.glob("*/modeling_*.py") if SIGNS.search(path.read_text())})


QUICK = ("jamba", "llama4", "qwen3_vl_moe")
TRAINED = [family for family in families() if family not in NOT_TRAINED]


def test_lists_name_families_that_exist():
    assert set(NOT_TRAINED) <= set(families())
    assert len(TRAINED) > 50


@pytest.mark.parametrize("family", [family for family, why in NOT_TRAINED.items() if why.startswith(OWN_LAYOUT)])
def test_experts_with_a_layout_of_their_own_are_named(family):
    names = {
        "nllb_moe": "NllbMoeForConditionalGeneration",
        "switch_transformers": "SwitchTransformersForConditionalGeneration",
    }
    kind = getattr(transformers, names[family]) if family in names else class_of(family)
    config = kind.config_class(**{"is_moe": True} if family == "doge" else {})
    if family == "dbrx":
        vars(config.attn_config)["rope_theta"] = 1e4  # transformers 5.23 reads it, and does not set it
    with torch.device("meta"):
        model = kind(config)
    with pytest.raises(ValueError, match=r"has experts of its own kind, which are not supported yet: \w+"):
        make_elastic(model)


STEPS, BATCH, CLIP, LR = 4, 12, 1.0, 1e-3


def train_alone(family):
    """Losses of transformers' own code in one process."""
    training, data = Loss(build(family)), dataset()
    training.model.set_experts_implementation("eager")
    optimizer, sampler, losses = make_optimizer("adamw", training), evermoe.ElasticSampler(SAMPLES, BATCH), []
    optimizer.param_groups[0]["lr"] = LR
    for _ in range(STEPS):
        loss = training(data[sampler.batch()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.parameters(), CLIP)
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


@pytest.mark.few(len(QUICK))
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.long) for family in TRAINED]
)
def test_a_family_trains_through_a_kill_as_on_one_process(start_job, family):
    """Each step's loss shows the updates of all steps before it."""
    assert expert_layers(make_elastic(build_family(family)))
    job = start_job(3, max_grad_norm=CLIP, join_interval=1)
    workers = job.start_all({"c": [Fault("reduce", 1)]}, model=family, steps=STEPS, batch_size=BATCH, lr=LR)
    assert [each.join(80) for each in workers] == [0, 0, -9]
    assert [event["steps_lost"] for event in workers[0].events("recovered", members=2)] == [0]
    assert [event["loss"] for event in workers[0].events("commit")] == pytest.approx(train_alone(family), abs=1e-5)
