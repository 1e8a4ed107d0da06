"""transformers' models train under a session through a kill as they train alone, and come out as transformers' own."""

import re

import pytest
import torch

import evermoe
from support.history import check_history
from support.hub import MODELS, build, elastic
from support.optimizers import make_optimizer
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")

STEPS, BATCH, CLIP = 8, 12, 1.0
OPTIMIZER = {"float32": "adamw", "bfloat16": "evermoe"}
"""A model in bfloat16 has float32 masters, which are moved and repeated like its other state."""
QUICK = {("qwen3", "sharded", "float32"), ("gpt-oss", "replicated", "float32"), ("deepseek-v3", "sharded", "bfloat16")}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long, id="-".join(case))
    for name in MODELS
    for dense in ("replicated", "sharded")
    for dtype in ("float32", "bfloat16")
    for case in [(name, dense, dtype)]
]


def train_alone(name, dtype, starts_as="float32"):
    """Losses, and the weights by transformers' names, of transformers' own code in one process."""
    torch.manual_seed(0)
    model, data = build(name).to(getattr(torch, starts_as)).to(getattr(torch, dtype)), dataset()
    model.set_experts_implementation("eager")
    optimizer = make_optimizer(OPTIMIZER[dtype], model)
    sampler, losses = evermoe.ElasticSampler(SAMPLES, BATCH), []
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    counts = {}
    for router in routers:  # (logits, weights, ids)
        router.register_forward_hook(
            lambda router, _, out: counts.update({router: torch.bincount(out[2].flatten(), minlength=8)})
        )
    for _ in range(STEPS):
        tokens = data[sampler.batch()]
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        sampler.advance()
        for router, count in counts.items():
            router.e_score_correction_bias += (count.float().mean() - count).sign() * 1e-3
        losses.append(loss.item())
    return losses, model.state_dict()


def distances(losses, weights, others, other_weights):
    """The largest between losses of a step, and the mean between weights."""
    apart = torch.cat(
        [(other_weights[key].float() - tensor.float()).abs().flatten() for key, tensor in weights.items()]
    )
    return max(abs(one - other) for one, other in zip(losses, others, strict=True)), apart.mean().item()


@pytest.mark.parametrize(("name", "dense", "dtype"), CASES)
def test_a_model_trains_as_alone_through_a_kill(tmp_path, start_job, name, dense, dtype):
    """In bfloat16 both round: no farther apart than twice what one process is from one that computes in float32."""
    folder = tmp_path / "checkpoints"
    job = start_job(3, checkpoints=str(folder), max_grad_norm=CLIP, join_interval=1, shard_optimizer=dense == "sharded")
    options = {"model": name, "optimizer": OPTIMIZER[dtype], "dtype": dtype, "steps": STEPS, "batch_size": BATCH}
    workers = job.start_all({"c": [Fault("reduce", 4)]}, **options)
    assert [each.join(80) for each in workers] == [0, 0, -9]
    check_history(workers)
    found = [event["loss"] for event in workers[0].events("commit")]
    recovered = workers[0].events("recovered", members=2)
    assert [event["steps_lost"] for event in recovered] == [0]
    assert re.search(r"\bc-\w{8} (at \S+ )?has ended", recovered[0]["reason"]) and ".cc:" not in recovered[0]["reason"]
    assert workers[0].events("verified")[-1]["digests_mismatched"] == 0
    complete = elastic(name).to(getattr(torch, dtype))
    evermoe.load_weights(complete, max(folder.glob("step-*")))
    complete.model.save_pretrained(tmp_path / "hub")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype="auto").state_dict()
    losses, weights = train_alone(name, dtype)
    assert exported.keys() == weights.keys()
    if dtype == "float32":
        assert found == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(exported, weights, rtol=0, atol=2e-3)
    else:
        loss, weight = distances(found, exported, losses, weights)
        loss_of_rounding, weight_of_rounding = distances(losses, weights, *train_alone(name, "float32", dtype))
        assert loss <= 2 * loss_of_rounding
        assert weight <= 2 * weight_of_rounding
