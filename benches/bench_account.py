"""Where a preset spends the additional milliseconds of a step: by span of the training thread, and by thread.

    python benches/bench_account.py [--presets auto] [--base none] [--launches 4] [--rounds 6] [--json PATH]

With `--base plain` presets, and a session without copies, are compared with plain DDP of the same layers, as in
`bench_step.py`, and each worker has `--expert-slots`, by default --experts / --workers. In DDP's span `reduce` the
gradients of experts on several workers are summed, in `vote` the gradient's norm is, and all clipped.

The method is that of `bench_presets.py`: workers of a preset and those of the base are alive at once and take turns.
All of them are started again for each launch, since processes also differ from launch to launch, which more rounds do
not show. A value is the median over the launches of the medians over the rounds, followed by the smallest and the
largest of the launches. `rest` is a step without its span `compute`. A thread is `ready` while it could run but has no
processor. Threads of libraries are called `python`.
"""

import random
import statistics
import sys

from bench_presets import Candidate, mean, parser, ratios
from common import Table
from preset_worker import SPANS

MIN_MS = 0.05
"""Milliseconds per step below which a thread is not shown."""


def main():
    made = parser(__doc__, presets=("auto",), rounds=6)
    made.add_argument("--launches", type=int, default=4, help="number of times to start all workers (%(default)s)")
    made.add_argument("--base", choices=("none", "plain"), default="none", help="compare with this (%(default)s)")
    arguments = made.parse_args()
    names = arguments.presets
    if arguments.base == "plain":
        names = ["none", *names]
        arguments.expert_slots = arguments.expert_slots or arguments.experts // arguments.workers
    random.seed(0)
    columns = {"setting": "<8", "preset": "<9", "what": "<6", "of": "<20", "ms": "8.2f", "from": "8.2f", "to": "8.2f"}
    table = Table(f"Additional milliseconds per step, compared with {arguments.base}; `step` is the ratio", columns)
    for preset in names:
        launches = [launch(preset, arguments, number) for number in range(arguments.launches)]
        for setting in arguments.settings:
            for (what, of), values in gathered([each[setting] for each in launches]).items():
                if what == "step" or of in SPANS or max(map(abs, values)) >= MIN_MS:
                    row = {"ms": statistics.median(values), "from": min(values), "to": max(values)}
                    table.add(setting=setting, preset=preset, what=what, of=of, **row)
    table.write(arguments)


def launch(preset, arguments, number):
    """Return the figures of one launch by setting."""
    started = [Candidate(arguments.base, arguments), Candidate(preset, arguments)]
    try:
        for candidate in started:
            candidate.start()
        plain, other = started
        for _ in range(arguments.rounds):
            for setting in arguments.settings:
                other.pair(plain, setting)
        print(f"{preset}: launch {number + 1} of {arguments.launches}", file=sys.stderr, flush=True)
    finally:
        for candidate in started:
            candidate.close()
    return {setting: figures(other.turns[setting], other.plain_turns[setting]) for setting in arguments.settings}


def figures(turns, plain):
    """Return medians over the rounds by (kind, name): the ratio of the step, and milliseconds."""

    def more(value):
        return 1e3 * statistics.median(value(turn) - value(base) for turn, base in zip(turns, plain, strict=True))

    def of_span(span):
        return lambda turn: statistics.fmean(answer["spans"][span] for answer in turn)

    def of_thread(name, which):
        return lambda turn: statistics.fmean(answer["threads"].get(name, (0.0, 0.0))[which] for answer in turn)

    found = {("step", "ratio"): ratios(turns, plain, "seconds")[1]}
    found["wall", "step"] = more(lambda turn: mean(turn, "seconds"))
    found["wall", "rest"] = more(lambda turn: mean(turn, "seconds") - of_span("compute")(turn))
    found |= {("wall", span): more(of_span(span)) for span in SPANS}
    names = sorted({name for turn in (*turns, *plain) for answer in turn for name in answer["threads"]})
    for which, what in enumerate(("cpu", "ready")):
        found |= {(what, name): more(of_thread(name, which)) for name in names}
    return found


def gathered(launches):
    """Return the values of all launches by key, with 0 for a launch that lacks the key."""
    keys = dict.fromkeys(key for each in launches for key in each)
    return {key: [each.get(key, 0.0) for each in launches] for key in keys}


if __name__ == "__main__":
    main()
