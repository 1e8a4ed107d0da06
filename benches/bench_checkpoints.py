"""Step time with a checkpoint after each step, relative to none: on this disk, and on a simulated disk of 20 MB/s.

    python benches/bench_checkpoints.py [--presets auto gemini …] [--rounds 6] [--folder FOLDER] [--json PATH]

The method is that of `bench_presets.py`: all candidates of a preset are alive at once and train in turns, each paired
with one without checkpoints. `again` writes none either: the distance of its ratio from 1 is the noise. On a slow disk
a checkpoint takes several steps, and checkpoints scheduled in the meantime are skipped.
"""

import random
import sys
import tempfile

from bench_presets import Candidate, figures, parser
from common import Table

KINDS = ("again", "disk", "slow disk")


def main():
    made = parser(__doc__, presets=("auto", "gemini"), rounds=6)
    made.add_argument("--folder", default=".", help="folder for the checkpoints, on the disk to measure (%(default)s)")
    made.add_argument("--rate", type=float, default=20e6, help="bytes per second of the slow disk (%(default)s)")
    arguments = made.parse_args()
    random.seed(0)
    columns = {"setting": "<8", "preset": "<9", "checkpoints": "<12", "step ms": "8.0f", "ratio": "7.3f"}
    columns |= {"quartiles": "<13", "95 %": "<13", "processor": "10.3f"}
    table = Table("Each compared with the same steps without checkpoints; medians over the rounds", columns)
    for preset in arguments.presets:
        for setting, kind, row in measure(preset, arguments):
            table.add(setting=setting, preset=preset, checkpoints=kind, **row)
    table.write(arguments)


def measure(preset, arguments):
    """Yield the figures of each setting and kind of disk."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        more = {
            "again": [],
            "disk": ["--checkpoints", f"{folder}/disk"],
            "slow disk": ["--checkpoints", f"{folder}/slow", "--disk-rate", str(arguments.rate)],
        }
        started = [Candidate(preset, arguments)]
        try:
            started += [Candidate(preset, arguments, more[kind]) for kind in KINDS]
            for candidate in started:
                candidate.start()
            plain, *others = started
            for number in range(arguments.rounds):
                for setting in arguments.settings:
                    for candidate in random.sample(others, len(others)):
                        candidate.pair(plain, setting)
                print(f"{preset}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        finally:
            for candidate in started:
                candidate.close()
    for setting in arguments.settings:
        for kind, candidate in zip(KINDS, others, strict=True):
            yield setting, kind, figures(candidate.turns[setting], candidate.plain_turns[setting])


if __name__ == "__main__":
    main()
