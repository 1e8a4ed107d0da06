"""Environment variables of launchers: reads those of torchrun, srun and Kubernetes; writes those of torchrun.

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
"""Variables that name the job, in order of precedence, with the prefix of the job's name."""
UNNAMED = "none"
"""TORCHELASTIC_RUN_ID that torchrun sets without --rdzv-id: the same for all such jobs."""
MASTER_PORT = "29500"
"""torchrun's default."""


def lighthouse() -> str | None:
    """Return the address of the Lighthouse from torchft's variable, TORCHFT_LIGHTHOUSE; None if it is not set."""
    return os.environ.get("TORCHFT_LIGHTHOUSE") or None


def job() -> str | None:
    """Return the job's name from the first variable of `JOBS` that is set; None if none is.

    Raises:
        ValueError: the value is not a valid job name, see `check_name`.
    """
    for variable, prefix in JOBS.items():
        name = os.environ.get(variable, "")
        if name and (variable, name) != ("TORCHELASTIC_RUN_ID", UNNAMED):
            check_name(f"{variable}, in place of which EVERMOE_JOB may name the job,", name)
            return prefix + name
    return None


def domain() -> str | None:
    """Return the switches above this node, from the largest to the smallest, from SLURM's topology plugin.

    Example: SLURM_TOPOLOGY_ADDR `core.leaf2.node7` with SLURM_TOPOLOGY_ADDR_PATTERN `switch.switch.node` is
    `core/leaf2`.

    Returns:
        None without this plugin.
    """
    names = os.environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    switches = [name for name, kind in zip(names, kinds, strict=False) if kind != "node" and NAME.fullmatch(name)]
    return "/".join(switches) or None


def processes() -> int | None:
    """Return the number of processes that were started together: WORLD_SIZE, else srun's tasks; None if neither is set.

    Raises:
        ValueError: a variable is not a number, or less than 1.
    """
    return next(iter(_sizes().values()), None)


def others() -> str | None:
    """Return a phrase with the variable by which this process is one of several; None if no variable says so.

    Raises:
        ValueError: as for `processes`.
    """
    for variable, size in _sizes().items():
        if size > 1:
            return f"{variable} is {size}, as {'torchrun' if variable == 'WORLD_SIZE' else 'srun'} sets it"
    index = os.environ.get("JOB_COMPLETION_INDEX")
    return f"JOB_COMPLETION_INDEX is {index}, as Kubernetes sets it in an Indexed Job" if index else None


def _sizes() -> dict[str, int]:
    # In a batch script, SLURM_NTASKS counts the tasks that srun would start; within a step, the step's number is right.
    tasks = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return {name: _number(name, least=1) for name in ("WORLD_SIZE", tasks) if os.environ.get(name)}


def _number(variable: str, *, least: int) -> int:
    text = os.environ[variable]
    return int(checked(variable, int(text) if text.isdecimal() else text, int, least=least))


def local_rank() -> int:
    """Return this process's rank on its machine: LOCAL_RANK, else srun's SLURM_LOCALID, else 0.

    With it one script chooses its GPU under every launcher: `torch.cuda.set_device(evermoe.local_rank())`.

    Raises:
        ValueError: the variable is not a number.
    """
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(variable):
            return _number(variable, least=0)
    return 0


def node_rank() -> int | None:
    """Return this machine's rank if a launcher has started one process on each; None if no variable is set.

    Raises:
        ValueError: the variable is not a number.
    """
    several = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    for variable in ("JOB_COMPLETION_INDEX", *(["SLURM_PROCID"] if several else [])):
        if os.environ.get(variable):
            return _number(variable, least=0)
    return None


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class TorchrunVariables:
    """Variables as torchrun sets them, for the processes of one machine. They describe the start: members change later.

    Args:
        job: its name.
        members: number of trainers that a new job waits for, over all machines.
        roles: `train`, `replica` or `spare` for each process of this machine.
        node_rank: rank of this machine; None if unknown, which sets only the machine's local variables.
        nodes: number of machines; None for the number that `members` need, if all have the same processes as this one.
        master: host and port at which scripts may form a process group of their own.
        restarts: maximum number of times that a process is restarted.
    """

    job: str
    members: int
    roles: Sequence[str]
    node_rank: int | None
    nodes: int | None
    master: tuple[str, str]
    restarts: int

    def of(self, index: int, restart: int) -> dict[str, str]:
        """Return the variables of process `index` of this machine, after `restart` restarts."""
        local, role = len(self.roles), self.roles[index]
        same_role, trainers = self.roles.count(role), self.roles.count("train")
        variables: dict[str, int | str] = {"LOCAL_RANK": index, "LOCAL_WORLD_SIZE": local}
        if self.node_rank is not None and trainers:
            nodes = self.nodes or max(self.node_rank + 1, math.ceil(self.members / trainers))
            later = max(0, self.members - trainers) if self.nodes else 0  # users start these by hand
            variables |= {
                "RANK": self.node_rank * local + index,
                "WORLD_SIZE": nodes * local + later,
                "GROUP_RANK": self.node_rank,
                "GROUP_WORLD_SIZE": nodes,
                "ROLE_NAME": role,
                "ROLE_RANK": self.node_rank * same_role + self.roles[:index].count(role),
                "ROLE_WORLD_SIZE": nodes * same_role + (later if role == "train" else 0),
                "MASTER_ADDR": self.master[0],
                "MASTER_PORT": self.master[1],
                "TORCHELASTIC_RUN_ID": self.job,
                "TORCHELASTIC_RESTART_COUNT": restart,
                "TORCHELASTIC_MAX_RESTARTS": self.restarts,
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
        return {name: str(value) for name, value in variables.items()}
