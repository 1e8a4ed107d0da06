"""What keeping the state safe costs, preset by preset: step time, processor time, bytes, memory, recovery.

    python benches/bench_presets.py [--presets auto gemini …] [--rounds 4] [--launches 1] [--json PATH]

All candidates live at once, each with workers of its own, and train in turns of a few steps while the others wait for
their line. Each turn has one of `none` right before or after it, and each ratio is the median over the rounds of its
time over that turn's: a slow moment of the machine hits both. Processes have a bias of their own, which no number of
rounds shows: with `--launches` all of them are started anew so often, and what is shown is over the launches' medians.

A preset can have options: `auto+snapshot_interval=100` is `auto` with fewer snapshots in own memory, which shows
what doing less would cost. Beside the presets there are (all with replication=0):

    none        no copies
    again       the same once more: how far its ratio is from 1 is what chance does here
    blocking    after each step every member copies its whole state to a host tensor and exchanges that with its
                neighbours (`Group.exchange`) before it goes on
    dcp         `torch.distributed.checkpoint.async_save` of everything after each step to a folder in memory, after the
                one before is whole; its default staging copies on the training thread
    dcp-staged  the same with `DefaultStager` in a thread; the next update waits until the copy is whole

Before its first turn a preset takes `--warm-up` steps, in whose first twenty it finds when the network is idle: it does
so after each change of the members and each thousand steps, and a few of these steps take tens of milliseconds more.

Settings: `busy` has the workers' threads saturate the machine. In `idle` each worker waits `--delay-ms` before each
step without its processor or network, as one does whose step runs on an accelerator, or whose data come late. `--pin`
leaves a processor to the copies: all training runs on the others, of all candidates alike.
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


class Candidate:
    """The workers of one way to keep the state safe; all but one candidate's wait at any time."""

    def __init__(self, name, arguments, more=()):
        self.name, self.arguments = name, arguments
        self.turns = {setting: [] for setting in SETTINGS}
        self.beside = {setting: [] for setting in SETTINGS}
        """Of the candidate without copies, right before or after each turn."""
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
            "none" if preset == "again" else preset,
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
        """Waits until all workers have made their copies of the first state; a preset's find their idle windows."""
        self.about = self.answers()
        if self.name.split("+")[0] in PRESET_NAMES and self.arguments.warm_up:
            setting = self.arguments.settings[0]
            self._tell(range(self.arguments.workers), steps=self.arguments.warm_up, delay_ms=self._delay_ms(setting))
            self.answers()

    def answers(self):
        """A line of each worker."""
        return [self._answer(worker) for worker in self._job.workers]

    def _answer(self, worker):
        line = worker.process.stdout.readline()
        if not line:
            raise RuntimeError(self._last_words(worker.index))
        return json.loads(line)

    def _last_words(self, index):
        lines = (self.folder / f"log-{index}").read_text().splitlines()
        return lines[-1] if lines else "a worker ended without a word"

    def turn(self, setting):
        """Some steps; per worker, what they took."""
        self._tell(range(self.arguments.workers), steps=self.arguments.steps, delay_ms=self._delay_ms(setting))
        return self.answers()

    def _delay_ms(self, setting):
        return self.arguments.delay_ms if setting == "idle" else 0.0

    def pair(self, plain, setting):
        """A turn, and one of `plain` beside it, in either order."""
        turns = {each: each.turn(setting) for each in random.sample([self, plain], 2)}
        self.turns[setting].append(turns[self])
        self.beside[setting].append(turns[plain])

    def _tell(self, workers, **turn):
        for index in workers:
            self._job.workers[index].process.stdin.write(json.dumps(turn) + "\n")
            self._job.workers[index].process.stdin.flush()

    def kill(self):
        """The last worker dies by SIGKILL in the middle of a step; the others recover."""
        *others, dying = range(self.arguments.workers)
        self._tell(others, steps=2, delay_ms=0.0)
        self._tell([dying], steps=2, delay_ms=0.0, dies=True)
        killed = self._answer(self._job.workers[dying])["killed"]
        answers = [self._answer(self._job.workers[index]) for index in others]
        first = max(min(at for at in answer["committed_at"] if at > killed) for answer in answers)
        self.recovery = {
            "next commit s": first - killed,
            "steps undone": max(answer["recovered"]["steps_lost"] for answer in answers),
            "recovered": [answer["recovered"] for answer in answers],
        }

    def sizes(self):
        """Memory of all workers now: named and shared, and their own."""
        arenas = sum(path.stat().st_blocks * 512 for path in self._job.memory.rglob("*.arena"))
        own = statistics.median(
            sum(answer["rss"] for answer in turn) for turns in self.turns.values() for turn in turns[-2:]
        )
        return dict(zip(SIZES, (arenas / 1e6, own / 1e6), strict=True))

    def close(self):
        """Ends the workers and removes what they leave."""
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
    """The candidates by name, after all turns and kills, with the memory that they took; all are over."""
    names = ("none", "again", *arguments.baselines, *arguments.presets)
    started = []
    try:
        for name in names:
            started.append(Candidate(name, arguments))
        alive = [candidate for candidate in started if works(candidate, candidate.start)]
        plain, *others = alive
        for turn in range(arguments.rounds):
            for setting in arguments.settings:
                for candidate in random.sample(others, len(others)):
                    if not works(candidate, candidate.pair, plain, setting):
                        others.remove(candidate)
            of = f"round {turn + 1} of {arguments.rounds}, launch {number + 1} of {arguments.launches}"
            print(of, file=sys.stderr, flush=True)
        for candidate in others:
            plain.turns = {setting: plain.turns[setting] + candidate.beside[setting] for setting in SETTINGS}
        plain.beside = plain.turns
        for candidate in (plain, *others):
            candidate.memory = candidate.sizes()
        for candidate in others:
            if candidate.name in arguments.presets and not arguments.no_kill:
                works(candidate, candidate.kill)
    finally:
        for candidate in started:
            candidate.close()
    return {candidate.name: candidate for candidate in (plain, *others)}


def works(candidate, function, *of):
    """Whether it could be done; says why not. Nothing can be compared with `none` where that fails."""
    try:
        function(*of)
    except RuntimeError as error:
        if candidate.name == "none":
            raise
        print(f"skipped {candidate.name}: {error}", flush=True)
        return False
    return True


def parser(doc, *, presets=PRESET_NAMES, rounds=4):
    """A parser with what a bench of presets needs."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--presets", nargs="+", type=preset_name, metavar="PRESET[+OPTION=VALUE]", default=list(presets))
    made.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    made.add_argument("--workers", type=int, default=2, help="of each candidate, each its own node (%(default)s)")
    made.add_argument("--rounds", type=int, default=rounds, help="turns of each candidate and setting (%(default)s)")
    made.add_argument("--steps", type=int, default=4, help="of a turn, that count (%(default)s)")
    made.add_argument("--warm-up", type=int, default=24, help="steps of each preset before its turns (%(default)s)")
    made.add_argument("--delay-ms", type=float, default=150.0, help="of the setting idle (%(default)s)")
    made.add_argument("--pin", action="store_true", help="training leaves one processor to the copies")
    made.add_argument("--threads", type=int, default=1, help="of a worker (%(default)s)")
    made.add_argument("--batch", type=int, default=16, help="samples of a step over all workers (%(default)s)")
    made.add_argument("--expert-slots", type=int, help="expert replicas per worker and layer (the session's default)")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "intermediate": 256, "experts": 8, "top_k": 2, "sequence": 128}
    for name, value in sizes.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="of the model (%(default)s)")
    made.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")
    made.add_argument("--json", help="where to write the figures")
    made.set_defaults(device="cpu")
    return made


def preset_name(text):
    """A preset, possibly with options of the session."""
    name, *options = text.split("+")
    if name not in PRESET_NAMES or not all("=" in each for each in options):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(PRESET_NAMES)}, then +option=value, got {text!r}")
    return text


def parse():
    made = parser(__doc__)
    made.add_argument("--launches", type=int, default=1, help="times that all workers are started (%(default)s)")
    made.add_argument("--baselines", nargs="*", choices=BASELINES[1:], default=list(BASELINES[1:]))
    made.add_argument("--no-kill", action="store_true", help="measure no recovery")
    return made.parse_args()


def show(candidates, arguments):
    """One row for each setting and candidate, which is there once a launch."""
    about = candidates[0][0].about[0]
    print(
        f"{arguments.workers} workers, {about['parameters'] / 1e6:.1f} M parameters on each, of all experts "
        f"{about['expert_parameters'] / 1e6:.1f} M, {about['state_bytes'] / 1e6:.0f} MB of state; "
        f"idle: {arguments.delay_ms:.0f} ms before each step"
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
        "repair s": "9.2f",
    }
    over = "launches' medians" if arguments.launches > 1 else "rounds"
    table = Table(f"Each beside the same steps without copies; medians over the {over}", columns)
    plain = candidates[0]
    for setting in arguments.settings:
        for launched in candidates:
            each = [figures(one.turns[setting], one.beside[setting]) for one in launched]
            row = each[0] if len(each) == 1 else over_launches(each)
            row["bytes/param"] = row["sent"] * arguments.workers / about["expert_parameters"]
            for key in SIZES:
                here = [
                    one.memory[key] - beside.memory[key] * (key == "other MB")
                    for one, beside in zip(launched, plain, strict=True)
                ]
                row[key] = statistics.median(here)
            repairs = [one.recovery["next commit s"] for one in launched if one.recovery]
            row |= {"repair s": statistics.median(repairs) if repairs else None}
            row |= {"recovery": [one.recovery for one in launched], "about": [one.about for one in launched]}
            turns = [one.turns[setting] for one in launched]
            table.add(setting=setting, candidate=launched[0].name, turns=turns, launches=each, **row)
    return table


def over_launches(each):
    """Medians of the launches' figures; quartiles and interval are of the launches' ratios."""
    numbers = [key for key, value in each[0].items() if isinstance(value, float)]
    row = {key: statistics.median(one[key] for one in each) for key in numbers}
    found = sorted(one["ratio"] for one in each)
    row["quartiles"] = "{0:.3f}–{2:.3f}".format(*statistics.quantiles(found, n=4, method="inclusive"))
    row["95 %"] = "{:.3f}–{:.3f}".format(*interval(found))
    return row


def figures(turns, plain):
    """Medians over the rounds; ratios are to the turn beside."""
    row = {"ratio": ratios(turns, plain, "seconds")[1], "processor": ratios(turns, plain, "processor")[1]}
    row["quartiles"] = "{0:.3f}–{2:.3f}".format(*ratios(turns, plain, "seconds"))
    row["95 %"] = "{:.3f}–{:.3f}".format(*confidence(turns, plain, "seconds"))
    row["training thread"] = ratios(turns, plain, "training thread")[1]
    row["step ms"] = statistics.median(mean(turn, "seconds") for turn in turns) * 1e3
    row["sent"] = statistics.fmean(mean(turn, "sent") for turn in turns)
    row["spans ms"] = {
        span: statistics.median(statistics.fmean(answer["spans"][span] for answer in turn) for turn in turns) * 1e3
        for span in SPANS
    }
    return row | {f"{span} ms": row["spans ms"][span] for span in ("send", "vote")}


def mean(turn, what):
    """Over the workers."""
    return statistics.fmean(answer[what] for answer in turn)


def each_ratio(turns, plain, what):
    """A turn's figure over that of the plain turn beside it, ascending."""
    return sorted(mean(turn, what) / mean(beside, what) for turn, beside in zip(turns, plain, strict=True))


def ratios(turns, plain, what):
    """Quartiles."""
    found = each_ratio(turns, plain, what)
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


def confidence(turns, plain, what):
    """Between which ratios the true median is with 95 %."""
    return interval(each_ratio(turns, plain, what))


def interval(found):
    """Between which ascending values their true median is with 95 %, by the binomial law; the outermost if few."""
    number, rank = len(found), 0
    while 2 * sum(math.comb(number, below) for below in range(rank + 1)) <= 0.05 * 2**number:
        rank += 1
    place = max(rank - 1, 0)
    return found[place], found[-1 - place]


if __name__ == "__main__":
    main()
