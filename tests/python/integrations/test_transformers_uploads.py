"""A trained model goes to the Hub from one worker of a session, and is downloaded again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
import huggingface_hub  # noqa: E402

from evermoe.integrations.transformers import export, from_pretrained  # noqa: E402
from support import hub_upload  # noqa: E402
from support.hub import build  # noqa: E402
from support.hub_server import TOKEN, hub_server  # noqa: E402

TESTS = Path(hub_upload.__file__).parents[1]


def test_one_worker_uploads_what_all_have_exported_and_it_is_read_again(tmp_path):
    folder, out, memory = tmp_path / "folder", tmp_path / "out", tmp_path / "memory"
    memory.mkdir(mode=0o700)
    build("qwen3").save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with hub_server() as hub:
        done = run(hub.url, tmp_path, "--memory-dir", str(memory), hub_upload.__file__, str(folder), str(out))
        assert done.returncode == 0, done.stdout + done.stderr
        ((name, repository),) = hub.repositories.items()
        assert (name, len(repository.commits)) == ("me/model", 1), "one worker creates it, and commits once"
        exported = {str(each.relative_to(out)): each.read_bytes() for each in out.rglob("*") if each.is_file()}
        assert repository.files == exported
        assert repository.large == {"model.safetensors"}
        assert exported.keys() > {"config.json", "generation_config.json", "tokenizer_config.json"}
        again = Path(
            huggingface_hub.HfApi(hub.url, TOKEN).snapshot_download("me/model", cache_dir=tmp_path / "downloads")
        )
    trained = transformers.AutoModelForCausalLM.from_pretrained(again)
    expected = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(trained.state_dict(), expected.state_dict(), rtol=0, atol=0)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert not any(torch.equal(start[name], tensor) for name, tensor in trained.state_dict().items())
    model, weights = from_pretrained(again)
    export(weights, model, tmp_path / "back")
    for name in repository.large:
        assert (tmp_path / "back" / name).read_bytes() == exported[name]


def run(url, folder, *arguments):
    """Run a job of three workers that know a Hub by its address."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "HF_ENDPOINT": url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # whose server is not part of the Hub's interface: files go by git's protocol
    }
    command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", *arguments]
    return subprocess.run(command, env=environment, timeout=170, capture_output=True, text=True, check=False)
