"""Peak memory of each worker at the start of a job, relative to its share: real processes on one machine.

    python benches/bench_start.py [--workers 3] [--from deferred normal folder hub] [--json PATH]

`hub` is a Qwen3-MoE of transformers, read from a folder that transformers has written. The others are a model of the
bench.

A worker's share is the bytes of its parameters, gradients and optimizer state. Its peak is the largest PSS of its
process until the first step begins, less that of a process that has imported torch and evermoe and built nothing. PSS
also counts copies in shared memory; these are reported separately, and there are none by default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import torch
from torch import nn

import evermoe

SAMPLE_SECONDS = 0.02


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return the PSS of a process in bytes: private and file pages, and shared memory."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Pss", "Pss_Shmem"):
            found[name] = int(rest.split()[0]) * 1024
    return {"own": found["Pss"] - found["Pss_Shmem"], "shared": found["Pss_Shmem"]}


def anonymous() -> int:
    """Return the anonymous bytes of this process, which change while it works and are quick to read."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Watch:
    """Samples this process's memory in a thread: PSS at the start of each phase, and its growth until the next.

    Args:
        phase: name of the first phase.
        empty: id of a process whose memory is subtracted. None: the current memory of this process.
    """

    def __init__(self, phase: str = "start", empty: int | None = None) -> None:
        self._empty, self._base = empty, memory()["own"]
        self.peaks: dict[str, int] = {}
        """Largest growth in bytes, by phase."""
        self._lock = threading.Lock()
        self.begin(phase)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, daemon=True)
        self._thread.start()

    def _sample_on(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            self.peaks[self.phase] = max(self.peaks[self.phase], self._fixed + anonymous())

    def begin(self, phase: str) -> None:
        """Begin another phase."""
        with self._lock:
            self.phase = phase
            base = self._base if self._empty is None else memory(self._empty)["own"]
            self._fixed = memory()["own"] - anonymous() - base
            self.peaks.setdefault(phase, 0)

    def stop(self) -> dict[str, int]:
        """Stop sampling. Return the largest growth in bytes, by phase."""
        self._is_over.set()
        self._thread.join()
        self._sample()
        return self.peaks


class Model(nn.Module):
    """A model whose experts hold nearly all parameters."""

    def __init__(self, layers: int, hidden: int, intermediate: int, experts: int, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            evermoe.MoE(hidden, intermediate, experts, top_k=2, gated=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def work(options: argparse.Namespace) -> None:
    """Run one worker: build the model, take two steps, and print the measurements."""
    torch.set_num_threads(1)
    evermoe.Session, evermoe.MoE  # noqa: B018  # imported before measurement begins
    torch.optim.AdamW([nn.Parameter(torch.zeros(8))], fused=True)
    watch = Watch()
    torch.manual_seed(0)
    sizes = options.layers, options.hidden, options.intermediate, options.experts
    weights = None
    model: nn.Module
    if options.how == "normal":
        model = Model(*sizes)
    elif options.how == "hub":
        from evermoe.integrations.transformers import from_pretrained

        watch = Watch()  # transformers is imported before measurement begins
        model, weights = from_pretrained(options.folder)
    else:
        with evermoe.deferred():
            model = Model(*sizes)
    if options.how == "folder":
        weights = evermoe.FolderWeights(options.folder, expert_matrices)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sampler = evermoe.ElasticSampler(64, batch_size=6)
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        preset=options.preset,
        replication=options.replication,
        placement=evermoe.Placement(expert_slots=options.expert_slots),
        weights=weights,
    )
    data = torch.randint(1024, (64, 9), generator=torch.Generator().manual_seed(0))
    said: dict[str, object] = {}
    for step in session.steps(2):
        if not said:
            start, shared = watch.stop()["start"], memory()["shared"]
            held = sum(p.nbytes for p in model.parameters())
            state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
            said = {"rank": session.group.rank, "share": 2 * held + state, "start": start, "shared": shared}
            said["parameters"] = held
        with step:
            tokens = data[step.indices]
            if options.how == "hub":
                loss = model(input_ids=tokens, labels=tokens).loss
            else:
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            step.backward(loss)
    print("RESULT " + json.dumps(said | {"loss": session.loss}), flush=True)


def expert_matrices(files: evermoe.FolderWeights, path: str, expert: int) -> list[torch.Tensor]:
    return [files.tensor(f"{path}.{expert}.{name}.weight") for name in ("gate", "up", "down")]


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """Write a folder in the format of Hugging Face, layer by layer, with a tensor for each matrix of an expert."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    small = Model(0, options.hidden, options.intermediate, options.experts)
    files = {"dense.safetensors": {key: value for key, value in small.state_dict().items()}}
    index = {}
    for layer in range(options.layers):
        tensors = {f"blocks.{layer}.router.weight": torch.randn(options.experts, options.hidden) * 0.02}
        for expert in range(options.experts):
            for name, shape in (("gate", (1, 0)), ("up", (1, 0)), ("down", (0, 1))):
                size = [(options.hidden, options.intermediate)[side] for side in shape]
                tensors[f"blocks.{layer}.experts.{expert}.{name}.weight"] = torch.randn(size) * 0.02
        files[f"layer-{layer}.safetensors"] = tensors
        save_file(tensors, folder / f"layer-{layer}.safetensors")
        index |= dict.fromkeys(tensors, f"layer-{layer}.safetensors")
    save_file(files["dense.safetensors"], folder / "dense.safetensors")
    index |= dict.fromkeys(files["dense.safetensors"], "dense.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_hub(folder: Path, options: argparse.Namespace) -> None:
    """Write a folder with transformers."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        moe_intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def run(options: argparse.Namespace, how: str, folder: str) -> list[dict[str, float]]:
    """Run a job. Return the measurements of each worker."""
    names = ("layers", "hidden", "intermediate", "experts", "replication", "expert_slots", "preset")
    own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    job = f"--job=bench-start-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "evermoe", "run", "--workers", str(options.workers), job, __file__, "--worker"]
    done = subprocess.run(
        [*command, f"--how={how}", f"--folder={folder}", *own],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=options.limit,
        check=False,
    )
    lines = re.findall(r"RESULT (\{[^}]*\})", done.stdout)  # output of several workers may share a line
    if len(lines) != options.workers:
        raise SystemExit(f"{how}: {len(lines)} of {options.workers} workers have finished:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--from", dest="kinds", nargs="+", default=["deferred", "normal", "folder"])
    for name, size in (("layers", 4), ("hidden", 512), ("intermediate", 1024), ("experts", 24)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--expert-slots", type=int, default=8, help="expert slots per worker and layer (%(default)s)")
    parser.add_argument("--replication", type=int, default=0)
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if "folder" in options.kinds:
            write_folder(Path(folder), options)
        if "hub" in options.kinds:
            write_hub(Path(folder) / "hub", options)
        for how in options.kinds:
            results[how] = run(options, how, str(Path(folder) / "hub") if how == "hub" else folder)
            for said in sorted(results[how], key=lambda each: each["rank"]):
                print(
                    f"{how:9} worker {said['rank']:.0f}: share {said['share'] / 2**20:6.0f} MiB, peak at start "
                    f"{said['start'] / 2**20:6.0f} MiB = {said['start'] / said['share']:.2f} x the share, "
                    f"{said['shared'] / 2**20:.0f} MiB in shared memory"
                )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
