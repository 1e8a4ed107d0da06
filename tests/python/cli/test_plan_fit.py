"""`evermoe plan --model`: flags and messages; the fewest nodes against a search of all."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from evermoe.cli.main import main, parser
from evermoe.cli.plan.fit import fewest_nodes, parse_fit, parse_size, plan_fit
from evermoe.cli.plan.show_fit import verdict
from evermoe.planning.footprint import PHASES, footprint
from evermoe.planning.models import MODELS
from support.commands import evermoe

ASKED = ["--model", "gpt-l-moe", "--nodes", "4", "--memory", "24GB"]


def plan(*arguments, folder):
    return evermoe("plan", *arguments, folder=folder)


def setting(*flags):
    return parse_fit(parser("plan").parse_args(["plan", *flags]))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
    ],
)
def test_models_have_the_names_of_the_hub(name, known):
    asked = ["--model", name, "--nodes", "64", "--memory", "80GB"]
    assert setting(*asked).shape == MODELS[known]


def test_the_table_has_what_the_json_has(tmp_path):
    done = plan(*ASKED, "--json", "out/fit.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    text = " ".join(done.stdout.split())
    assert "gpt-l-moe: 1.715 billion parameters, 12 × 16 experts of 8.394 million, 103.1 million others" in text
    assert "4 nodes × 1, 24.0 GB each; preset auto with 2 copies, optimizer state replicated" in text
    found = json.loads((tmp_path / "out/fit.json").read_text())
    assert (found["fits"], found["memory"], found["device"]) == (True, 24 * 10**9, "gpu")
    assert list(found["peaks"]) == list(PHASES)
    held = MODELS["gpt-l-moe"].dense_parameters + 12 * 5 * MODELS["gpt-l-moe"].expert_parameters  # ceil(16 / 4) + 1
    assert found["peaks"]["step"]["share"] == 16 * held
    assert found["needed"] == max(each["counted"] for each in found["peaks"].values())
    assert f"yes: {found['needed'] / 1e9:.1f} GB" in text


@pytest.mark.full
def test_the_fewest_nodes_are_those_that_a_search_of_all_finds():
    for flags in ([], ["--shard-optimizer"], ["--workers-per-node", "2"], ["--expert-slots", "1"]):
        asked = setting("--model", "gpt-l-moe", "--nodes", "4", "--memory", "9GB", *flags)
        fitting = [
            nodes
            for nodes in range(1, 40)
            if all(
                moment.phase not in PHASES or max(map(asked.counted, moment.uses)) <= asked.memory
                for moment in footprint(asked.shape, asked.on(nodes).options).moments
            )
        ]
        assert fewest_nodes(asked) == fitting[0], flags


def test_what_does_not_fit_says_on_how_many_nodes_it_would():
    report = plan_fit(setting("--model", "gpt-l-moe", "--nodes", "2", "--memory", "9GB"))
    assert not report.fits and report.fewest_nodes is not None and report.fewest_nodes > 2
    assert verdict(report).endswith(f"it takes {report.fewest_nodes} nodes")
    again = plan_fit(setting("--model", "gpt-l-moe", "--nodes", str(report.fewest_nodes), "--memory", "9GB"))
    assert again.fits
    never = plan_fit(setting("--model", "mixtral-8x7b", "--nodes", "4", "--memory", "80GB"))
    assert never.fewest_nodes is None and "on no number of nodes up to 4096" in verdict(never)
    larger = plan_fit(setting("--model", "mixtral-8x7b", "--nodes", "4", "--memory", "141GB"))
    assert larger.fewest_nodes is None
    ((flags, nodes),) = larger.ways
    assert flags == "--shard-optimizer --expert-slots 1"
    taken = plan_fit(setting("--model", "mixtral-8x7b", "--nodes", str(nodes), "--memory", "141GB", *flags.split()))
    assert taken.fits


def test_what_is_frozen_is_a_flag_or_the_number_of_parameters_of_adapters():
    complete, experts, dense, lora = (
        plan_fit(setting(*ASKED, *flags))
        for flags in ([], ["--frozen", "experts"], ["--frozen", "dense"], ["--adapters", "1,200,000"])
    )
    shape = MODELS["gpt-l-moe"]
    assert experts.setting.shape.trained_parameters == shape.dense_parameters
    assert dense.setting.shape.trained_parameters == shape.parameters - shape.dense_parameters
    assert lora.setting.shape.trained_parameters == 1_200_000
    assert lora.needed < experts.needed < dense.needed < complete.needed
    adapted = plan_fit(setting(*ASKED, "--adapters", "1.2M", "--adapt-experts"))
    second = [plan.peaks["step"][1].working for plan in (adapted, lora)]
    assert second[0] - second[1] > 12 * 4 * shape.expert_parameters * 2, "changed matrices of 4 experts a layer"


def test_the_report_says_what_is_trained(tmp_path):
    done = plan(*ASKED, "--adapters", "1.2M", folder=tmp_path)
    text = " ".join(done.stdout.split())
    assert (
        "trained 1.2 million parameters, 0.000699 of all; frozen are the experts of 12 layers and 103.1 million "
        in text
    )
    assert "trained" not in plan(*ASKED, folder=tmp_path).stdout


@pytest.mark.full
def test_fewest_nodes_with_adapters_are_those_that_a_search_of_all_finds():
    for memory, flags in (("2GB", ["--adapters", "2M", "--adapt-experts"]), ("6GB", ["--frozen", "dense"])):
        asked = setting("--model", "gpt-l-moe", "--nodes", "4", "--memory", memory, *flags)
        fitting = [
            nodes
            for nodes in range(1, 40)
            if all(
                max(map(asked.counted, moment.uses)) <= asked.memory
                for moment in footprint(asked.shape, asked.on(nodes).options).moments
            )
        ]
        assert fewest_nodes(asked) == fitting[0], flags


def test_a_cpu_has_one_memory_for_all():
    asked = [*ASKED, "--preset", "gemini", "--device"]
    gpu, cpu = (plan_fit(setting(*asked, device)).peaks["step"][1] for device in ("gpu", "cpu"))
    assert gpu.snapshots == cpu.snapshots > 0
    assert setting(*asked, "cpu").counted(cpu) == cpu.share + cpu.working + cpu.host + cpu.snapshots


def test_a_folder_is_read_by_its_config(tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128}
    Qwen3MoeConfig(**sizes, num_experts=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16).save_pretrained(
        tmp_path / "small"
    )
    done = plan("--model", "small", "--nodes", "2", "--memory", "8GiB", "--json", "o.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shape = json.loads((tmp_path / "o.json").read_text())["shape"]
    assert (shape["layers"], shape["experts"], shape["expert_parameters"]) == (2, 4, 3 * 64 * 32)
    LlamaConfig(hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    assert "is one. Dense models" in plan(*ASKED[2:], "--model", "dense", folder=tmp_path).stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "unheard-of"}')
    assert "other: expected a config.json of a model" in plan(*ASKED[2:], "--model", "other", folder=tmp_path).stderr


def test_a_folder_needs_transformers_and_a_name_does_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    for name in [name for name in sys.modules if name.startswith("evermoe.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", *ASKED[2:], "--model", str(tmp_path)]) == 2
    assert "evermoe plan needs transformers: pip install 'evermoe[transformers]'" in capsys.readouterr().err
    assert main(["plan", *ASKED]) == 0


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("1.5 GiB", 3 << 29), ("512mib", 512 << 20)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--model", "gpt-5", "--nodes", "4", "--memory", "1GB"],
            "--model: unknown model 'gpt-5'; known are gpt-s-moe, gpt-m-moe",
        ),
        (["--model", "gpt-s-moe", "--nodes", "4"], "missing: --memory, that of each worker"),
        (["--memory", "80GB", "--nodes", "4", "--expert-slots", "2"], "--memory: expected --model with it"),
        (["--no-copies", "--nodes", "4", "--expert-slots", "2"], "--no-copies: expected --model with it"),
        (["--nodes", "4"], "missing: --expert-slots, the expert replicas of a layer"),
        ([*ASKED, "--memory", "80"], "--memory: expected a size such as 80GB, 24GiB or 512MiB, got '80'"),
        ([*ASKED, "--memory", "0GB"], "--memory: expected a size"),
        ([*ASKED, "--nodes", "0"], "--nodes: expected 1 to 16384"),
        ([*ASKED, "--expert-slots", "0"], "--expert-slots: expected 1 to"),
        ([*ASKED, "--workers-per-node", "0"], "--workers-per-node: expected 1 to"),
        ([*ASKED, "--copies"], "--copies: expected no such flag with --model"),
        ([*ASKED, "--load", "zipf:1"], "--load: expected no such flag with --model"),
        ([*ASKED, "--experts", "8"], "--experts: expected no such flag with --model"),
        (
            [*ASKED, "--adapters", "2Q"],
            "--adapters: expected a number of parameters such as 3407872 or 13.6M, got '2Q'",
        ),
        ([*ASKED, "--adapters", "2M", "--frozen", "dense"], "--frozen: expected no such flag with --adapters"),
        ([*ASKED, "--adapt-experts"], "--adapt-experts: expected --adapters with it"),
        (["--adapters", "2M", "--nodes", "4", "--expert-slots", "2"], "--adapters: expected --model with it"),
        ([*ASKED, "--shard-optimizer", "--preset", "lazarus"], "shard_optimizer: expected False with preset lazarus"),
    ],
)
def test_flags_that_are_wrong_name_what_was_expected(tmp_path, flags, message):
    done = plan(*flags, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert f"evermoe plan: {message}" in done.stderr
