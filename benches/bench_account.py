"""Where the milliseconds go that a preset takes of a step: by span of the training thread, and by thread.

    python benches/bench_account.py [--presets auto] [--launches 4] [--rounds 6] [--json PATH]

As `bench_presets.py` measures: workers of a preset and workers without copies live at once and take turns. All of them
are started anew for each launch, since processes have a bias of their own which no number of rounds shows; a figure is
the median over the launches of medians over the rounds, followed by the least and the largest of the launches. `rest`
is a step without its span `compute`. A thread is `ready` while it could run and has no processor; those of libraries
are `python`.
"""

import random
import statistics
import sys

from bench_presets import Candidate, mean, parser, ratios
from common import Table
from preset_worker import SPANS

MIN_MS = 0.05
"""Threads that take less are not shown."""


def main():
    made = parser(__doc__, presets=("auto",), rounds=6)
    made.add_argument("--launches", type=int, default=4, help="times that all workers are started (%(default)s)")
    arguments = made.parse_args()
    random.seed(0)
    columns = {"setting": "<8", "preset": "<9", "what": "<6", "of": "<20", "ms": "8.2f", "from": "8.2f", "to": "8.2f"}
    table = Table("Milliseconds of a step more than without copies; `step` is the ratio", columns)
    for preset in arguments.presets:
        launches = [launch(preset, arguments, number) for number in range(arguments.launches)]
        for setting in arguments.settings:
            for (what, of), values in gathered([each[setting] for each in launches]).items():
                if what == "step" or of in SPANS or max(map(abs, values)) >= MIN_MS:
                    row = {"ms": statistics.median(values), "from": min(values), "to": max(values)}
                    table.add(setting=setting, preset=preset, what=what, of=of, **row)
    table.write(arguments)


def launch(preset, arguments, number):
    """By setting, the figures of one launch."""
    started = [Candidate("none", arguments), Candidate(preset, arguments)]
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
    return {setting: figures(other.turns[setting], other.beside[setting]) for setting in arguments.settings}


def figures(turns, plain):
    """(kind, of what) → ratio or milliseconds, the median over the rounds."""

    def more(value):
        return 1e3 * statistics.median(value(turn) - value(beside) for turn, beside in zip(turns, plain, strict=True))

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
    """The values of all launches by key; 0 where a launch has none."""
    keys = dict.fromkeys(key for each in launches for key in each)
    return {key: [each.get(key, 0.0) for each in launches] for key in keys}


if __name__ == "__main__":
    main()
