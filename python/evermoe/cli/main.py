"""Command line of evermoe: `evermoe demo`, `evermoe plan`, `evermoe run`, `evermoe top` and others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from evermoe.errors import CorruptCopy
from evermoe.options import checked

MAX_PROCESSES = 4096
"""Largest number of processes that a command starts on one machine."""
FLAGS = {
    "demo": "evermoe.demo.flags",
    "checkpoints": "evermoe.cli.checkpoints_flags",
    "export": "evermoe.cli.export",
    "top": "evermoe.cli.top",
    "report": "evermoe.cli.run_report",
    "plan": "evermoe.cli.plan.plan_flags",
    "role": "evermoe.cli.role",
    "simulate": "evermoe.cli.simulate.scenario_flags",
    "measure": "evermoe.cli.measure_flags",
}
"""Modules whose `add_arguments` defines the flags of a command. None of them imports torch, which takes seconds."""
MAINS = FLAGS | {
    "demo": "evermoe.demo.driver",
    "checkpoints": "evermoe.cli.checkpoints",
    "plan": "evermoe.cli.plan.command",
    "simulate": "evermoe.cli.simulate.simulation",
    "measure": "evermoe.cli.measure",
}
"""Modules whose `main` runs a command."""


class Parser(argparse.ArgumentParser):
    """Reports wrong flags in one line; the usage is in `--help`."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only `command` gets the flags of the module in `FLAGS`, to import no more
    than needed."""
    top = Parser(prog="evermoe", description="Train Mixture-of-Experts models on machines that fail.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="train a small MoE language model, kill a worker and watch it survive")
    commands.add_parser(
        "plan",
        help="compare placements of experts by balance and by the losses that they survive",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = commands.add_parser(
        "run",
        help="start the workers of a job on this machine",
        usage="evermoe run [options] SCRIPT [ARGUMENTS]   or   evermoe run [options] -m MODULE [ARGUMENTS]",
    )
    run.add_argument("--workers", type=_processes, default=1, help="processes on this machine (%(default)s)")
    run.add_argument(
        "--replicas",
        type=_processes,
        default=0,
        help="processes on this machine that do not train but keep copies for those that do (%(default)s)",
    )
    run.add_argument(
        "--spare",
        type=_processes,
        default=0,
        help="processes on this machine that stand by, connected and with shared memory reserved, to replace a lost "
        "worker at once (%(default)s)",
    )
    run.add_argument(
        "--members",
        type=_processes,
        help="training processes, over all machines, that a new job waits for (default: --workers)",
    )
    run.add_argument(
        "--lighthouse",
        metavar="ADDRESS[,ADDRESS...]",
        help="http://host:port of the job's Lighthouse, or of several; default: EVERMOE_LIGHTHOUSE, "
        "TORCHFT_LIGHTHOUSE, or a Lighthouse that this command starts",
    )
    run.add_argument(
        "--host-lighthouse",
        action="store_true",
        help="start the Lighthouse that --lighthouse names on this machine, unless it is running",
    )
    run.add_argument("--job", help="name of the job, the same on all machines (default: the program's name)")
    run.add_argument(
        "--restarts", type=_processes, default=0, help="how often a crashed worker is restarted (%(default)s)"
    )
    run.add_argument(
        "--node-rank",
        type=_processes,
        help="number of this machine, from 0; gives its workers their RANK in a job on several machines",
    )
    run.add_argument(
        "--metrics",
        type=_port,
        metavar="PORT",
        help="serve Prometheus metrics, the first worker at this port, the others at the following ones",
    )
    run.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write curves for TensorBoard, each worker to its own subfolder",
    )
    run.add_argument(
        "--on-lost",
        metavar="COMMAND",
        help="shell command that one member runs when another is lost, for example to request a new machine",
    )
    run.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")
    run.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script file")
    run.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    commands.add_parser("top", help="show a running job: members, speed, copies, recoveries")
    commands.add_parser("report", help="write a page about a run, from the event files of its members")
    commands.add_parser("role", help="promote a replica node to train, or demote a worker to keep copies")
    lighthouse = commands.add_parser(
        "lighthouse", help="let members that wait for a majority continue; list or lift quarantines"
    )
    actions = lighthouse.add_subparsers(dest="action", required=True, metavar="ACTION")
    promote = actions.add_parser(
        "promote",
        help="let members at this Lighthouse continue, because the others are gone for good",
        description="Let members of a job that wait at a Lighthouse continue without a majority. Use it only if the "
        "other members are gone: two halves of a job that both continue after a network cut cannot be merged again.",
    )
    promote.add_argument("address", metavar="ADDRESS", help="http://host:port of their Lighthouse")
    quarantine = actions.add_parser(
        "quarantine",
        help="list or lift quarantines: hardware on which a running job admits no newcomers",
        description="List the quarantines of a running job, or lift some. A job admits no newcomers on hardware that a "
        "member has left as faulty: a GPU, or a node for members without one. Lift a quarantine after the hardware was "
        "reset, repaired or replaced.",
    )
    quarantine.add_argument("address", metavar="ADDRESS", help="http://host:port of the job's Lighthouse")
    quarantine.add_argument("--lift", metavar="NAME", default="", help="GPU, node or former member to admit again")
    for each in (promote, quarantine):
        each.add_argument(
            "--job", required=True, help="name of the job; one with a secret needs EVERMOE_SECRET here, too"
        )
        each.add_argument(
            "--limit", type=float, default=60.0, help="seconds to wait for the members (%(default)s)", metavar="SECONDS"
        )
    trace = commands.add_parser("trace", help="merge the traces of several ranks into one, for ui.perfetto.dev")
    trace.add_argument("files", nargs="+", metavar="FILE", help="traces that Profilers wrote, one per rank")
    trace.add_argument("--out", metavar="PATH", default="trace.json", help="where to write the trace (%(default)s)")
    trace.add_argument("--plot", metavar="PATH", help="also draw the last steps, to a PNG or SVG file")
    commands.add_parser("export", help="convert a checkpoint to the format of transformers or of torch's DCP")
    commands.add_parser(
        "simulate",
        help="compare ways to survive on a cluster that fails, in simulated time",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands.add_parser("measure", help="measure what failures cost here, for evermoe simulate")
    commands.add_parser("checkpoints", help="list, show, verify, copy, prune or export checkpoints")
    info = commands.add_parser("info", help="print versions, and whether this build contains the CUDA kernels")
    info.add_argument("--json", action="store_true", help="print JSON")
    if command in FLAGS:
        import_module(FLAGS[command]).add_arguments(commands.choices[command])
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> int:
        options = parser(given[0] if given else None).parse_args(given)
        if options.command in MAINS:
            code: int = import_module(MAINS[options.command]).main(options)
            return code
        actions = {"run": _run, "lighthouse": _lighthouse, "trace": _trace, "info": _info}
        return actions[options.command](options)

    return exit_code(" ".join(["evermoe", *given[:1]]), run)


def exit_code(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; print in one line an error that its user can mend."""
    try:
        return run()
    except ModuleNotFoundError as error:
        extra = {
            "rich": "cli,plot",
            "matplotlib": "cli,plot",
            "prometheus_client": "observe",
            "tensorboard": "observe",
            "transformers": "transformers",
        }
        package = (error.name or "").partition(".")[0]
        if package not in extra:
            raise
        print(f"{command} needs {error.name}: pip install 'evermoe[{extra[package]}]'", file=sys.stderr)
    except (ValueError, CorruptCopy) as error:
        print(f"{command}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{command}: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return 130
    return 2


def _processes(text: str) -> int:
    """Convert a flag's text to a number of processes or of their restarts."""
    try:
        return checked("it", int(text), int, least=0, most=MAX_PROCESSES)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 0 to {MAX_PROCESSES}, got {text!r}") from None


def _port(text: str) -> int:
    try:
        return checked("it", int(text), int, least=1, most=65535)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, got {text!r}") from None


def _run(options: argparse.Namespace) -> int:
    from evermoe.config.environment import lighthouse, node_rank
    from evermoe.launch import LocalJob, run

    if not options.program:
        raise ValueError("expected a SCRIPT, or -m MODULE, after the options; see evermoe run --help")
    if options.workers + options.replicas + options.spare < 1:
        raise ValueError("expected a worker, a replica or a spare, got --workers 0, --replicas 0 and --spare 0")
    if options.members == 0:
        raise ValueError("--members: expected 1 or more, got 0")
    if not (options.workers or options.members):
        raise ValueError(
            "--workers 0: expected --members as well, the number of processes that train on other machines"
        )
    command = [sys.executable, *(["-m"] if options.module else []), *options.program]
    address = options.lighthouse or os.environ.get("EVERMOE_LIGHTHOUSE") or lighthouse()
    if address is None and options.members is None and node_rank() is not None:
        raise ValueError(
            "this is one of several processes of srun or of an Indexed Job, but no Lighthouse is named: each would "
            "train a separate job. Start a Lighthouse that outlives them and pass its address by --lighthouse or "
            f"TORCHFT_LIGHTHOUSE; or, for a job on each machine, give --members {options.workers}"
        )
    members = options.members or options.workers
    name = Path(options.program[0]).stem if options.job is None else options.job
    variables = _listeners(options) | ({"EVERMOE_ON_LOST": options.on_lost} if options.on_lost else {})
    job = LocalJob(command, name, members, lighthouse=address, memory_dir=options.memory_dir, environment=variables)
    if options.host_lighthouse:
        if address is None:
            raise ValueError("--host-lighthouse: expected --lighthouse with an address of this machine as well")
        job.host_lighthouse()
    number = node_rank() if options.node_rank is None else options.node_rank
    return run(job, options.workers, options.restarts, options.replicas, options.spare, number)


def _listeners(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that make workers start the requested listeners.

    Raises:
        ModuleNotFoundError: the package of a listener is missing; without this check each worker would fail later.
    """
    variables = {}
    if options.metrics:
        variables["EVERMOE_METRICS"] = str(options.metrics)
    if options.tensorboard:
        variables["EVERMOE_TENSORBOARD"] = str(Path(options.tensorboard).absolute())
    needed = {"prometheus_client": options.metrics, "tensorboard": options.tensorboard}
    for package, is_needed in needed.items():
        if is_needed and find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return variables


def _lighthouse(options: argparse.Namespace) -> int:
    from evermoe.comm.lift import find_quarantines
    from evermoe.comm.promotion import promote

    if options.action == "quarantine":
        for each in find_quarantines(options.address, options.job, options.limit, options.lift):
            print(f"{'lifted: ' if each.is_lifted else ''}{each}")
        return 0
    members = promote(options.address, options.job, options.limit)
    print(f"job {options.job} continues with {', '.join(members)}")
    return 0


def _trace(options: argparse.Namespace) -> int:
    from evermoe.profile.files import merge_files

    ranks = merge_files(options.files, options.out)
    print(f"{options.out}: ranks {', '.join(map(str, ranks))}; open it in https://ui.perfetto.dev")
    if options.plot:
        from evermoe.profile.plot import plot_trace

        plot_trace(json.loads(Path(options.out).read_text(encoding="utf-8")), Path(options.plot))
    return 0


def _info(options: argparse.Namespace) -> int:
    import torch

    import evermoe
    from evermoe.ops.cache import has_cuda_kernels

    has_kernels = has_cuda_kernels()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.json:
        found = {"evermoe": evermoe.__version__, "cuda_kernels": has_kernels}
        print(json.dumps(found | {"torch": torch.__version__, "cuda_devices": devices}))
        return 0
    kernels = "with CUDA kernels" if has_kernels else "without CUDA kernels"
    print(f"evermoe {evermoe.__version__}, {kernels}; torch {torch.__version__}, {devices} CUDA devices")
    return 0
