"""Types of the extension module; `src/python` is the source."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_Span = tuple[str, str, str, float, float, int, Sequence[int]]
_Step = tuple[float, Sequence[_Span]]

# ---- planners and arenas: src/python/planning/, src/python/snapshot.rs ----

def split_tokens(
    tokens: NDArray[np.int64], matrix: NDArray[np.int64], rank: int, policy: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def imbalance(matrix: NDArray[np.int64], load: NDArray[np.float64], policy: str) -> float: ...
def session_slots(experts: int, domain_sizes: Sequence[int], slots: int | None, replicas: int) -> int: ...
def is_worth_moving(now: float, then: float) -> bool: ...
def keep_in_place(
    held: NDArray[np.int64],
    placement: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    domains: Sequence[Sequence[int]],
) -> NDArray[np.int64]: ...

# The fields of `evermoe.planning.Preset`, a row for each preset.
PRESETS: tuple[dict[str, Any], ...]
OWN_VERSIONS: int
RECORD_BYTES: int
BATCH_STEPS: int
LOGGED_STEPS: int
LOG_STEPS: int
MAX_PERIOD: int
MAX_VERSION_STEPS: int
LOAD_HALF_LIFE: float
FAILURE: float

def preset_replicas(name: str, replication: int, min_replicas: int | None) -> int: ...
def levels(experts: int, per_snapshot: int | None, per_save: int | None) -> tuple[int, int]: ...
def batch_steps(elements: int) -> int: ...
def copy_budget(step_seconds: float, speeds: Sequence[float | None]) -> int | None: ...
def unmeasured_budget(expert_bytes: int, all_bytes: int) -> int: ...
def plan_protection(
    preset: str,
    units: Sequence[tuple[int, int, Sequence[int], float, bool, bool]],
    ranks: Sequence[tuple[str, int, bool, float | None, float | None, int, tuple[float, float] | None, float | None]],
    copies: int,
    budget: float,
) -> tuple[list[tuple[Literal["active", "replayed", "snapshot"], int, int, list[int], list[int]]], str]: ...

# ---- simulation: src/python/simulate.rs ----

def simulate(scenario: str, scheme: str, seed: int, progress: Callable[[float], object] | None = None) -> str: ...
def forecast(scenario: str, preset: str) -> str: ...
def read_bamboo(text: str) -> str: ...
def read_skypilot(texts: Sequence[str]) -> str: ...

class LoadAverage:
    """Average tokens of every expert in a step: `evermoe.planning.LoadAverage`."""

    def __init__(self, layers: int, experts: int, half_life: float, state: NDArray[np.float64] | None) -> None: ...
    def add(self, tokens: NDArray[np.int64]) -> None: ...
    @property
    def loads(self) -> NDArray[np.float64]: ...
    @property
    def state(self) -> NDArray[np.float64]: ...

def allocate(
    load: NDArray[np.float64],
    nodes: int,
    slots: int,
    min_replicas: int,
    previous: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]: ...
def place(
    replicas: NDArray[np.int64],
    nodes: int,
    slots: int,
    policy: str,
    load: NDArray[np.float64] | None,
    previous: NDArray[np.int64] | None,
    domains: list[list[int]] | None,
    failures: int | None,
) -> tuple[NDArray[np.int64], tuple[str, int, float, int, float, float, int | None, str]]: ...
def migrate(
    old: NDArray[np.int64], new: NDArray[np.int64], nbytes: NDArray[np.int64], domains: list[list[int]] | None
) -> tuple[list[int], list[tuple[int, int, int, int]], int]: ...
def copy_holders(nodes: list[str], copies: int, policy: str) -> list[list[int]]: ...
def training_copy_holders(
    nodes: list[str], data_parallel: list[int], pipeline: list[int], copies: int, zero_stage: int
) -> tuple[list[list[int]], list[list[int]]]: ...
def recovery_probability(
    matrix: NDArray[np.int64], failures: int, domains: list[list[int]] | None, samples: int | None, seed: int
) -> tuple[float, float, int | None]: ...
def copy_recovery_probability(
    holders: list[list[int]], failures: int, nodes: list[str] | None, samples: int | None, seed: int
) -> tuple[float, float, int | None]: ...
def primaries(holders: list[list[int]], nbytes: list[int], ranks: int) -> list[int]: ...
def unit_copy_holders(
    primaries: list[int], active: list[list[int]], nodes: list[str], copies: int
) -> list[list[int]]: ...
def choose_copies(
    units: list[tuple[int, int, list[int], float, bool]],
    nodes: list[tuple[float, int, int, int, float, float]],
    network: tuple[float, float],
    host_link: tuple[float, float],
    step_seconds: float,
    copies: int,
    budget: float,
    max_period: int,
    persist_period: int,
    log_steps: int,
) -> tuple[
    list[tuple[str, int, int, list[tuple[int, str]], int, int, bool, int, float, str, str]],
    list[tuple[int, int, float, float, int, int]],
    float,
    float,
    list[tuple[int, tuple[float, float, int | None], tuple[float, float, int | None]]],
    str,
]: ...
def recovery_plan(
    units: list[tuple[str, int]],
    holdings: list[list[tuple[str, int, int, str]]],
    needs: list[list[str]],
    may_lag: list[str],
    nodes: list[int],
) -> RecoveryPlan: ...
def usable_holdings(
    members: list[tuple[bool, bool]], holdings: list[list[tuple[str, int, int, str]]]
) -> list[list[tuple[str, int, int, str]]]: ...
def select_sequential(layers: int, experts: int, experts_per_layer: int, checkpoint: int) -> list[list[int]]: ...
def select_load_aware(
    tokens: NDArray[np.int64],
    waiting: NDArray[np.int64] | None,
    ranks: NDArray[np.int64] | None,
    experts_per_layer: int,
    checkpoint: int,
) -> list[list[int]]: ...
def select_by_budget(tokens: NDArray[np.int64], capacity: int) -> list[list[int]]: ...
def shard_modules(nbytes: list[int], expert_bytes: list[int], alignment: int) -> list[list[tuple[int, int, int]]]: ...
def place_owners(
    nbytes: list[int], active: list[list[int]], copies: list[list[int]], loads: list[int]
) -> list[int]: ...
def forecast_memory(bytes: int) -> tuple[int, int]: ...
def find_windows(steps: Sequence[_Step], quantile: float, gamma: float, ignore: list[str]) -> Windows: ...
def has_changed(
    windows: Windows, steps: Sequence[_Step], tolerance: float
) -> tuple[str, str, str | None, float | None, float | None, str] | None: ...
def plan_chunks(
    pieces: list[tuple[str, int, list[int]]],
    windows: Windows,
    receivers: list[tuple[int, Windows, float]],
    link: tuple[float, float],
    memory: tuple[int, int, tuple[float, float] | None],
    policy: str,
    max_steps: int,
    version_steps: int | None,
) -> ChunkPlan: ...
def version_pace(
    plan: tuple[int, float, float, int],
    step_seconds: float,
    link: tuple[float, float],
    failures_per_step: float,
    most: int,
) -> tuple[int, float, float] | None: ...
def snapshot_memory(free_bytes: int, nbytes: list[int], reserve: int) -> list[str]: ...
def chrome_trace(
    steps: Sequence[_Step],
    windows: Windows | None,
    plan: ChunkPlan | None,
    sent: list[tuple[float, float, int, int, int | None]],
    rank: int,
    start: float,
) -> str: ...
def merge_traces(traces: list[str]) -> str: ...

class Windows:
    """Idle windows of a rank: `evermoe.planning.windows.Windows`."""

    @staticmethod
    def from_json(text: str) -> Windows: ...
    def to_json(self) -> str: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def evidence(self) -> tuple[int, int, str]: ...
    @property
    def rows(self) -> list[tuple[str, str | None, int, float, float, float, float, float]]: ...

class ChunkPlan:
    """Plan of the transfers of one version: `evermoe.planning.schedule.ChunkPlan`."""

    @staticmethod
    def from_json(text: str) -> ChunkPlan: ...
    def to_json(self) -> str: ...
    @property
    def rows(self) -> list[tuple[int, int | None, str, int, int, int, float, float]]: ...
    @property
    def reason(self) -> tuple[bool, int, int | None, float, float, float, int, int, str]: ...

class VersionSchedule:
    """Schedule of the versions of copies, and the vote that waits for each: `src/engine/version_schedule.rs`."""

    is_used: bool
    """Whether votes wait for versions; otherwise the state survives without the versions under way."""

    def __init__(self, step: int = 0) -> None: ...
    @property
    def begun(self) -> int:
        """Steps taken in the newest version that is copied."""

    def restart(self, step: int) -> None:
        """Restart with version `step`, which is complete everywhere by the next vote if votes wait."""

    def is_due(self, step: int) -> bool:
        """Return whether the vote on `step` needs the version under way, after which the next one begins."""

    def begin_version(self, step: int, steps: int) -> None:
        """Begin the version of `step`, over `steps` steps; the one under way is complete on all members."""

    def lag(self, step: int) -> int:
        """Return the steps by which complete versions lag behind at the vote that makes `step` the steps taken."""

class Selector:
    """Selection of the experts to copy next: `src/engine/selector.rs`. Lists are `[layers, experts]`."""

    def __init__(
        self,
        nbytes: list[int],
        is_sequential: bool,
        remote_bytes_per_step: int | None,
        local_bytes_per_step: int | None,
    ) -> None: ...
    def replan(self, active: list[list[int]], kept: list[bool], ranks: int) -> None: ...
    def select_to_follow(
        self, ledger: TokenLedger, average: NDArray[np.float64], measured: int | None = None
    ) -> list[list[int]]: ...
    def select_within_budget(self, ledger: TokenLedger, measured: int | None = None) -> list[list[int]]: ...
    def select_in_turn(self, ledger: TokenLedger) -> list[list[int]]: ...

class TokenLedger:
    """Counts of the tokens of every expert since its last copy: `evermoe.planning.TokenLedger`."""

    def __init__(self, layers: int, experts: int, experts_per_layer: int, max_lost_token_fraction: float) -> None: ...
    @staticmethod
    def from_json(text: str) -> TokenLedger: ...
    def to_json(self) -> str: ...
    def add(self, counts: NDArray[np.int64]) -> None: ...
    def copied(self, selection: list[list[int]], newer: NDArray[np.int64] | None = None) -> None: ...
    def lose(self, experts: list[list[int]]) -> float: ...
    def restore(
        self,
        seen: NDArray[np.int64],
        lost: NDArray[np.int64],
        at_risk: NDArray[np.int64],
        experts_per_layer: int,
    ) -> None: ...
    def adapt_k(self) -> None: ...
    def portions(self, part: NDArray[np.int64]) -> NDArray[np.float64]: ...
    @property
    def step(self) -> int: ...
    @property
    def checkpoint(self) -> int: ...
    @property
    def experts_per_layer(self) -> int: ...
    @property
    def seen(self) -> NDArray[np.int64]: ...
    @property
    def at_risk(self) -> NDArray[np.int64]: ...
    @property
    def lost(self) -> NDArray[np.int64]: ...
    @property
    def waiting(self) -> NDArray[np.int64]: ...
    @property
    def plt_at_risk(self) -> NDArray[np.float64]: ...
    @property
    def plt_lost(self) -> NDArray[np.float64]: ...
    @property
    def plt(self) -> float: ...

class RecoveryPlan:
    """Plan of a recovery: the version to continue from, and the transfers."""

    @property
    def version(self) -> int | None:
        """The version to continue from; None if no version is complete."""
    @property
    def lost(self) -> list[str]:
        """Units without a holder at the version that misses the fewest; empty when there is a version."""
    @property
    def stale(self) -> list[tuple[str, int]]:
        """(unit, version) of units that all ranks take at an older version than the target."""
    @property
    def transfers(self) -> list[tuple[str, int, int, str]]:
        """(unit, source, destination, kind), largest units first; a stale unit is sent at its stale version.

        If source and destination are the same, the rank reads the unit from its own replica, snapshot or file. A
        source that receives the unit itself passes on the received bytes.
        """
    @property
    def conflicts(self) -> list[tuple[str, int, int, int]]:
        """(unit, rank, its digest, the digest that most holders have) of the outvoted ranks."""
    @property
    def reason(self) -> str:
        """Reason of the version, as a sentence."""

def write_safetensors(
    path: str | PathLike[str],
    tensors: list[tuple[str, str, list[int], NDArray[np.uint8]]],
    metadata: dict[str, str] | None = None,
    *,
    threads: int = 4,
    hashed: Sequence[NDArray[np.uint8]] = (),
) -> list[int]:
    """Write a new safetensors file of tensors (name, safetensors' dtype, shape, bytes) and wait until it is on disk.

    `threads` threads of lower priority write blocks around the page cache where the file system allows that, without
    the GIL. One more computes the digests of `hashed`, which are returned. OSError if the file exists or cannot be
    written, ValueError for unknown dtypes and wrong sizes; no file is left.
    """

class Arena:
    """Two versions of a set of units in a file of shared memory that outlives the process.

    A version becomes visible atomically, even if the process is killed in the middle of a write:

        arena = Arena.create("/dev/shm/job/rank0", "{}", [("dense", 4096)])
        index = arena.begin(version=1)         # now the buffer has no version
        arena.buffer(index)[64:64 + 4096] = 7  # offsets of the units: arena.units()
        arena.commit(index)                    # digests are computed, then version 1 is visible
    """

    @staticmethod
    def create(
        path: str | PathLike[str],
        meta: str,
        units: list[tuple[str, int]],
        *,
        reserves: bool = True,
        room: str | PathLike[str] | None = None,
        gpu: int | None = None,
    ) -> Arena:
        """Create an arena of units (name, bytes) with all its space reserved, or left to `reserve`.

        `room` is a file of zeros in the same folder, which becomes the arena's together with its space. Space that is
        reserved now comes from the NUMA node of `gpu`, if that has room. OSError if the path exists or there is too
        little space; nothing is left behind, not even `room`.
        """
    def reserve(self, most_bytes: int) -> bool:
        """Reserve up to `most_bytes` more space; return whether all is reserved and the next buffer is ready.

        Nothing may be written to a buffer before that; a `Capture` calls it itself. Call it before each version: the
        second buffer takes its page faults before the second version. It takes time for each byte, without the GIL.
        OSError if the space is no longer available; it may be tried again.
        """
    @staticmethod
    def open(path: str | PathLike[str]) -> Arena:
        """Open an arena that an earlier process has left.

        OSError if it is missing, CorruptCopy if it is not a complete arena.
        """
    @property
    def meta(self) -> str:
        """The description that was passed to `create`."""
    @property
    def path(self) -> str:
        """Path of the file, which may be removed."""
    @property
    def payload_bytes(self) -> int:
        """Bytes of one buffer: version, digests and units."""
    @property
    def mapped_bytes(self) -> int:
        """Size of the file in bytes."""
    def page_lock(self, device: int) -> None:
        """Page-lock the arena as long as it is mapped, so that CUDA devices write into it; in builds with CUDA.

        Call it once; the driver waits for all work of the device. RuntimeError with its reason if it refuses.
        """
    @property
    def is_page_locked(self) -> bool:
        """Whether the arena is page-locked: then `CopyEngine.capture_device` copies directly into it."""
    def units(self) -> list[tuple[str, int, int]]:
        """Return (name, offset in a buffer, bytes) of each unit; offsets are multiples of 64, after the table."""
    def begin(self, version: int) -> int:
        """Start to overwrite the buffer without a version, or else the older one; return its index."""
    def buffer(self, index: int) -> NDArray[np.uint8]:
        """Return a buffer, writable, in the shared memory itself: version and digests, then units."""
    def commit(self, index: int) -> list[int]:
        """Compute the digests of a buffer that was begun, publish it and return them."""
    def commit_received(self, index: int) -> None:
        """Publish a buffer that was received from a peer, including version and digests.

        CorruptCopy names the units that do not match their digests; the buffer then stays without a version.
        """
    def versions(self) -> list[tuple[int, int]]:
        """Return (index, version) of the complete buffers, newest first."""
    def digests(self, index: int) -> list[int]:
        """Return the digests of a complete buffer, one per unit."""
    def verify(self, index: int) -> list[str]:
        """Return the names of the units of a complete buffer whose bytes do not match their digests."""
    def unlink(self) -> None:
        """Remove the file; arrays of it stay valid."""

def digest(array: NDArray[np.uint8]) -> int:
    """Return the xxh3-64 of contiguous bytes."""

def digests(units: Sequence[Sequence[NDArray[np.uint8]]]) -> list[int]:
    """Return the xxh3-64 of several units, each given as consecutive contiguous parts, by a few threads."""

# ---- end of planners and arenas ----

# ---- captures: src/python/engine.rs -----------------------------------------------------------

def copy_units(sources: Sequence[Sequence[tuple[int, int]]], outs: list[NDArray[np.uint8]]) -> None:
    """Copy the consecutive runs (address, nbytes) of each unit in CPU memory to `outs`, without the GIL.

    The call waits for a low-priority thread that copies. No code may write or free the runs meanwhile. ValueError for
    runs that do not add up to their place.
    """

class CopyEngine:
    """A thread that captures scattered memory into arenas in the background, while its gate is open.

        engine = CopyEngine()                          # the gate is closed
        runs = [[(tensor.data_ptr(), tensor.nbytes)]]  # of each unit of the arena
        capture = engine.capture(arena, version=1, sources=runs, keep=tensor)
        engine.open()                                  # now the network or the cores are idle
        engine.close_gate()                            # now they are not
        capture.hurry()                                # the optimizer wants to write the tensor now
        capture.wait()                                 # now it may: version 1 is in the arena

    The thread copies and hashes a chunk at a time, one capture after the other. On Linux it runs as a batch job with a
    nice value 5 higher than the caller's. It belongs to the process that created it, not to forked ones.
    """

    def __new__(cls, chunk_bytes: int = 1 << 20) -> CopyEngine:
        """Start the thread, which checks the gate after at most `chunk_bytes`."""
    def capture(
        self, arena: Arena, version: int, sources: Sequence[Sequence[tuple[int, int]]], keep: object
    ) -> Capture:
        """Begin `version` in the arena now and let the thread copy it.

        `sources` holds for each unit of the arena, in order, its runs (address, nbytes) in CPU memory. `keep` owns them
        and is released when the capture is over. Until then no code may write the runs, or begin another version in the
        arena. ValueError if the runs of a unit do not add up to its bytes, while an earlier capture into this arena is
        not over, and after `shutdown`. No version is then begun.
        """
    def capture_device(
        self,
        arena: Arena,
        version: int,
        copier: ChunkCopier,
        tensors_per_unit: Sequence[int],
        current_stream: int,
    ) -> Capture:
        """Capture a copier's CUDA tensors, like `capture`; in builds with CUDA.

        They are copied directly into an arena that is page-locked, or else through page-locked memory of the copier.
        Their values are those after all work queued on the stream. The first unit is the copier's first
        `tensors_per_unit[0]` tensors, and so on. Until the capture is over no code may write the tensors, not even on a
        stream, or use the copier for anything but the next captures. The device makes complete transfers of the copier,
        some ahead of the thread: up to `staging` + 1 transfers more than the gate allows. An error of the device
        cancels the capture.
        """
    def open(self, nbytes: int | None = None) -> None:
        """Allow `nbytes` more bytes of units to be copied, or any number until `close_gate`.

        This replaces the allowance of an earlier `open`. A capture without bytes needs no gate.
        """
    def close_gate(self) -> None:
        """Stop copying after the chunk in progress."""
    def shutdown(self) -> None:
        """Cancel all captures and end the thread, as the end of the engine's life does. Further calls do nothing."""

class Capture:
    """A version that is being captured into an arena; created by `CopyEngine.capture`. Dropping it changes nothing."""

    @property
    def index(self) -> int:
        """The buffer of the arena that is being written."""
    @property
    def version(self) -> int:
        """The version of the buffer once it is complete."""
    @property
    def state(self) -> str:
        """ "waiting", "copying", "complete" (published) or "cancelled" (nothing is read any more)."""
    @property
    def done_bytes(self) -> int:
        """Offset in the buffer up to which the units' bytes are in place.

        The digests at the start of the buffer are written last: only when the version is published does this equal the
        arena's `payload_bytes`.
        """
    @property
    def seconds_busy(self) -> float:
        """Time that the thread has spent on copying it."""
    def wait(self, nbytes: int | None = None, timeout: float | None = None) -> int:
        """Wait until `done_bytes` is at least `nbytes`, or the version is published; return `done_bytes`.

        It is smaller after `timeout` seconds. CaptureCancelled if the capture is or becomes cancelled.
        """
    def hurry(self) -> None:
        """Let this and all earlier captures pass the gate; their bytes do not count against the allowance of `open`."""
    def cancel(self) -> None:
        """Cancel it unless it is over; return when nothing is read any more. Its buffer then has no version."""

# ---- end of captures --------------------------------------------------------------------------

# ---- copies: src/python/chunks.rs; in builds with CUDA ----------------------------------------

class ChunkCopier:
    """Copies CUDA tensors to chunks in page-locked host memory and back; see `copies.snapshot.ChunkedCopy`."""

    @staticmethod
    def workspace_bytes(sizes: list[int], chunk_bytes: int, staging: int) -> int:
        """Return the bytes of device memory that a copier needs."""
    def __new__(
        cls,
        device: int,
        current_stream: int,
        tensors: list[tuple[int, int]],
        chunk_bytes: int,
        staging: int,
        workspace: int,
        host: NDArray[np.uint8] | None,
        for_captures: bool,
        kept: object,
    ) -> ChunkCopier:
        """Create a copier of tensors (device address, bytes). `kept` owns them, the workspace and the host memory.

        With `for_captures` it has host memory for a few transfers only, which they use in turn: for `capture_device`.
        """
    def chunks(self) -> NDArray[np.uint8]: ...
    def hashes(self) -> NDArray[np.int64]: ...
    def wrong(self) -> NDArray[np.int64]: ...
    def save(self, current_stream: int, first: int, end: int) -> None: ...
    def restore(self, current_stream: int, first: int, end: int) -> None: ...
    def release(self, current_stream: int) -> None: ...
    def is_done(self, first: int, end: int) -> bool: ...
    def wait(self, first: int, end: int) -> None: ...

def digest_units(device: int, current_stream: int, spans: int, ends: int, num_units: int, digests: int) -> None:
    """Launch the kernel that computes the XXH3-64 of units on a device, each of more than 240 bytes.

    Addresses on the device: `spans`, `[n, 3]` int64, the address, the offset in its unit and the bytes of each tensor,
    unit by unit; `ends`, `[num_units]` int64, the number of spans up to the end of each unit; `digests`, `[num_units]`
    64-bit words, written. All must live until the stream has passed the launch.
    """

# ---- end of copies ----------------------------------------------------------------------------

# ---- ops: src/python/ops.rs -------------------------------------------------------------------

def register_ops() -> None: ...
def adamw_step(
    *,
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    loss_scale: float,
    clip: float,
    arithmetic: str,
    powers: tuple[float, float] | None,
) -> list[float]: ...
def sgd_step(
    *,
    is_first: bool,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    loss_scale: float,
    clip: float,
    arithmetic: str,
) -> list[float]: ...
def has_cuda_kernels() -> bool: ...
def set_cpu_cache_limit(limit: int | None) -> None: ...
def cpu_cache_bytes() -> int: ...

# ---- end of ops -------------------------------------------------------------------------------

# ---- replicas: src/python/replay.rs -----------------------------------------------------------

RECORD_HEADER_BYTES: int

_Payload = tuple[int, int, int]
_Gradients = list[NDArray[np.float32] | NDArray[np.uint16] | None]
# epoch, version, the unit's own step count, numbers, gradients, bytes, whether the data is unchanged, and whether the
# log has the trainer's digest of the state after it
_Batch = tuple[int, int, int | None, NDArray[np.float32], _Gradients, int, bool, bool]

def encode_gradient(
    gradient: NDArray[np.float32] | NDArray[np.uint16], numbers: list[float], record: NDArray[np.uint8]
) -> _Payload:
    """Write a gradient (float32, or bits of bfloat16) after a record's header; return (encoding, bytes, digest)."""

FRAME_HEAD_BYTES: int
"""Bytes of a frame before the sizes of its records."""

def fill_frame(
    frame: NDArray[np.uint8],
    most: int,
    records: Sequence[NDArray[np.uint8] | tuple[str, int, int, list[float], NDArray[np.float32] | NDArray[np.uint16]]],
    tail: NDArray[np.uint8],
) -> tuple[int, int]:
    """Write up to `most` records into a frame, and those that do not fit into the tail; return the bytes of both.

    A record is its bytes, or name, step, the unit's own step count, numbers and the gradient, which is then encoded.
    """

def seal_record(
    record: NDArray[np.uint8],
    *,
    kind: str,
    name: str,
    step: int,
    t: int,
    elements: int,
    numbers: list[float],
    payload: _Payload | None,
) -> int:
    """Write the header of "step", "no_step", "skip_all", "full_state" or "proof"; return the record's bytes."""

def state_digest(parts: list[NDArray[np.uint8]]) -> int:
    """Return the digest of a state in parts, as in proofs: XXH3-64 of the XXH3-64 of each 4096 bytes."""

def version_of(generation: int, step: int) -> int:
    """Return the version after `step` steps, the last of them taken by the members of `generation`.

    Example: step 5 of generation 2 is 2 · 2⁴⁰ + 5; it is newer than step 9 of generation 1.
    """

def step_of(version: int) -> int:
    """Return the number of steps that the state of a version has taken."""

def generation_of(version: int) -> int:
    """Return the generation of members that made a version."""

PROTOCOL: int
"""Version of the protocol by which members exchange messages."""

class Secret:
    """Secret that the members of a job share: `src/secret.rs`.

    Raises:
        ValueError: the text has fewer than 16 characters.
    """

    def __init__(self, text: str) -> None: ...
    def tag(self, purpose: str, parts: Sequence[bytes]) -> bytes:
        """Return the HMAC-SHA-256 of the parts for a purpose: 32 bytes."""

    def is_tag(self, tag: bytes, purpose: str, parts: Sequence[bytes]) -> bool:
        """Return whether `tag` is the tag of the parts, compared in constant time."""

def encode_promotion(id: str, job: str, generation: int | None = None, secret: Secret | None = None) -> str:
    """Return the JSON by which an operator makes the members of a job's set continue although others may be missing.

    It is valid while `generation` is the newest of the members; without a generation it only asks who is present.
    """

def encode_message(id: str, job: str, message: Mapping[str, Any], secret: Secret | None = None) -> str:
    """Return the JSON of a member's report to the others, given the fields of a `protocol::Message`.

    Raises:
        ValueError: the message is invalid.
    """

def encode_ended(id: str, job: str, member: str, secret: Secret | None = None) -> str:
    """Return the JSON by which others report, under the name `id`, that the process of `member` has ended."""

def encode_lift(id: str, job: str, name: str, secret: Secret | None = None) -> str:
    """Return the JSON by which an operator lifts the quarantines that name a member, a node or hardware.

    With an empty name it only asks who is present.
    """

def decode_message(id: str, text: str, secret: Secret | None = None) -> str:
    """Return the JSON of a `protocol::Decoded`: the meaning of any text from the Lighthouse."""

class Protocol:
    """The commit protocol of one member as a state machine: `src/protocol/`, driven by `evermoe.session.protocol`.

    Args:
        settings: the fields of `protocol::Settings`.

    Raises:
        ValueError: fields are missing, unknown or of a wrong type.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None: ...
    def handle(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Handle an event, and return the commands to execute: fields as in `src/protocol/event.rs`.

        Raises:
            ValueError: the event does not answer the current command, or its fields are wrong; nothing changes.
        """
    @property
    def version(self) -> int:
        """Version of this member's state."""
    @property
    def generation(self) -> int:
        """Generation of the group, or of the last one."""
    @property
    def is_established(self) -> bool:
        """Whether this member has state of the running job."""
    @property
    def is_ready(self) -> bool:
        """Whether this member can compute a step without a recovery."""
    @property
    def is_over(self) -> bool:
        """Whether the job is over for this member."""

NCCL_NAME_BYTES: int

def nccl_unique_id() -> bytes: ...
def wait_for_nccl_aborts(seconds: float) -> bool:
    """Wait until the aborts of this process are over, at most so long; return whether they are."""

class NcclCommunicator:
    """One rank of an NCCL communicator, on the current CUDA device: `src/nccl/`. Memory is given by address.

    Args:
        id: name of the communicator, from one rank's `nccl_unique_id`.
        rank: of this process.
        size: number of ranks.
        device: number of the current CUDA device.
        seconds: longest wait of a call for other ranks, and of the GPU in a collective, before the communicator is
            aborted.
    """

    def __init__(self, id: bytes, rank: int, size: int, device: int, seconds: float) -> None: ...
    def all_reduce(self, numbers: int, count: int, kind: int, on: int) -> None: ...
    def all_gather(self, source: int, into: int, bytes: int, on: int, /) -> None: ...
    def all_to_all(self, source: int, sent: list[int], into: int, received: list[int], on: int, /) -> None: ...
    def mark(self, on: int) -> None:
        """Note that the host may wait from now on for what a stream has to do."""
    def has_waited(self, seconds: float) -> bool:
        """Whether the GPU has waited longer than this in the latest collective; without a call of the driver."""
    def has_timed_out(self) -> bool:
        """Whether the communicator was aborted as the GPU had waited for `seconds`."""
    def end(self) -> str | None:
        """Return why the communicator was aborted, or None; without a call of NCCL."""
    def failure(self) -> str | None:
        """Return why results cannot be trusted, or None."""
    def abort(self) -> None:
        """End all collectives and waits, and return at once; for any thread."""

class ProbeServer:
    """A port that answers probes of one member from its own thread: `src/reachability/`.

    Args:
        member: id of the member.
        address: numeric address to listen on; None for all.
        secret: secret of the job; the server answers only clients that have it.

    Raises:
        OSError: the system has no free port or thread, or the address is not one of this machine's.
        ValueError: the address is a name.
    """

    def __init__(self, member: str, address: str | None = None, secret: Secret | None = None) -> None: ...
    @property
    def port(self) -> int:
        """Port that the server listens on."""

    def set_computes(self, group: int) -> None:
        """Set the group for whose next step the member computes; 0 for none."""

    def set_gave_up(self, group: int) -> None:
        """Set the group in which the member's wait timed out; 0 for none."""

def probe_all(
    members: Sequence[tuple[str, str]], milliseconds: int, secret: Secret | None = None
) -> tuple[list[tuple[int, int] | None], list[str]]:
    """Probe all members, given by id and address of the probe server (`host:port`), within `milliseconds`.

    Returns:
        For each member the group for whose next step it computes and the group in which its wait timed out, 0 for none;
        None for a member that does not answer. Then the ids of members whose processes have ended: their hosts refuse a
        connection.
    """

class FailureDetector:
    """Threads that probe the members of a group until one stops answering.

    Args:
        members: id and address of the probe server (`host:port`) of each.
        group: the group's epoch.
        milliseconds: time after which a member that does not answer counts as silent.
        secret: secret of the job.
    """

    def __init__(
        self, members: Sequence[tuple[str, str]], group: int, milliseconds: int, secret: Secret | None = None
    ) -> None: ...
    def wait(self) -> tuple[list[str], bool, str | None]:
        """Wait until a member stops answering, its process ends, or it reports that its own wait timed out.

        Returns:
            The id of the silent member, then those of others that have missed an answer; whether the process of the
            first has ended; or else the member whose wait in the group timed out. Empty once the detector is stopped.
        """

    def stop(self) -> None:
        """Stop probing and end all waits."""

class Port:
    """A port for the connections of a member's groups, one after the other: `src/transport/`.

    Args:
        addresses: numeric addresses to listen on, such as those of several network cards; none for all.
        secret: secret of the job; only members that have it can connect.
        ucx: names or paths of UCX's library; the first suitable one is used for long messages. None: all messages use
            TCP.

    Raises:
        OSError: the system has no free port or thread, or an address is not one of this machine's.
        ValueError: an address is a name, or none of the libraries is suitable.
    """

    def __init__(
        self, addresses: Sequence[str] = (), secret: Secret | None = None, ucx: Sequence[str] | None = None
    ) -> None: ...
    @property
    def ports(self) -> list[int]:
        """The port number at each of the given addresses, or the one at all addresses."""

class Links:
    """Messages between a member and the others of a group.

    Args:
        port: port of the member.
        group: unique number of the group.
        rank: rank of the member.
        addresses: `host:port` of all members' ports, by rank.
        streams: number of connections on which messages arrive from one member.
        milliseconds: time in which a connection must be made.

    Raises:
        ValueError: a rank out of range, or 0 streams.
    """

    def __init__(
        self, port: Port, group: int, rank: int, addresses: Sequence[str], streams: int, milliseconds: int
    ) -> None: ...
    def send(self, data: np.ndarray, peer: int, tag: int) -> Transfer:
        """Begin to send uint8 `[n]`, which must not change until the transfer is over.

        Raises:
            ValueError: a rank that is not one of the others, or bytes that are not contiguous.
        """

    def receive(self, data: np.ndarray, peer: int, tag: int) -> Transfer:
        """Begin to receive into uint8 `[n]`, which may be larger than the message.

        Raises:
            ValueError: a rank that is not one of the others, or bytes that are not contiguous.
        """

    def end(self, reason: str) -> None:
        """End all connections and transfers."""

MESH_COLLECTIVE: int

class MeshListening:
    """A member that others may connect to for collectives on the CPU.

    Args:
        address: numeric address on which it listens; None: all addresses.

    Raises:
        ValueError: the address is not numeric. OSError: it is none of this machine, or there is no free port.
    """

    def __init__(self, address: str | None = None) -> None: ...
    @property
    def name(self) -> str:
        """`port/token`, which the others need together with this member's host."""

    def connect(self, rank: int, names: Sequence[str], seconds: float) -> Mesh:
        """Connect all members, each of which calls this.

        Args:
            rank: rank of this member.
            names: `host:port/token` of each member, by rank.
            seconds: time limit.

        Raises:
            ValueError: a rank out of range, a name that is none, or a second call.
            OSError: a member does not come or answer in time.
        """

class Mesh:
    """Connections of a member to all others. Memory is `(address, bytes)`; a failure is returned as its reason."""

    def all_to_all(
        self, tag: int, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], seconds: float
    ) -> str | None:
        """Send each member its part, and receive one from each, by rank; collective.

        Args:
            tag: kind of the collective, from `MESH_COLLECTIVE` on.
            sends: memory of each part; the own one is copied.
            receives: memory for each part.
            seconds: longest time in which no byte moves.
        """

    def exchange(
        self,
        tag: int,
        sends: Sequence[tuple[int, tuple[int, int]]],
        receives: Sequence[tuple[int, tuple[int, int]]],
        seconds: float,
    ) -> str | None:
        """Send memory to ranks and receive from ranks; messages of a tag below `MESH_COLLECTIVE` keep their order."""

    def post(self, tag: int, data: bytes, ranks: Sequence[int]) -> str | None:
        """Send bytes to ranks without waiting until they have room; the rest leaves with the next call."""

    def close(self) -> None:
        """Close the connections, from any thread, which ends all calls under way."""

class Transfer:
    """A message in progress."""

    def wait(self, milliseconds: int) -> str | None:
        """Wait until it is over; return the reason of its failure, or None."""

    def seconds(self) -> float | None:
        """Return the seconds in which its bytes were moving; None if they still are, or if it failed.

        Of a received message: from the arrival of its header to that of its last byte.
        """

class ReplayLog:
    """Records of a replica until it repeats the steps; `evermoe.copies.replay.Replica` drives it."""

    def __init__(self, units: list[tuple[str, int, int]], limit_bytes: int) -> None: ...
    def accept(self, record: NDArray[np.uint8], hold: bool = False) -> tuple[str, int | None, str, int | None]:
        """Log a record; return (code, unit, message, digest).

        After code "state", install the payload and call `installed`. With `hold` a step counts only after
        `release`; until then a later record of the same step replaces it.
        """
    def hold_all(
        self, records: NDArray[np.uint8], sizes: list[int]
    ) -> tuple[int, tuple[str, int | None, str, int | None] | None]:
        """Hold consecutive records up to one that is more than logged; return their number and its outcome."""
    def waiting(self) -> list[int | None]:
        """Return the number of steps by which each unit's log is ahead of its state; None without a state."""
    def release(self, clip: float | None) -> None:
        """Accept the held steps; with None as steps that change nothing, because the trainers have skipped them."""
    def take(self, unit: int, max_steps: int, until: int) -> _Batch | None: ...
    def begin(self, unit: int, step: int) -> None:
        """Announce that a unit gets its full state after `step` from elsewhere; `installed` must follow."""
    def installed(self, unit: int) -> None: ...
    def applied(self, unit: int, epoch: int, version: int, nbytes: int) -> bool: ...
    def forget(self, unit: int) -> None: ...
    def newest(self, unit: int) -> int | None: ...
    def version(self, unit: int) -> int | None: ...
    def proof(self, unit: int) -> int | None:
        """Return the trainer's digest of the unit's state at its version; once, and None if the trainer sent none."""
    def needs_state(self, unit: int) -> bool: ...
    def fullest(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...

# ---- end of replicas --------------------------------------------------------------------------

# ---- objects in stores: src/python/store.rs; not in a build without the feature `object-store` ----

class ObjectStore:
    """Objects under a URL: `evermoe.checkpoint.object_store.ObjectStore`."""

    def __init__(self, url: str, patience: float, upload_limit: float | None, download_limit: float | None) -> None: ...
    @property
    def is_read_only(self) -> bool: ...
    def put(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def read(self, name: str, most_bytes: int) -> bytes | None: ...
    def size(self, name: str) -> int | None: ...
    def read_into(self, name: str, start: int, out: NDArray[np.uint8]) -> None: ...
    def names(self) -> list[str]: ...
    def remove(self, names: list[str]) -> None: ...
    def list(self, below: str) -> list[tuple[str, int, float]]: ...
