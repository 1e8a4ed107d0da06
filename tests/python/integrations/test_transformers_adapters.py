"""peft's adapters: on attention and routers as in any model, and on fused experts, which are spread over members."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import evermoe  # noqa: E402
from evermoe.errors import UnsupportedState  # noqa: E402
from evermoe.integrations.transformers import make_elastic  # noqa: E402
from evermoe.moe.experts import take_part  # noqa: E402
from support.adapters import DATA, DIES_IN, KINDS, STEPS, adapted, loss_of, plain, tune  # noqa: E402
from support.hub import build  # noqa: E402

HEADER_BYTES = 128
"""Bytes of a step of a frozen unit: that it has taken none."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in KINDS] + [("experts", {"shard_optimizer": True})])
def test_adapters_train_as_in_one_plain_process_through_a_death(start, kind, options):
    losses, expected = plain(kind)
    found, logs = start(tune, "abc", kind, hang_timeout=30.0, **options)
    (result,) = [event for name in "ac" for event in found[name] if event["event"] == "result"]
    for name in "ac":
        steps = [event for event in found[name] if event["event"] == "commit"]
        assert [event["step"] for event in steps] == list(range(STEPS)), logs[name][-3000:]
        assert [event["loss"] for event in steps] == pytest.approx(losses, abs=1e-5)
        recovered = [event for event in found[name] if event["event"] == "recovered"][-1]
        assert (recovered["step"], recovered["members"], recovered["steps_lost"]) == (DIES_IN, 2, 0)
        assert [each["digests_mismatched"] for each in found[name] if each["event"] == "verified"] == [0]
    assert list(result["adapters"]) == list(expected["adapters"]), "peft's own names"
    for key, values in expected["adapters"].items():
        assert result["adapters"][key] == pytest.approx(values, abs=1e-5)
    assert result["merged"] == pytest.approx(expected["merged"], abs=1e-5)
    assert losses[-1] < losses[0]
    first, second = ({event["step"]: event for event in found[name] if event["event"] == "commit"} for name in "ac")
    kept = first[1]["kept"]
    sent = sum(steps[2]["copied"] - steps[0]["copied"] for steps in (first, second)) / 2
    if not options:  # adapters are on all workers, and all that has copies is frozen
        assert len(kept) > 2 and 0 < sent < HEADER_BYTES * len(kept) < sum(kept) / 20, (
            "no weights after the first copies"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_elastic_models_with_adapters_are_what_peft_makes_of_them(tmp_path, kind):
    """Losses, gradients, state dicts, files, and what is merged; adapters can be turned off, copied and added."""
    plain_one, elastic = adapted(kind), make_elastic(adapted(kind))
    plain_one.base_model.model.set_experts_implementation("eager")
    for model in (plain_one, elastic):
        loss_of(model, DATA[:4]).backward()
    grads = [{k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (plain_one, elastic)]
    assert grads[0] and all("lora" in key or "modules_to_save" in key for key in grads[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
    states = [peft.get_peft_model_state_dict(model) for model in (plain_one, elastic)]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    elastic.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = peft.PeftModel.from_pretrained(build(KINDS[kind][0]), tmp_path)
    torch.testing.assert_close(peft.get_peft_model_state_dict(loaded), states[0], rtol=0, atol=0)

    with torch.no_grad():
        losses = loss_of(elastic, DATA[:4])
        torch.testing.assert_close(loss_of(copy.deepcopy(elastic), DATA[:4]), losses)
        with plain_one.disable_adapter(), elastic.disable_adapter():
            torch.testing.assert_close(loss_of(elastic, DATA[:4]), loss_of(plain_one, DATA[:4]))
        elastic.merge_adapter(safe_merge=True)
        torch.testing.assert_close(loss_of(elastic, DATA[:4]), losses)
        elastic.unmerge_adapter()
        bare = copy.deepcopy(elastic).unload()
        with plain_one.disable_adapter():
            torch.testing.assert_close(loss_of(bare, DATA[:4]), loss_of(plain_one, DATA[:4]))
        merged = [model.merge_and_unload() for model in (plain_one, elastic)]
        torch.testing.assert_close(loss_of(merged[1], DATA[:4]), losses)
        torch.testing.assert_close(merged[1].state_dict(), merged[0].state_dict(), rtol=0, atol=1e-6)


def test_two_adapters_of_experts_are_chosen_as_peft_chooses():
    models = adapted("experts"), adapted("experts")
    models[0].base_model.model.set_experts_implementation("eager")
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, **KINDS["experts"][1]))
    make_elastic(models[1])
    losses = {tuple(names): [] for names in (["default"], ["second"], ["default", "second"])}
    for names, found in losses.items():
        for model in models:
            model.base_model.set_adapter(list(names))
            found.append(loss_of(model, DATA[:4]).item())
        assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert len({found[0] for found in losses.values()}) == 3


def test_a_rank_without_experts_takes_part_in_the_backward_of_adapters():
    """Its empty rows depend on the adapters, whose gradients are zero in them."""
    model = make_elastic(adapted("experts"))
    layer = next(module for module in model.modules() if isinstance(module, evermoe.Experts))
    layer.ids, layer.weights = [], torch.nn.Parameter(layer.weights[:0].detach(), requires_grad=False)
    assert take_part(torch.zeros(0, layer.hidden), layer._matrices(torch.float32)).requires_grad
    with model.disable_adapter():
        assert not take_part(torch.zeros(0, layer.hidden), layer._matrices(torch.float32)).requires_grad


def test_adapters_that_peft_could_not_make_are_named(tmp_path):
    model = make_elastic(build("qwen3"))
    with pytest.warns(match="no parameter was matched"):
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
        )
    with pytest.raises(UnsupportedState, match=r"names gate_up_proj of \S+.0.mlp.experts.*get_peft_model first"):
        evermoe.Session(
            model,
            torch.optim.AdamW(model.parameters()),
            evermoe.ElasticSampler(48, 12),
            membership=evermoe.Membership(memory_dir=str(tmp_path)),
        )


def test_adapters_of_biases_are_refused_by_name():
    model = peft.get_peft_model(
        build("gpt-oss"), peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj_bias"])
    )
    with pytest.raises(UnsupportedState, match=r"adapter \(ParamWrapper\) of gate_up_proj_bias, expected"):
        make_elastic(model)
