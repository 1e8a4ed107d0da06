"""Options that decide where and when checkpoints are written."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from evermoe.options import Options, option


@dataclass(frozen=True)
class Checkpoints(Options):
    """Decide where and when checkpoints are written, and how a job resumes."""

    url: str | Path | None = option(None, flag="checkpoints")
    """Folder on a file system that all members share, or a URL such as `s3://bucket/run`. None: no checkpoints. A last
    checkpoint is written at the end of the job."""
    _: KW_ONLY
    interval: int = option(0, shared=True, least=0, flag="checkpoint-interval")
    """Steps between checkpoints; 0: only the last one."""
    time_interval: float = option(0.0, shared=True, least=0, flag="checkpoint-time-interval")
    """Seconds after which a checkpoint is written if none has begun since the previous one; 0: none. Members begin it
    at the end of the same step."""
    keep: int = option(2, shared=True, least=1, flag="keep-checkpoints")
    """Number of the newest checkpoints that are kept. The newest verified one is kept in addition, and one that may
    soon be verified."""
    keep_interval: int = option(0, shared=True, least=0, flag="keep-checkpoint-interval")
    """Checkpoints of steps that are multiples of it are never deleted; 0: no such steps."""
    store_timeout: float = option(180.0, above=0)
    """Seconds during which a request to the URL is retried, with back-off, before it fails."""
    upload_limit: float = option(0.0, least=0)
    """Bytes per second that each member writes to the URL at most; 0 for no limit."""
    download_limit: float = option(0.0, least=0)
    """Bytes per second of units that each member reads from the URL at most; 0 for no limit."""
    resume_settings: Literal["job", "script"] = option("job", shared=True)
    """Source of the optimizer's settings and of the schedule when all processes of a job start again. `job`: those with
    which it was saved; a warning names each one that the script has changed. `script`: those of the script, with its
    schedule stepped once for each step taken. Members that join a running job always take the job's."""

    resume_from: Literal["newest", "verified"] = option("newest", shared=True)
    """Source of the state when all processes of a job start again. `newest`: the newest state in the memory of the
    nodes or among the checkpoints. `verified`: the newest checkpoint after which members have compared their state and
    found no difference, whatever is newer. Units that a running job has lost come from verified checkpoints, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume_from == "verified" and self.url is None:
            raise ValueError(
                "checkpoints: resume_from is 'verified', and there is no url: give the folder or URL of the job"
            )
        if (schedule := schedule_of(self)) and self.url is None:
            raise ValueError(
                f"checkpoints: {schedule} and there is no url to write to: give a folder or a URL, "
                "Checkpoints('s3://bucket/run', interval=…), or leave the interval out"
            )


def schedule_of(options: Checkpoints) -> str:
    """Return when checkpoints are written before the end of a job, for messages; empty if none are."""
    if options.interval:
        return f"interval is {options.interval} steps"
    return f"time_interval is {options.time_interval:g} seconds" if options.time_interval else ""
