"""Weights of transformers' folders, read unit by unit and written: the same as by `from_pretrained`, with its keys."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import evermoe
from evermoe.checkpoint import weight_folder
from evermoe.checkpoint.folder_weights import INDEX
from evermoe.state.building import LARGE
from evermoe.state.unit import expert_unit
from support.hub import MODELS, build, config
from support.hub_trainer import tokenizer

transformers = pytest.importorskip("transformers")
from evermoe.integrations.transformers import export, from_pretrained, make_elastic  # noqa: E402
from evermoe.integrations.transformers.hub_weights import HubWeights  # noqa: E402


def keys(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", MODELS)
def test_units_of_a_folder_and_back(tmp_path, name, monkeypatch):
    """Files of at most some kilobytes, so that there are several."""
    build(name).save_pretrained(tmp_path / "source", max_shard_size="40KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    model, source = from_pretrained(tmp_path / "source")
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.numel() >= LARGE)
    expected = make_elastic(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    experts = evermoe.moe.experts.expert_layers(model)
    for path, layer in evermoe.moe.experts.expert_layers(expected).items():
        for expert in (0, 3, 5):
            row = torch.full_like(layer.weights[expert], 7.0)
            source.fill(path, experts[path], {"weights": row}, expert)
            assert torch.equal(row, layer.weights[expert]), expert_unit(path, expert)
    monkeypatch.setattr(weight_folder, "SHARD_BYTES", 40_000)
    export(source, model, tmp_path / "out")
    torch.testing.assert_close(keys(tmp_path / "out"), keys(tmp_path / "source"), rtol=0, atol=0)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"].keys() == keys(tmp_path / "source").keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again.state_dict(), expected.state_dict(), rtol=0, atol=0)
    with pytest.raises(OSError, match="expected an empty folder"):
        export(source, model, tmp_path / "out")


def test_a_folder_in_the_cache_of_the_hub_has_links_to_its_files(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "blobs", max_shard_size="40KB")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..", "blobs", file.name))
    model, source = from_pretrained(tmp_path / "snapshot")
    export(source, model, tmp_path / "out")
    torch.testing.assert_close(keys(tmp_path / "out"), keys(tmp_path / "blobs"), rtol=0, atol=0)


def test_quantised_weights_are_refused(tmp_path):
    build("mixtral").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    for key in ("model.layers.0.block_sparse_moe.experts.1.w2.weight", "model.embed_tokens.weight"):
        save_file(tensors | {key: tensors[key].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
        model, source = from_pretrained(tmp_path / "source")
        with pytest.raises(
            evermoe.errors.CorruptCopy, match=r"is quantised to torch.float8_e4m3fn: expected weights of 16"
        ):
            export(source, model, tmp_path / key)


def test_folders_of_other_models(tmp_path):
    build("mixtral").save_pretrained(tmp_path / "source")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config("mixtral", intermediate_size=56))
    other = HubWeights(tmp_path / "source", make_elastic(model))
    with pytest.raises(
        evermoe.errors.CorruptCopy, match=r"experts.gate_up_proj in .* belongs to another model: expected \[1, 112"
    ):
        export(other, model, tmp_path / "out")
    with pytest.raises(evermoe.errors.CorruptCopy, match="expected safetensors files"):
        HubWeights(tmp_path, model)
    with torch.device("meta"):
        model = make_elastic(transformers.AutoModelForCausalLM.from_config(config("olmoe")))
    with pytest.raises(
        evermoe.errors.CorruptCopy, match=r"has no weights for model.layers.0.self_attn.q_norm.weight|another model"
    ):
        export(HubWeights(tmp_path / "source", model), model, tmp_path / "more")


def test_an_export_has_the_other_files_of_the_folder(tmp_path):
    """Tokenizer, chat templates, processor and settings for generation, byte for byte."""
    source, out = tmp_path / "source", tmp_path / "out"
    build("mixtral").save_pretrained(source)
    words = tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    words.save_pretrained(source)
    transformers.GenerationConfig(do_sample=True, temperature=0.25, eos_token_id=[2, 3]).save_pretrained(source)
    (source / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    (source / "README.md").write_text("# another model")
    (source / "optimizer.pt").write_bytes(b"large")
    model, weights = from_pretrained(source)
    export(weights, model, out)
    names = {str(path.relative_to(source)) for path in source.rglob("*")} - {"README.md", "optimizer.pt"}
    assert {str(path.relative_to(out)) for path in out.rglob("*")} == names
    for name in names - {"config.json", "generation_config.json", "additional_chat_templates"}:
        if not name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (source / name).read_bytes(), name
    found = transformers.GenerationConfig.from_pretrained(out)
    assert (found.do_sample, found.temperature, found.eos_token_id) == (True, 0.25, [2, 3])
    templates = {"default": words.chat_template, "tool": "{{ tools }}"}
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == templates
