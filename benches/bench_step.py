"""The cost of a session: a steady step, compared with plain DDP of the same layers and with other trainers.

    python benches/bench_step.py [--models small wide] [--workers 1 2 4] [--rounds 6] [--json PATH] [--pin]

The method is that of `bench_presets.py`: the workers of all candidates are alive at once and train in turns, each turn
directly before or after one of `plain`. A ratio is the median over the rounds of the turn's value over that of `plain`.
All have the same sizes, seed, batches and number of experts on each worker, and clip the gradient's norm.

| candidate | what it does |
|---|---|
| plain | torch's DistributedDataParallel around evermoe's layers, whose experts are in fixed groups of torch's |
| plain again | the same once more: the distance of its ratio from 1 is the noise |
| none | an `evermoe.Session` without copies |
| a preset | an `evermoe.Session` with copies on two nodes; none with one worker |
| torchft | torchft's Manager and its DistributedDataParallel; each worker is a replica group, so it has all experts |
| transformers | transformers' experts and its `AllToAllEP` in the same model, whose rest is in DDP |

`--placements`: each expert is on `one` worker, or on `all`, which is the same with one worker. torchft only takes part
with `all`. `transformers` has gated experts of at most as many parameters. With `all` it exchanges no tokens, whereas a
session balances those of replicas.

"collectives" counts those of all process groups; "switches" are context switches of all threads. Both, and the
processor's time, which is that of all threads, are means over the workers. `--pin` reserves one processor for evermoe's
own threads, as a core to spare; all candidates then train on the others. For where the time goes, see
`bench_account.py --base plain`.
"""

import argparse
import random

from bench_presets import Candidate, figures, train_in_turns, turns_parser
from common import Table

MODELS = {
    "tiny": {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 24, "experts": 4, "sequence": 16, "batch": 4},
    "small": {"layers": 4, "hidden": 128, "heads": 4, "intermediate": 256, "experts": 8, "sequence": 128, "batch": 16},
    "wide": {"layers": 4, "hidden": 256, "heads": 4, "intermediate": 768, "experts": 8, "sequence": 128, "batch": 32},
}
PLACEMENTS = ("one", "all")
COLUMNS = {"model": "<6", "workers": "<2", "experts on": "<4", "candidate": "<12", "step ms": "8.1f", "ratio": "7.3f"}
COLUMNS |= {"quartiles": "<13", "processor ms": "8.1f", "processor": "7.3f", "collectives": "6.1f", "switches": "7.0f"}


def main():
    """Print a row for each model, number of workers, placement and candidate."""
    made = turns_parser(__doc__, presets=("auto", "gemini"), rounds=6)
    made.add_argument("--models", nargs="+", choices=MODELS, default=["small", "wide"])
    made.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4], help="numbers of workers (%(default)s)")
    made.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    arguments = made.parse_args()
    random.seed(0)
    title = "A step, compared with that of plain DDP; medians over the rounds"
    table = Table(title, COLUMNS, is_markdown=True)
    for model in arguments.models:
        for workers in arguments.workers:
            for placement in arguments.placements[: 1 if workers == 1 else None]:
                measure(table, arguments, model, workers, placement)
                table.write(arguments)


def measure(table, arguments, model, workers, placement):
    """Run all candidates of a setting, and add a row for each."""
    sizes = MODELS[model] | {"top_k": 2}
    if sizes["experts"] % workers:
        raise SystemExit(f"--workers: expected divisors of {sizes['experts']} experts, got {workers}")
    slots = sizes["experts"] // (workers if placement == "one" else 1)
    setting = {"workers": workers, "expert_slots": slots, "settings": ["busy"], "delay_ms": 0.0}
    options = argparse.Namespace(**vars(arguments) | sizes | setting)
    where = f"{model} model, {workers} workers, each expert on {placement}"
    rivals = ["torchft"] * (slots == sizes["experts"]) + ["transformers"]
    started = []
    try:
        for name in ("plain", "plain again", "none", *arguments.presets * (workers > 1), *rivals):
            started.append(Candidate(name, options))
        plain, *others = train_in_turns(started, options, where)
    finally:
        for candidate in started:
            candidate.close()
    plain.turns["busy"] = [turn for candidate in others for turn in candidate.plain_turns["busy"]]
    plain.plain_turns = plain.turns
    for candidate in (plain, *others):
        row = figures(candidate.turns["busy"], candidate.plain_turns["busy"])
        setting = {"model": model, "workers": workers, "experts on": placement, "candidate": candidate.name}
        table.add(**setting, turns=candidate.turns["busy"], **row)


if __name__ == "__main__":
    main()
