"""Folders as GPT-OSS (MXFP4) and DeepSeek-V3 (FP8) are published: the bits of transformers' own dequantisation."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import evermoe
from support.hub import Loss
from support.optimizers import make_optimizer
from support.quantised import BLOCK, spread, to_fp8, write_folder
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")
from evermoe.errors import CorruptCopy, UnsupportedState  # noqa: E402
from evermoe.integrations.transformers import export, from_pretrained, make_elastic, quantised  # noqa: E402

DEQUANTISED = {
    "gpt-oss": lambda: transformers.Mxfp4Config(dequantize=True),
    "deepseek-v3": lambda: transformers.FineGrainedFP8Config(dequantize=True),
}
NAMES = list(DEQUANTISED)


def plain(folder, name, **options):
    """The model as transformers itself dequantises it."""
    chosen = DEQUANTISED[name]()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=chosen, **options)


def exported(folder, out):
    """The weights that evermoe reads unit by unit, as transformers' model has them."""
    model, source = from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    export(source, model, out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("name", NAMES)
def test_each_unit_has_the_bits_of_transformers(tmp_path, name, monkeypatch):
    """In pieces of a few rows, and from several files."""
    monkeypatch.setattr(quantised, "PIECE_VALUES", 1 << 12)
    write_folder(tmp_path / "source", name, shard="60KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    expected, found = plain(tmp_path / "source", name), exported(tmp_path / "source", tmp_path / "out")
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_blocks_at_the_edges_are_smaller_ones(tmp_path):
    """transformers 5.23 refuses 568 + 8 rows, as DeepSeek-V3 has them, and takes 200 columns for two blocks of 100."""
    sizes = {"hidden_size": 200, "moe_intermediate_size": 136, "kv_lora_rank": 568}
    model = write_folder(tmp_path / "source", "deepseek-v3", **sizes)
    found = exported(tmp_path / "source", tmp_path / "out").state_dict()
    number = 0
    for key, tensor in model.state_dict().items():
        if key.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "gate_up_proj", "down_proj", "o_proj.weight")):
            for one, other in zip(
                tensor.view(-1, *tensor.shape[-2:]), found[key].view(-1, *tensor.shape[-2:]), strict=True
            ):
                halves = one.split(136) if key.endswith("gate_up_proj") else [one]
                values = torch.cat([q.float() * spread(s, q.shape) for q, s in map(to_fp8, halves)])
                assert torch.equal(other, values.to(torch.bfloat16)), key
                number += max(one.shape) > BLOCK
    assert number > 20


def test_fp8_with_one_scale_for_a_tensor_and_scales_as_exponents(tmp_path):
    write_folder(tmp_path / "source", "deepseek-v3")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    one, other = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors[f"{one}_scale_inv"] = torch.tensor(0.25)
    tensors[f"{other}_scale_inv"] = torch.full_like(tensors[f"{other}_scale_inv"], 125, dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    found = exported(tmp_path / "source", tmp_path / "out").state_dict()
    for key in (one, other):
        assert torch.equal(found[key], (tensors[key].float() / 4).to(torch.bfloat16))
    torch.testing.assert_close(found, plain(tmp_path / "source", "deepseek-v3").state_dict(), rtol=0, atol=0)


def test_fp8_scales_without_rows_and_columns_are_named(tmp_path):
    """The configuration names no architecture, either, as transformers allows."""
    write_folder(tmp_path / "source", "deepseek-v3")
    path, config = tmp_path / "source" / "model.safetensors", tmp_path / "source" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": None}))
    key = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file(load_file(path) | {key: torch.ones(3)}, path, {"format": "pt"})
    model, source = from_pretrained(tmp_path / "source")
    with pytest.raises(CorruptCopy, match=r"o_proj.* expected scales \[..., rows, columns\] of blocks, got \[3\]"):
        export(source, model, tmp_path / "out")


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_do_not_belong_to_the_weights_are_named(tmp_path, name):
    write_folder(tmp_path / "source", name)
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in sorted(tensors) if "scale" in key and "experts" in key)
    save_file(tensors | {key: tensors[key].new_ones(3, 3, 3)}, path, {"format": "pt"})
    model, source = from_pretrained(tmp_path / "source")
    with pytest.raises(CorruptCopy, match=rf"experts.*_proj in {tmp_path}.*scales? .*\[[13], 3, 3\]"):
        export(source, model, tmp_path / "out")
    del tensors[key]
    save_file(tensors, path, {"format": "pt"})
    model, source = from_pretrained(tmp_path / "source")
    with pytest.raises(CorruptCopy, match=r"is quantised to torch|quantised tensors have"):
        export(source, model, tmp_path / "out")


def test_other_quantisations_are_refused_by_name(tmp_path):
    write_folder(tmp_path / "source", "gpt-oss")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(UnsupportedState, match="quant_method 'awq': expected 'mxfp4' or 'fp8', or weights of 16 bits"):
        from_pretrained(tmp_path / "source")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_transformers_has_dequantised_is_saved_as_it_is(tmp_path, name):
    write_folder(tmp_path / "source", name)
    expected = plain(tmp_path / "source", name).state_dict()
    make_elastic(plain(tmp_path / "source", name)).save_pretrained(tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(found.state_dict(), expected, rtol=0, atol=0)


PEAK = """
import sys
import torch
from evermoe.checkpoint import folder_weights
from evermoe.integrations.transformers import from_pretrained
from evermoe.moe.experts import expert_layers

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

torch.set_num_threads(1)
folder_weights.MAPPED_BYTES = 0  # pages of the files count as little as they can
model, source = from_pretrained(sys.argv[1])
(path, layer), = expert_layers(model).items()
rows = torch.ones(layer.num_experts, layer.expert.row_size, dtype=torch.bfloat16)
source.fill(path, layer, {"weights": rows[0]}, 0)
open("/proc/self/clear_refs", "w").write("5")  # the peak so far
before = memory("VmRSS")
for expert in range(layer.num_experts):
    source.fill(path, layer, {"weights": rows[expert]}, expert)
print(rows[0].nbytes, memory("VmHWM") - before)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek-v3", {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 4, "n_group": 2}),
        ("gpt-oss", {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 4, "num_hidden_layers": 1}),
    ],
)
@pytest.mark.few(1)
def test_reading_a_unit_takes_less_memory_than_a_second_one(tmp_path, name, sizes):
    """A worker plans for the units that it holds; four of 6 MiB are read here."""
    write_folder(tmp_path / "source", name, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "source")],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    unit, peak = map(int, done.stdout.split())
    assert unit >= 6 << 20
    assert peak < unit


# ---- training


STEPS, BATCH, CLIP = 6, 12, 1.0


def train_alone(folder, name):
    """Losses and weights of transformers' own code in one process."""
    model, data = plain(folder, name, dtype=torch.float32).float(), dataset()
    model.set_experts_implementation("eager")
    training = Loss(model.train())
    optimizer, sampler, losses = make_optimizer("adamw", training), evermoe.ElasticSampler(SAMPLES, BATCH), []
    for _ in range(STEPS):
        loss = training(data[sampler.batch()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.parameters(), CLIP)
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.few(len(NAMES))
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_folder_trains_through_a_kill_as_on_one_process(tmp_path, start_job, name):
    write_folder(tmp_path / "source", name)
    job = start_job(3, max_grad_norm=CLIP, join_interval=1)
    options = {"hub": str(tmp_path / "source"), "steps": STEPS, "batch_size": BATCH, "full": {STEPS: "complete"}}
    workers = job.start_all({"c": [Fault("reduce", 3)]}, **options)
    assert [each.join(80) for each in workers] == [0, 0, -9]
    assert [event["steps_lost"] for event in workers[0].events("recovered", members=2)] == [0]
    losses, weights = train_alone(tmp_path / "source", name)
    assert [event["loss"] for event in workers[0].events("commit")] == pytest.approx(losses, abs=1e-5)
    (folder,) = job.folder.glob("complete*.hub")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    torch.testing.assert_close(found, weights, rtol=0, atol=2e-3)
