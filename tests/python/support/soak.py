"""Random kills, run after run; ends at the first run that hangs, loses or mismatches.

    python tests/python/support/soak.py --runs 20

Each run draws from its seed: a preset, 4 or 5 workers, one or two kills at any step, together, in a recovery or apart,
a join or none. Two kills are survivable by construction: three nodes hold every expert's state, or, under `baft`, which
keeps one copy, train it. `moetion` and `pec` may lose tokens, but no step, and no more tokens than they say.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

from evermoe.planning.presets import PRESET_NAMES

RUN_LIMIT_SECONDS = 180


def command(seed: int, preset: str | None = None) -> list[str]:
    """The demo of this seed; `preset`: None for one that is drawn."""
    draw = random.Random(seed)
    drawn = draw.choice(PRESET_NAMES)
    preset = preset or drawn
    workers = draw.choice([4, 4, 5])
    steps = draw.randint(24, 32)
    first = draw.randint(1, steps - 4)
    second = min(steps - 2, first + draw.choice([0, 1, 2, 7]))
    victims = draw.sample(range(workers), draw.choice([1, 2]))
    kills = [f"{worker}@{step}" for worker, step in zip(victims, (first, second), strict=False)]
    join = ["--join", str(draw.randint(1, steps - 6))] if draw.random() < 0.6 else ["--no-join"]
    flags = [part for kill in kills for part in ("--kill", kill)]
    safe = ["--preset", preset, "--replication", "2" if preset == "pec" else "3"]  # which refuses more
    sizes = ["--layers", "2", "--hidden", "64", "--intermediate", "128", "--sequence", "64", "--seed", str(seed)]
    run = ["--workers", str(workers), "--steps", str(steps), "--no-baseline", "--plot", "/dev/null"]
    return [sys.executable, "-m", "evermoe", "demo", *run, *flags, *join, *safe, *sizes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--preset", choices=PRESET_NAMES, help="of all runs (default: each draws one)")
    options = parser.parse_args()
    for seed in range(options.first_seed, options.first_seed + options.runs):
        started = time.monotonic()
        line = command(seed, options.preset)
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=RUN_LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            print(f"seed {seed}: HANG after {RUN_LIMIT_SECONDS} s: {' '.join(line[4:])}")
            print((error.stdout or b"")[-3000:])
            return 1
        what = " ".join(line[line.index("--plot") + 2 : line.index("--layers")])
        print(f"seed {seed}: exit {done.returncode} in {time.monotonic() - started:.0f} s: {what}", flush=True)
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-2000:])
            return 1
    print(f"{options.runs} runs: no hang, no lost step, no mismatch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
