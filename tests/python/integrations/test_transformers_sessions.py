"""transformers' models train under a session through a kill as they train alone, and come out as transformers' own."""

import pytest
import torch

import evermoe
from support.harness import Job
from support.history import check_history
from support.hub import MODELS, build, elastic
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")

STEPS, BATCH, CLIP = 8, 12, 1.0


def train_alone(name):
    """Losses, and the weights by transformers' names, of transformers' own code in one process."""
    torch.manual_seed(0)
    model, data = build(name), dataset()
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
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


@pytest.mark.parametrize("dense", ["replicated", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_alone_through_a_kill(tmp_path, name, dense):
    folder = tmp_path / "checkpoints"
    job = Job(tmp_path, 3, checkpoint_dir=str(folder), max_grad_norm=CLIP, join_every=1, dense=dense)
    try:
        workers = job.start_all({"c": [Fault("reduce", 4)]}, model=name, steps=STEPS, batch_size=BATCH)
        assert [each.join(80) for each in workers] == [0, 0, -9], "\n".join(each.log() for each in workers)
        check_history(workers)
        commits = workers[0].events("commit")
        recovered = workers[0].events("recovered", members=2)
        verified = workers[0].events("verified")[-1]
    finally:
        job.close()
    losses, weights = train_alone(name)
    assert [event["loss"] for event in commits] == pytest.approx(losses, abs=1e-5)
    assert [event["steps_lost"] for event in recovered] == [0] and verified["digests_mismatched"] == 0
    whole = elastic(name)
    evermoe.load_weights(whole, max(folder.glob("step-*")))
    whole.model.save_pretrained(tmp_path / "hub")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert exported.state_dict().keys() == weights.keys()
    for key, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=2e-3, msg=lambda text, key=key: f"{key}: {text}")
