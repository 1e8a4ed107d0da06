"""Peak memory of workers at the start, in steps and in a recovery, compared with `evermoe plan --model`.

    python benches/bench_memory.py [--settings none auto gemini] [--dense replicated sharded]
                                   [--train all dense adapters] [--json PATH]

The workers are real processes on one machine, one of which is killed mid-step. A peak is the largest PSS of a worker's
process, less that of a process that has only imported torch. It excludes shared memory, which is measured by the files
of the copies. The largest peak of the workers is compared with the planner's.

`none` keeps no copies: instead each expert trains on two workers, which have twice the slots. With a sharded optimizer,
dense modules then have no second owner, so that no worker is killed.

`--train dense` freezes experts. `--train adapters` freezes a Qwen3-MoE of transformers and trains LoRA's adapters of
attention and experts; the process whose memory is subtracted has imported transformers, peft and evermoe, too, so that
the plan is compared without `LIBRARY_BYTES`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evermoe
from bench_start import Model, Watch
from evermoe.events import Begin, ConnectionLost, CoverageChanged, Event
from evermoe.planning.footprint import LIBRARY_BYTES, PHASES, footprint
from evermoe.planning.seating import FootprintOptions
from evermoe.presets import BY_NAME, ReplayedCopies
from evermoe.state.model_shape import shape_of

SIZES = {"layers": 3, "hidden": 512, "intermediate": 1024, "experts": 24, "vocabulary": 8192}
SETTINGS = {
    "none": {"preset": "lazarus", "copies": 0, "replicas": 2},
    "auto": {"preset": "auto", "copies": 2, "replicas": 1},
    "gemini": {"preset": "gemini", "copies": 2, "replicas": 1},
}
TRAINED = ("all", "dense", "adapters")
RANK = 16
"""Of adapters."""


def model_of(options: argparse.Namespace, train: str) -> nn.Module:
    sizes = [getattr(options, name) for name in SIZES]
    if train == "adapters":
        return adapted(*sizes)
    model = Model(*sizes)
    for block in model.blocks if train == "dense" else ():
        block.experts.requires_grad_(False)
    return model


def adapted(layers: int, hidden: int, intermediate: int, experts: int, vocabulary: int) -> nn.Module:
    """Return a Qwen3-MoE of transformers with adapters of attention and experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from evermoe.integrations.transformers import make_elastic

    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
    )
    lora = LoraConfig(
        r=RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return make_elastic(get_peft_model(AutoModelForCausalLM.from_config(config), lora))


def loss_of(model: nn.Module, tokens: torch.Tensor, train: str) -> torch.Tensor:
    if train == "adapters":
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def session_options(options: argparse.Namespace, name: str, dense: str) -> dict[str, Any]:
    """Return the options of the planner."""
    setting = SETTINGS[name]
    slots = -(-options.experts * setting["replicas"] // options.workers)
    log = options.log_mib << 20
    preset = "auto" if name == "none" and dense == "sharded" else setting["preset"]
    chosen = {
        "preset": preset,
        "replication": setting["copies"],
        "expert_slots": slots,
        "min_replicas": setting["replicas"],
    }
    return chosen | {"shard_optimizer": dense == "sharded", "replay_log_bytes": log}


def session_arguments(options: argparse.Namespace, name: str, dense: str) -> dict[str, Any]:
    """Return the same options for a session."""
    found = session_options(options, name, dense)
    preset = BY_NAME[found["preset"]]
    log = {"replay_log_bytes": found["replay_log_bytes"]} if issubclass(preset, ReplayedCopies) else {}
    return {
        "preset": preset(**log),
        "replication": found["replication"],
        "placement": evermoe.Placement(expert_slots=found["expert_slots"], min_replicas=found["min_replicas"]),
        "shard_optimizer": found["shard_optimizer"],
    }


def has_recovery(name: str, dense: str) -> bool:
    """Return whether the job survives the loss of a worker."""
    return bool(SETTINGS[name]["copies"]) or dense == "replicated"


# ---- a worker


def work(options: argparse.Namespace) -> None:
    """Train one worker, which is killed or recovers, and print its measurements."""
    torch.set_num_threads(1)
    with evermoe.deferred():
        model = model_of(options, options.as_trained)
    watch = Watch("start", options.empty)  # without the experts that transformers and peft have made

    def listen(event: Event) -> None:
        if isinstance(event, ConnectionLost):
            watch.begin("recovery")
        elif isinstance(event, Begin) and watch.phase == "start":
            watch.begin("step")
        elif isinstance(event, CoverageChanged) and event.is_complete and watch.phase == "recovery":
            watch.begin("after")  # by now the copies exist that are made during the repeated step

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    sampler = evermoe.ElasticSampler(64, batch_size=12)
    session = evermoe.Session(
        model, optimizer, sampler, on_event=listen, **session_arguments(options, options.setting, options.as_dense)
    )
    data = torch.randint(options.vocabulary, (64, 9), generator=torch.Generator().manual_seed(0))
    arenas = 0
    for step in session.steps(options.steps):
        own = list(session._store.directory.glob(f"*{session._membership.id}.arena"))
        if session.group.size == options.workers:
            arenas = max(arenas, sum(path.stat().st_blocks * 512 for path in own))
        with step:
            step.backward(loss_of(model, data[step.indices], options.as_trained))
            is_last = session.group.rank == session.group.size - 1
            if step.number == options.kill_at and session.group.size == options.workers and is_last:
                report(watch, arenas)
                os.kill(os.getpid(), signal.SIGKILL)
    report(watch, arenas)


def report(watch: Watch, arenas: int) -> None:
    print("RESULT " + json.dumps({"arenas": arenas} | watch.stop()) + " END", flush=True)


# ---- the driver


@contextmanager
def empty_process(train: str) -> Iterator[int]:
    """Yield the id of a process that has only imported torch, or what adapters need."""
    imports = "peft, bench_memory, transformers.models.qwen3_moe.modeling_qwen3_moe" if train == "adapters" else "torch"
    code = f"import sys, {imports}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


def run(options: argparse.Namespace, train: str, setting: str, dense: str) -> dict[str, int]:
    """Return the largest peak of all workers by phase."""
    own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in (*SIZES, "workers", "steps", "log_mib")]
    with empty_process(train) as empty:
        job = ["--workers", str(options.workers), "--job", f"bench-memory-{os.getpid()}"]
        worker = [
            "--worker",
            f"--empty={empty}",
            f"--setting={setting}",
            f"--as-dense={dense}",
            f"--as-trained={train}",
        ]
        command = [sys.executable, "-m", "evermoe", "run", *job, __file__, *worker]
        kill_at = options.kill_at if has_recovery(setting, dense) else options.steps
        done = subprocess.run(
            [*command, *own, f"--kill-at={kill_at}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=options.limit,
            check=False,
        )
    said = [json.loads(each) for each in re.findall(r"RESULT (\{[^}]*\}) END", done.stdout)]
    survivors = options.workers - 1 if has_recovery(setting, dense) else 0
    if len(said) != options.workers or sum("recovery" in each for each in said) != survivors:
        raise SystemExit(f"{train}, {setting}, {dense}: a worker did not end as expected:\n{done.stdout}{done.stderr}")
    return {name: max(each.get(name, 0) for each in said) for name in (*PHASES, "arenas")}


def planned(options: argparse.Namespace, train: str, setting: str, dense: str) -> dict[str, dict[str, int]]:
    """Return the planner's memory of the largest worker, by phase."""
    with torch.device("meta"):
        shape = shape_of(model_of(options, train))
    chosen = FootprintOptions(workers=options.workers, weights="float32", **session_options(options, setting, dense))
    found = footprint(shape, chosen, is_roomy=True)
    known = LIBRARY_BYTES if train == "adapters" else 0
    peaks = {phase: found.peak(phase, lambda use: use.process)[1] for phase in PHASES}
    copies = found.peak("step", lambda use: use.snapshots)[1].snapshots
    return {
        phase: use._asdict() | {"process": use.process - known, "share": use.share, "snapshots": copies}
        for phase, use in peaks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--dense", nargs="+", choices=["replicated", "sharded"], default=["replicated", "sharded"])
    parser.add_argument("--train", nargs="+", choices=TRAINED, default=list(TRAINED))
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--log-mib", type=int, default=256, help="replay_log_bytes of auto (%(default)s)")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--kill-at", type=int, default=11, help="step in which the last worker is killed (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--empty", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--as-dense", help=argparse.SUPPRESS)
    parser.add_argument("--as-trained", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    rows = []
    print("MiB: share; shared memory, planned and measured; then for each phase planned, measured, and their ratio")
    for train, setting, dense in itertools.product(options.train, options.settings, options.dense):
        expected, found = planned(options, train, setting, dense), run(options, train, setting, dense)
        parts = [
            f"{phase} {expected[phase]['process'] >> 20:5} {found[phase] >> 20:5} "
            f"{found[phase] / expected[phase]['process']:.2f}"
            for phase in PHASES
            if found[phase]
        ]
        copies = f"{expected['step']['snapshots'] >> 20:5} {found['arenas'] >> 20:5}"
        share = expected["step"]["share"] >> 20
        print(f"{train:8} {setting:7} {dense:10} {share:5} {copies}  {'  '.join(parts)}", flush=True)
        rows.append({"train": train, "setting": setting, "dense": dense, "planned": expected, "found": found})
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
