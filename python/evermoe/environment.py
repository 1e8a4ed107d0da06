"""What launchers tell a process by environment variables: read from torchrun, srun, Kubernetes; torchrun's, written.

`evermoe.config.variables` reads them after options and `EVERMOE_*` variables; `evermoe run` writes torchrun's.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from evermoe.options import NAME, check_name, checked

JOBS = {"JOB_ID": "", "SLURM_JOB_ID": "slurm-", "TORCHELASTIC_RUN_ID": "torchrun-"}
"""Variables that name the job, the first that is set counts; and what the job's name has before it."""
UNNAMED = "none"
"""TORCHELASTIC_RUN_ID of a torchrun without --rdzv-id: the same for all such jobs."""
MASTER_PORT = "29500"
"""torchrun's default."""


def lighthouse() -> str | None:
    """Address of the Lighthouse, as users of torchft give it (TORCHFT_LIGHTHOUSE); None without."""
    return os.environ.get("TORCHFT_LIGHTHOUSE") or None


def job() -> str | None:
    """Name of the job by the first variable of `JOBS` that is set; None without.

    Raises:
        ValueError: it cannot be a job's name, as of `check_name`.
    """
    for variable, prefix in JOBS.items():
        name = os.environ.get(variable, "")
        if name and (variable, name) != ("TORCHELASTIC_RUN_ID", UNNAMED):
            check_name(f"{variable}, in place of which EVERMOE_JOB may name the job,", name)
            return prefix + name
    return None


def domain() -> str | None:
    """Switches above this node, from the largest to the smallest, as SLURM's topology plugin tells srun's tasks.

    Example: SLURM_TOPOLOGY_ADDR `core.leaf2.node7` with SLURM_TOPOLOGY_ADDR_PATTERN `switch.switch.node` is
    `core/leaf2`.

    Returns:
        None where there is no such plugin.
    """
    names = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    switches = [name for name, kind in zip(names, kinds, strict=False) if kind != "node" and NAME.fullmatch(name)]
    return "/".join(switches) or None


def processes() -> int | None:
    """Number of processes that were started together: WORLD_SIZE, else srun's tasks; None where no variable says it.

    Raises:
        ValueError: a variable is no number, or less than 1.
    """
    return next(iter(_sizes().values()), None)


def others() -> str | None:
    """By which variable this process is one of several, in words; None if no variable says so.

    Raises:
        ValueError: as of `processes`.
    """
    for variable, size in _sizes().items():
        if size > 1:
            return f"{variable} is {size}, as {'torchrun' if variable == 'WORLD_SIZE' else 'srun'} sets it"
    index = os.environ.get("JOB_COMPLETION_INDEX")
    return f"JOB_COMPLETION_INDEX is {index}, as Kubernetes sets it in an Indexed Job" if index else None


def _sizes() -> dict[str, int]:
    # In a batch script SLURM_NTASKS counts what srun would start; the step's own number is right where there is a step.
    tasks = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return {name: _number(name, least=1) for name in ("WORLD_SIZE", tasks) if os.environ.get(name)}


def _number(variable: str, *, least: int) -> int:
    text = os.environ[variable]
    return int(checked(variable, int(text) if text.isdecimal() else text, int, least=least))


def local_rank() -> int:
    """Number of this process among those of its machine, from 0: LOCAL_RANK, else srun's SLURM_LOCALID, else 0.

    With it one script chooses its GPU under every launcher: `torch.cuda.set_device(evermoe.local_rank())`.

    Raises:
        ValueError: the variable is no number.
    """
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(variable):
            return _number(variable, least=0)
    return 0


def node_rank() -> int | None:
    """Number of this machine where a launcher has started one process on each; None where none says it.

    Raises:
        ValueError: the variable is no number.
    """
    several = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    for variable in ("JOB_COMPLETION_INDEX", *(["SLURM_PROCID"] if several else [])):
        if os.environ.get(variable):
            return _number(variable, least=0)
    return None


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class TorchrunVariables:
    """The variables that torchrun sets, for the processes of one machine. They hold for the start: members change.

    Args:
        job: its name.
        members: processes that train which a new job waits for, over all machines.
        roles: `train`, `replica` or `spare` for each process of this machine.
        node_rank: number of this machine; None if that is not known, and only what is of this machine is set.
        nodes: number of machines; None if as many as `members` need, with processes as here.
        master: host and port where scripts may form a process group of their own.
        restarts: times that a process is started again.
    """

    job: str
    members: int
    roles: Sequence[str]
    node_rank: int | None
    nodes: int | None
    master: tuple[str, str]
    restarts: int

    def of(self, index: int, restart: int) -> dict[str, str]:
        """The variables of process `index` of this machine, in its start number `restart`, from 0."""
        local, role = len(self.roles), self.roles[index]
        alike, trainers = self.roles.count(role), self.roles.count("train")
        variables: dict[str, int | str] = {"LOCAL_RANK": index, "LOCAL_WORLD_SIZE": local}
        if self.node_rank is not None and trainers:
            nodes = self.nodes or max(self.node_rank + 1, math.ceil(self.members / trainers))
            later = max(0, self.members - trainers) if self.nodes else 0  # they are added by hand
            variables |= {
                "RANK": self.node_rank * local + index,
                "WORLD_SIZE": nodes * local + later,
                "GROUP_RANK": self.node_rank,
                "GROUP_WORLD_SIZE": nodes,
                "ROLE_NAME": role,
                "ROLE_RANK": self.node_rank * alike + self.roles[:index].count(role),
                "ROLE_WORLD_SIZE": nodes * alike + (later if role == "train" else 0),
                "MASTER_ADDR": self.master[0],
                "MASTER_PORT": self.master[1],
                "TORCHELASTIC_RUN_ID": self.job,
                "TORCHELASTIC_RESTART_COUNT": restart,
                "TORCHELASTIC_MAX_RESTARTS": self.restarts,
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
        return {name: str(value) for name, value in variables.items()}
