"""The cost of protecting the state, by preset: step time, processor time, bytes, memory and recovery.

    python benches/bench_presets.py [--presets auto gemini …] [--rounds 4] [--launches 1] [--json PATH]

The workers of all candidates are alive at once. The candidates train in turns of a few steps, while the others wait for
a line on standard input. Directly before or after each turn the candidate `none` takes one, too. A ratio is the median
over the rounds of the turn's time over that of `none`, so that a slow moment of the machine affects both. Processes
also differ from launch to launch, which more rounds do not show: `--launches` starts all of them again, and the table
then shows medians over the launches.

A preset can have options: `auto+snapshot_interval=100` is `auto` with fewer snapshots in its own memory. The other
candidates all have `replication=0`:

    none        no copies
    unchecked   the same, and votes without digests
    again       the same once more: the distance of its ratio from 1 is the noise
    blocking    after each step, every member copies all its state to a host tensor and exchanges that with its
                neighbours (`Group.exchange`) before it continues
    dcp         after each step, `torch.distributed.checkpoint.async_save` of everything to a folder in memory, once the
                previous one is complete; its default staging copies in the training thread
    dcp-staged  the same with `DefaultStager` in a thread; the next update waits until the copy is complete

Before its first turn a preset takes `--warm-up` steps. In the first twenty it profiles when the network is idle, which
it repeats after each change of the members and every thousand steps. A few of these steps are tens of milliseconds
slower.

Settings: in `busy` the workers' threads saturate the machine. In `idle` each worker sleeps for `--delay-ms` before each
step, as if it waited for an accelerator or for data. `--pin` reserves one processor for the copies: all candidates then
train on the others.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from common import Table
from evermoe.launch import LocalJob
from evermoe.planning.presets import PRESET_NAMES
from preset_worker import BASELINES, MODEL, SPANS

SETTINGS = ("idle", "busy")
SIZES = ("arenas MB", "other MB")
WORKER_NAMES = {"again": "none", "plain again": "plain"}
"""Candidates that only show the noise, and the candidates that they repeat."""


class Candidate:
    """The workers of one method of protection. Only one candidate trains at any time."""

    def __init__(self, name, arguments, more=()):
        self.name, self.arguments = name, arguments
        self.turns = {setting: [] for setting in SETTINGS}
        self.plain_turns = {setting: [] for setting in SETTINGS}
        """For each turn, the turn of the candidate without copies directly before or after it."""
        self.recovery = {}
        self.folder = Path(tempfile.mkdtemp(prefix=f"evermoe-bench-{name}-", dir=arguments.memory_dir))
        sizes = {each: getattr(arguments, each) for each in (*MODEL, "batch", "expert_slots")} | {
            "threads": arguments.threads
        }
        options = [
            part for each, value in sizes.items() if value for part in (f"--{each.replace('_', '-')}", str(value))
        ]
        preset, *more_options = name.split("+")
        options += ["--pin"] * arguments.pin + [part for each in more_options for part in ("--option", each)]
        command = [
            sys.executable,
            str(Path(__file__).with_name("preset_worker.py")),
            WORKER_NAMES.get(preset, preset),
            "--folder",
            str(self.folder),
        ]
        self._job = LocalJob(
            [*command, *options, *more],
            f"bench-{uuid.uuid4().hex[:8]}",
            arguments.workers,
            memory_dir=arguments.memory_dir,
            environment={"OMP_NUM_THREADS": str(arguments.threads)},
        )
        self._job.__enter__()
        for index in range(arguments.workers):
            with (self.folder / f"log-{index}").open("w") as log:
                self._job.start(index, f"node-{index:02d}", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def start(self):
        """Wait until all workers have copied the initial state. Workers of a preset then take their warm-up steps."""
        self.about = self.answers()
        if self.name.split("+")[0] in PRESET_NAMES and self.arguments.warm_up:
            setting = self.arguments.settings[0]
            self._send_turn(
                range(self.arguments.workers), steps=self.arguments.warm_up, delay_ms=self._delay_ms(setting)
            )
            self.answers()

    def answers(self):
        """Return a line from each worker."""
        return [self._answer(worker) for worker in self._job.workers]

    def _answer(self, worker):
        line = worker.process.stdout.readline()
        if not line:
            raise RuntimeError(self._last_log_line(worker.index))
        return json.loads(line)

    def _last_log_line(self, index):
        lines = (self.folder / f"log-{index}").read_text().splitlines()
        return lines[-1] if lines else "a worker ended and its log is empty"

    def turn(self, setting):
        """Take the steps of a turn. Return the measurements of each worker."""
        self._send_turn(range(self.arguments.workers), steps=self.arguments.steps, delay_ms=self._delay_ms(setting))
        return self.answers()

    def _delay_ms(self, setting):
        return self.arguments.delay_ms if setting == "idle" else 0.0

    def pair(self, plain, setting):
        """Take a turn, and one of `plain`, in random order."""
        turns = {each: each.turn(setting) for each in random.sample([self, plain], 2)}
        self.turns[setting].append(turns[self])
        self.plain_turns[setting].append(turns[plain])

    def _send_turn(self, workers, **turn):
        for index in workers:
            self._job.workers[index].process.stdin.write(json.dumps(turn) + "\n")
            self._job.workers[index].process.stdin.flush()

    def kill(self):
        """Kill the last worker with SIGKILL in the middle of a step, and measure how the others recover."""
        *others, dying = range(self.arguments.workers)
        self._send_turn(others, steps=2, delay_ms=0.0)
        self._send_turn([dying], steps=2, delay_ms=0.0, dies=True)
        killed = self._answer(self._job.workers[dying])["killed"]
        answers = [self._answer(self._job.workers[index]) for index in others]
        first = max(min(at for at in answer["committed_at"] if at > killed) for answer in answers)
        self.recovery = {
            "next commit s": first - killed,
            "steps undone": max(answer["recovered"]["steps_lost"] for answer in answers),
            "recovered": [answer["recovered"] for answer in answers],
        }

    def sizes(self):
        """Return the memory of all workers: shared arenas, and anonymous memory."""
        arenas = sum(path.stat().st_blocks * 512 for path in self._job.memory.rglob("*.arena"))
        own = statistics.median(
            sum(answer["rss"] for answer in turn) for turns in self.turns.values() for turn in turns[-2:]
        )
        return dict(zip(SIZES, (arenas / 1e6, own / 1e6), strict=True))

    def close(self):
        """Kill the workers and remove their files."""
        for worker in self._job.workers:
            worker.process.kill()
        self._job.__exit__()
        self._job.remove_memory()
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    arguments = parse()
    random.seed(0)
    launches = [launch(arguments, number) for number in range(arguments.launches)]
    names = [name for name in launches[0] if all(name in each for each in launches)]
    show([[each[name] for each in launches] for name in names], arguments).write(arguments)


def launch(arguments, number):
    """Run all candidates once, from start to kill. Return them by name, with their measurements."""
    started = []
    try:
        for name in ("none", "again", *arguments.baselines, *arguments.presets):
            started.append(Candidate(name, arguments))
        plain, *others = train_in_turns(started, arguments, f"launch {number + 1} of {arguments.launches}")
        for candidate in others:
            plain.turns = {setting: plain.turns[setting] + candidate.plain_turns[setting] for setting in SETTINGS}
        plain.plain_turns = plain.turns
        for candidate in (plain, *others):
            candidate.memory = candidate.sizes()
        for candidate in others:
            if candidate.name in arguments.presets and not arguments.no_kill:
                succeeds(candidate, candidate.kill)
    finally:
        for candidate in started:
            candidate.close()
    return {candidate.name: candidate for candidate in (plain, *others)}


def train_in_turns(started, arguments, where):
    """Take all turns, each paired with one of the first candidate. Return the candidates that did not fail."""
    plain, *others = started
    plain.start()
    others = [candidate for candidate in others if succeeds(candidate, candidate.start)]
    for turn in range(arguments.rounds):
        for setting in arguments.settings:
            for candidate in random.sample(others, len(others)):
                if not succeeds(candidate, candidate.pair, plain, setting):
                    others.remove(candidate)
        print(f"round {turn + 1} of {arguments.rounds}, {where}", file=sys.stderr, flush=True)
    return plain, *others


def succeeds(candidate, function, *arguments):
    """Call a function of a candidate. Return whether it succeeded, and print the error if not."""
    try:
        function(*arguments)
    except RuntimeError as error:
        print(f"skipped {candidate.name}: {error}", flush=True)
        return False
    return True


def parser(doc, *, presets=PRESET_NAMES, rounds=4):
    """Return a parser with the options of a bench of presets."""
    made = turns_parser(doc, presets=presets, rounds=rounds)
    made.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    made.add_argument(
        "--workers", type=int, default=2, help="workers of each candidate, each on its own node (%(default)s)"
    )
    made.add_argument(
        "--delay-ms", type=float, default=150.0, help="sleep before each step in the setting idle (%(default)s)"
    )
    made.add_argument("--batch", type=int, default=16, help="samples per step over all workers (%(default)s)")
    made.add_argument("--expert-slots", type=int, help="expert replicas per worker and layer (default: the session's)")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "intermediate": 256, "experts": 8, "top_k": 2, "sequence": 128}
    for name, value in sizes.items():
        made.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help="size of the model (%(default)s)"
        )
    return made


def turns_parser(doc, *, presets, rounds):
    """Return a parser with the options of every bench whose candidates train in turns."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--presets", nargs="*", type=preset_name, metavar="PRESET[+OPTION=VALUE]", default=list(presets))
    made.add_argument(
        "--rounds", type=int, default=rounds, help="turns of each candidate in each setting (%(default)s)"
    )
    made.add_argument("--steps", type=int, default=4, help="measured steps of a turn (%(default)s)")
    made.add_argument("--warm-up", type=int, default=24, help="steps of each preset before its turns (%(default)s)")
    made.add_argument("--pin", action="store_true", help="reserve one processor for the copies")
    made.add_argument("--threads", type=int, default=1, help="threads of each worker (%(default)s)")
    made.add_argument("--memory-dir", default="/dev/shm", help="folder for shared memory (%(default)s)")
    made.add_argument("--json", help="file for the results")
    made.set_defaults(device="cpu")
    return made


def preset_name(text):
    """Return the name of a preset with optional options of the session, or raise if it is not one."""
    name, *options = text.split("+")
    if name not in PRESET_NAMES or not all("=" in each for each in options):
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(PRESET_NAMES)}, optionally with +option=value, got {text!r}"
        )
    return text


def parse():
    made = parser(__doc__)
    made.add_argument("--launches", type=int, default=1, help="number of times to start all workers (%(default)s)")
    made.add_argument("--baselines", nargs="*", choices=BASELINES[1:], default=list(BASELINES[1:]))
    made.add_argument("--no-kill", action="store_true", help="skip the measurement of recovery")
    return made.parse_args()


def show(candidates, arguments):
    """Print a row for each setting and candidate. `candidates` holds each candidate once per launch."""
    about = candidates[0][0].about[0]
    print(
        f"{arguments.workers} workers, {about['parameters'] / 1e6:.1f} M parameters each, "
        f"{about['expert_parameters'] / 1e6:.1f} M of them in experts, {about['state_bytes'] / 1e6:.0f} MB of state; "
        f"idle: {arguments.delay_ms:.0f} ms of sleep before each step"
    )
    columns = {
        "setting": "<8",
        "candidate": f"<{max(11, *(len(launched[0].name) + 1 for launched in candidates))}",
        "step ms": "8.0f",
        "ratio": "7.3f",
        "quartiles": "<13",
        "95 %": "<13",
        "processor": "10.3f",
        "send ms": "8.1f",
        "vote ms": "8.1f",
        "bytes/param": "11.2f",
        "arenas MB": "10.1f",
        "other MB": "9.1f",
        "recovery s": "11.2f",
    }
    over = "the launches" if arguments.launches > 1 else "the rounds"
    table = Table(f"Each compared with the same steps without copies; medians over {over}", columns)
    plain = candidates[0]
    for setting in arguments.settings:
        for launched in candidates:
            each = [figures(one.turns[setting], one.plain_turns[setting]) for one in launched]
            row = each[0] if len(each) == 1 else over_launches(each)
            row["bytes/param"] = row["sent"] * arguments.workers / about["expert_parameters"]
            for key in SIZES:
                added = [
                    one.memory[key] - base.memory[key] * (key == "other MB")
                    for one, base in zip(launched, plain, strict=True)
                ]
                row[key] = statistics.median(added)
            recoveries = [one.recovery["next commit s"] for one in launched if one.recovery]
            row |= {"recovery s": statistics.median(recoveries) if recoveries else None}
            row |= {"recovery": [one.recovery for one in launched], "about": [one.about for one in launched]}
            turns = [one.turns[setting] for one in launched]
            table.add(setting=setting, candidate=launched[0].name, turns=turns, launches=each, **row)
    return table


def over_launches(each):
    """Return medians over the launches, with the quartiles and the interval of the launches' ratios."""
    numbers = [key for key, value in each[0].items() if isinstance(value, float)]
    row = {key: statistics.median(one[key] for one in each) for key in numbers}
    found = sorted(one["ratio"] for one in each)
    row["quartiles"] = "{0:.3f}–{2:.3f}".format(*statistics.quantiles(found, n=4, method="inclusive"))
    row["95 %"] = "{:.3f}–{:.3f}".format(*interval(found))
    return row


def figures(turns, plain):
    """Return medians over the rounds. Ratios are to the paired turn without copies."""
    row = {"ratio": ratios(turns, plain, "seconds")[1], "processor": ratios(turns, plain, "processor")[1]}
    row["quartiles"] = "{0:.3f}–{2:.3f}".format(*ratios(turns, plain, "seconds"))
    row["95 %"] = "{:.3f}–{:.3f}".format(*confidence(turns, plain, "seconds"))
    row["training thread"] = ratios(turns, plain, "training thread")[1]
    row["step ms"] = statistics.median(mean(turn, "seconds") for turn in turns) * 1e3
    row["processor ms"] = statistics.median(mean(turn, "processor") for turn in turns) * 1e3
    row |= {what: statistics.median(mean(turn, what) for turn in turns) for what in ("collectives", "switches")}
    row["sent"] = statistics.fmean(mean(turn, "sent") for turn in turns)
    row["spans ms"] = {
        span: statistics.median(statistics.fmean(answer["spans"][span] for answer in turn) for turn in turns) * 1e3
        for span in SPANS
    }
    return row | {f"{span} ms": row["spans ms"][span] for span in ("send", "vote")}


def mean(turn, what):
    """Return the mean over the workers."""
    return statistics.fmean(answer[what] for answer in turn)


def each_ratio(turns, plain, what):
    """Return, in ascending order, each turn's value over that of its paired turn without copies."""
    return sorted(mean(turn, what) / mean(base, what) for turn, base in zip(turns, plain, strict=True))


def ratios(turns, plain, what):
    """Return the quartiles of the ratios."""
    found = each_ratio(turns, plain, what)
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


def confidence(turns, plain, what):
    """Return a 95 % confidence interval of the median ratio."""
    return interval(each_ratio(turns, plain, what))


def interval(found):
    """Return a 95 % confidence interval of the median of ascending values, by the binomial law; all if they are few."""
    number, rank = len(found), 0
    while 2 * sum(math.comb(number, below) for below in range(rank + 1)) <= 0.05 * 2**number:
        rank += 1
    place = max(rank - 1, 0)
    return found[place], found[-1 - place]


if __name__ == "__main__":
    main()
