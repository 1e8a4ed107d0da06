"""One worker of `bench_presets.py`. It trains in turns that its driver starts, and reports each turn's measurements.

Each line on standard input starts a turn (JSON: `steps`, `delay_ms`, and `dies` for a worker that kills itself in it).
The worker ends at the end of the input. The first step of each turn is not measured: it refills the caches after the
other candidates' turns, and the pipeline of copies, which end a step later.
"""

import argparse
import ast
import contextlib
import gc
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchft.process_group import ProcessGroupWrapper

import evermoe
from evermoe.checkpoint import checkpoint_folder, unit_files
from evermoe.comm.begun import Begun
from evermoe.demo.corpus import Corpus
from evermoe.demo.model import ByteGPT
from evermoe.presets import BY_NAME

sys.path.append(str(Path(__file__).parents[1]))
from benches.compare.program import MAX_GRAD_NORM
from benches.training_loops import LOOPS, adamw

MODEL = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence")
SPANS = {  # spans of the training thread: the two events of the session that bound each
    "compute": ("begin", "reduce"),
    "reduce": ("reduce", "send"),
    "send": ("send", "vote"),
    "vote": ("vote", "update"),
    "update": ("update", "copy"),
    "after": ("copy", "end"),
}
STAGING = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
)
PROCESSORS = os.sched_getaffinity(0)
BASELINES = ("none", "unchecked", "blocking", "dcp", "dcp-staged")


class Blocking:
    """Copies all of this member's state into a host tensor after each step, and exchanges it with its neighbours."""

    def __init__(self, session, folder):
        self.session = session
        self._host = self._from = None
        self.nbytes = 0

    def after_step(self):
        state, group = self.session._state, self.session.group
        if self._host is None:
            self._host = torch.empty(
                sum(state.catalog.by_name[name].nbytes for name in state.held()), dtype=torch.uint8
            )
            sizes = group.all_gather(torch.tensor([len(self._host)])).flatten().tolist()
            self._from = torch.empty(sizes[group.rank - 1], dtype=torch.uint8)
        start = 0
        for name in state.held():
            end = start + state.catalog.by_name[name].nbytes
            state.read(name, self._host[start:end])
            start = end
        following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.exchange([(self._host, following)], [(self._from, before)])
        self.nbytes += len(self._host)

    def settle(self):
        pass


class Dcp:
    """Calls `torch.distributed.checkpoint.async_save` after each step, once the previous checkpoint is complete.

    `is_staged`: `DefaultStager` copies in a thread of its own, and the optimizer waits until that copy is complete.
    """

    def __init__(self, session, folder, is_staged):
        self.session, self.folder, self._numbers = session, folder, itertools.cycle((0, 1))
        self.is_staged, self._stager, self._staged, self._saved = is_staged, None, None, None
        self.nbytes = 0
        dist.init_process_group(
            "gloo",
            f"file://{folder}/rendezvous",
            rank=int(os.environ["LOCAL_RANK"]),
            world_size=session._config.membership.members,
        )
        if is_staged:
            session.optimizer.register_step_pre_hook(lambda *_: self._staged and self._staged.result())

    def after_step(self):
        self.settle()
        if self.is_staged:  # a new one each time: in torch 2.11 a stager can stage only once
            self._stager = DefaultStager(STAGING)
        writer = dcp.FileSystemWriter(f"{self.folder}/{next(self._numbers)}", sync_files=False)
        saving = dcp.async_save(
            self._state(),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        self._staged = getattr(saving, "staging_completion", None)
        self._saved = getattr(saving, "upload_completion", saving)

    def settle(self):
        if self._saved is not None:
            self._saved.result()
        if self._stager is not None:
            self._stager.close()

    def _state(self):
        """Return each tensor by its name in the complete model. DCP writes tensors that all members hold only once."""
        state, found = self.session._state, {}
        for path, layer in state.layers.items():
            kept = self.session.optimizer.state[layer.weights]
            for row, expert in enumerate(layer.ids):
                for name, stack in {"weights": layer.weights, **kept}.items():
                    value = stack.detach()
                    found[f"{path}.{expert}.{name}"] = value[row] if value.dim() > 1 else value
        for name, parameter in self.session.model.named_parameters():
            if any(parameter is layer.weights for layer in state.layers.values()):
                continue
            found[name] = parameter.detach()
            found |= {f"{name}/{key}": value for key, value in self.session.optimizer.state[parameter].items()}
        return found


class Nothing:
    nbytes = 0

    def after_step(self):
        pass

    def settle(self):
        pass


def baseline(name, session, folder):
    if name == "blocking":
        return Blocking(session, folder)
    if name.startswith("dcp"):
        return Dcp(session, folder, name == "dcp-staged")
    return Nothing()


class Clock:
    """Listener of the session: measures the seconds between events and keeps the last recovery."""

    def __init__(self):
        self.seconds = dict.fromkeys(SPANS, 0.0)
        self.recovered = None
        self._at = {}

    def __call__(self, event):
        self.mark(event.name)
        if event.name == "recovered":
            self.recovered = event.fields()

    def mark(self, name):
        now = self._at[name] = time.perf_counter()
        for span, (start, end) in SPANS.items():
            if end == name and start in self._at:
                self.seconds[span] += now - self._at[start]


def thread_times():
    """Return by thread name the seconds that the thread ran on a processor, and those that it waited for one."""
    found = {}
    own = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = own.get(int(task.name)) or (task / "comm").read_text().strip()
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
        except OSError:  # the thread has ended
            continue
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + ran / 1e9, before[1] + waited / 1e9)
    return found


BEGUN = []
"""Grows with each collective of evermoe's groups, whose own counters begin again with a step."""


def count_collectives():
    """Count the collectives of evermoe's groups from now on."""
    add = Begun.add

    def count(begun, name, tensor):
        BEGUN.append(None)
        add(begun, name, tensor)

    Begun.add = count


def collectives():
    """Return the number of collectives begun so far by the groups of torch, torchft and evermoe in this process."""
    wrapped = [each._pg for each in gc.get_objects() if is_wrapper(each)]
    groups = {id(each): each for each in (*dist.distributed_c10d._world.pg_map, *wrapped)}
    return len(BEGUN) + sum(group._get_sequence_number_for_group() for group in groups.values())


def is_wrapper(value):
    """Return whether this is a connected process group of torchft's."""
    return isinstance(value, ProcessGroupWrapper) and value._pg is not None


def pin_threads():
    """Pin evermoe's own threads to the last processor, and all other threads of this process to the others."""
    *training, own = sorted(PROCESSORS)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            os.sched_setaffinity(int(task.name), [own] if name.startswith("evermoe") else training)


def resident_bytes():
    """Return the anonymous memory of this process, which excludes the arenas, as they are shared."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def limit_writes(rate):
    """Limit the writes of checkpoints, and of the saves of `pec`, to `rate` bytes per second."""

    def limited(write, nbytes):
        def write_slowly(path, what):
            start = time.monotonic()
            written = write(path, what)
            time.sleep(max(0.0, start + sum(map(nbytes, what.values())) / rate - time.monotonic()))
            return written

        return write_slowly

    unit_files.write_units = limited(unit_files.write_units, lambda unit: len(unit[1]))
    checkpoint_folder.write_tensors = limited(checkpoint_folder.write_tensors, lambda tensor: tensor.nbytes)


class Worker:
    """Runs the training loop, and reports to the driver between turns."""

    def __init__(self, options):
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        self.options, self.clock = options, Clock()
        model = ByteGPT(**{name: getattr(options, name) for name in MODEL})
        self.corpus = Corpus(None, options.sequence)
        sampler = evermoe.ElasticSampler(len(self.corpus), options.batch)
        self.is_session = options.name not in LOOPS
        if not self.is_session:
            self.session = LOOPS[options.name](model, sampler, options, self.clock.mark)
            self.loss, self.baseline = self.session.loss, Nothing()
            return
        given = {name: ast.literal_eval(value) for name, value in (each.split("=", 1) for each in options.option)}
        checkpoints = None
        if options.checkpoints:
            checkpoints = evermoe.Checkpoints(options.checkpoints, interval=1)
        elif options.name == "pec":
            checkpoints = f"{options.folder}/checkpoints"
        if options.disk_rate:
            limit_writes(options.disk_rate)
        self.session = evermoe.Session(
            model,
            adamw(model.parameters()),
            sampler,
            membership=evermoe.Membership(
                join_interval=1 << 40, on_corruption="ignore" if options.name == "unchecked" else "repair"
            ),
            placement=evermoe.Placement(expert_slots=options.expert_slots, rebalance_interval=0),
            on_event=self.clock,
            max_grad_norm=MAX_GRAD_NORM,
            preset="auto" if options.name in BASELINES else BY_NAME[options.name](**given),
            replication=0 if options.name in BASELINES else 2,
            checkpoints=checkpoints,
        )
        self.loss, self.baseline = model.loss, baseline(options.name, self.session, options.folder)

    def run(self):
        turn = None
        for step in self.session.steps(1 << 30):
            if turn is None or turn.is_over(step.number):
                report(self.about() if turn is None else turn.result())
                line = sys.stdin.readline()
                if not line:
                    return
                turn = Turn(self, step.number, **json.loads(line))
            turn.take(step)

    def about(self):
        """Return the sizes of the model and its state."""
        if not self.is_session:
            return {}
        state = self.session._state
        experts = [unit for unit in state.catalog.units if unit.layer is not None]
        return {
            "parameters": sum(p.numel() for p in self.session.model.parameters() if p.requires_grad),
            "expert_parameters": sum(unit.specs[0].nbytes // 4 for unit in experts),
            "state_bytes": sum(unit.nbytes for unit in state.catalog.units),
            "summary": self.session._protection.plan.summary,
        }

    def settle(self):
        """Wait until the couriers have sent everything of the previous steps."""
        for courier in self._couriers():
            courier.submit(lambda: None).wait()
        self.baseline.settle()

    def sent_since(self, start):
        """Return the bytes of messages that began after `start`, by `time.monotonic_ns`."""
        return sum(sent.nbytes for courier in self._couriers() for sent in courier.sent if sent.start >= start)

    def _couriers(self):
        return self.session._protection.snapshots.window_planner.speeds.couriers if self.is_session else ()


class Turn:
    """Consecutive steps, all of which are measured but the first."""

    def __init__(self, worker, first, *, steps, delay_ms, dies=False):
        self.worker, self.first, self.steps, self.delay, self.dies = worker, first, steps, delay_ms / 1e3, dies
        self._start_ns, self._sent_before = time.monotonic_ns(), worker.baseline.nbytes
        self._committed_at = []
        worker.clock.recovered = None
        if worker.options.pin:
            pin_threads()

    def is_over(self, number):
        return number == self.first + self.steps + 1

    def take(self, step):
        worker = self.worker
        time.sleep(self.delay)  # stands for a wait that leaves the processor idle, as for a loader or an accelerator
        with step:
            loss = worker.loss(worker.corpus[step.indices])
            if self.dies and step.number == self.first + 1:
                report({"killed": time.monotonic()})
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
        if not step.committed:
            return
        worker.baseline.after_step()
        worker.clock.mark("end")
        self._committed_at.append(time.monotonic())
        if step.number == self.first:
            self._before, self._threads_before = self._mark(), thread_times()
        elif step.number == self.first + self.steps:
            self._after, self._threads = self._mark(), thread_times()

    def _mark(self):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": time.perf_counter(),
            "processor": time.process_time(),
            "training thread": time.thread_time(),
            "switches": usage.ru_nvcsw + usage.ru_nivcsw,
            "collectives": collectives(),
        }

    def result(self):
        """Return seconds (wall-clock, processor, spans) and counts per step; memory and recovery of the turn."""
        worker = self.worker
        worker.settle()
        sent = worker.baseline.nbytes - self._sent_before + worker.sent_since(self._start_ns)
        per_step = {name: (self._after[name] - value) / self.steps for name, value in self._before.items()}
        spans, worker.clock.seconds = worker.clock.seconds, dict.fromkeys(SPANS, 0.0)
        nothing = (0.0, 0.0)
        threads = {
            name: [
                (now - was) / self.steps
                for now, was in zip(times, self._threads_before.get(name, nothing), strict=True)
            ]
            for name, times in self._threads.items()
        }
        return {
            **per_step,
            "threads": threads,
            "spans": {name: value / (self.steps + 1) for name, value in spans.items()},
            "sent": sent / (self.steps + 1),
            "rss": resident_bytes(),
            "recovered": worker.clock.recovered,
            "committed_at": self._committed_at,
        }


def report(message):
    print(json.dumps(message), flush=True)


def main():
    count_collectives()
    made = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    made.add_argument("name", help="a preset, or one of " + ", ".join((*BASELINES, *LOOPS)))
    made.add_argument("--folder", required=True, help="folder in memory that all workers of this candidate share")
    made.add_argument("--checkpoints", help="folder for a checkpoint after each step")
    made.add_argument("--option", action="append", default=[], help="an option of the preset: NAME=VALUE; repeatable")
    made.add_argument("--pin", action="store_true", help="reserve one processor for the copies")
    made.add_argument("--disk-rate", type=float, help="maximum bytes per second of writes to disk")
    for name in (*MODEL, "batch", "expert_slots", "threads"):
        made.add_argument(f"--{name.replace('_', '-')}", type=int, required=name != "expert_slots")
    Worker(made.parse_args()).run()


if __name__ == "__main__":
    main()
