"""Types of the extension module; `src/python` is the source."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Literal

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

LOGGED_STEPS: int
OWN_VERSIONS: int
RECORD_BYTES: int
FAILURE: float

def arrange(
    name: str,
    copying: str,
    units: Sequence[tuple[int, int, Sequence[int], float, bool, bool]],
    ranks: Sequence[tuple[str, int, bool, float | None, float | None, int, tuple[float, float] | None, float | None]],
    copies: int,
    budget: float,
) -> tuple[list[tuple[Literal["active", "replayed", "snapshot"], int, int, list[int], list[int]]], str]: ...

# ---- simulation: src/python/simulate.rs ----

def simulate(scenario: str, scheme: str, seed: int, progress: Callable[[float], object] | None = None) -> str: ...
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
    list[tuple[str, int, int, list[tuple[int, str]], int, bool, int, float, str, str]],
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
def retained_versions(
    versions: list[list[int]], partial: list[list[int]], open: list[int], may_lag: list[int], spare: int
) -> list[list[int]]:
    """Of the durable versions of each unit, those that a recovery from the store alone needs, now or soon."""

_ManifestRow = tuple[str, str, str | None, int, tuple[int, int, int] | None, list[str]]
"""Name, file, the checkpoint whose file it is, digest, part (start, end, of) and tensors of a unit."""

def parse_manifest(text: bytes) -> tuple[int, int, str, list[str], list[_ManifestRow]]:
    """Version, step, layout, members and units; CorruptCopy says what is wrong."""

def format_manifest(version: int, step: int, layout: str, members: list[str], units: Sequence[_ManifestRow]) -> str:
    """JSON of a manifest, with its checksum; ValueError if `parse_manifest` would refuse it."""

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
def snapshot_places(free_bytes: int, nbytes: list[int], reserve: int) -> list[str]: ...
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
    """What to send when: `evermoe.planning.schedule.ChunkPlan`."""

    @staticmethod
    def from_json(text: str) -> ChunkPlan: ...
    def to_json(self) -> str: ...
    @property
    def rows(self) -> list[tuple[int, int | None, str, int, int, int, float, float]]: ...
    @property
    def reason(self) -> tuple[bool, int, int | None, float, float, float, int, int, str]: ...

class TokenLedger:
    """Counts the tokens of every expert since it was last copied: `evermoe.planning.TokenLedger`."""

    def __init__(self, layers: int, experts: int, experts_per_layer: int, max_lost_token_fraction: float) -> None: ...
    @staticmethod
    def from_json(text: str) -> TokenLedger: ...
    def to_json(self) -> str: ...
    def add(self, counts: NDArray[np.int64]) -> None: ...
    def copied(self, selection: list[list[int]], newer: NDArray[np.int64] | None = None) -> None: ...
    def put_back(self, tokens: NDArray[np.int64]) -> None: ...
    def lose(self, experts: list[list[int]], tokens: NDArray[np.int64] | None = None) -> float: ...
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
    def mtl(self) -> float: ...
    @property
    def plt_at_risk(self) -> NDArray[np.float64]: ...
    @property
    def plt_lost(self) -> NDArray[np.float64]: ...
    @property
    def plt(self) -> float: ...
    def starvation(self) -> list[tuple[int | None, int, float, float]]: ...

class RecoveryPlan:
    """What to do after a failure: the version to continue from and the transfers that lead there."""

    @property
    def version(self) -> int | None:
        """The version to continue from; None if no version is whole."""
    @property
    def lost(self) -> list[str]:
        """Units without a holder at the version that misses the fewest; empty when there is a version."""
    @property
    def stale(self) -> list[tuple[str, int]]:
        """(unit, version) of units that all ranks take at an older version than the target."""
    @property
    def transfers(self) -> list[tuple[str, int, int, str]]:
        """(unit, source, destination, kind), largest units first; a stale unit is sent at its stale version.

        Where source and destination are the same, the rank takes the unit from its own replica, snapshot or file. A
        source that has another transfer of the unit to itself passes on what comes with that.
        """
    @property
    def conflicts(self) -> list[tuple[str, int, int, int]]:
        """(unit, rank, its digest, the digest that most holders have) of the ranks that were outvoted."""
    @property
    def reason(self) -> str:
        """Why this version, in words."""

def write_safetensors(
    path: str | PathLike[str],
    tensors: list[tuple[str, str, list[int], NDArray[np.uint8]]],
    metadata: dict[str, str] | None = None,
    *,
    threads: int = 4,
    hashed: Sequence[NDArray[np.uint8]] = (),
) -> list[int]:
    """Write a new safetensors file of tensors (name, safetensors' dtype, shape, bytes); its content is on disk then.

    So many threads, which give way to others, write blocks past the page cache, where the file system allows that,
    without the GIL; one more makes the digests of `hashed`, which are returned. OSError if the
    file exists or cannot be written, ValueError for dtypes and sizes that do not fit; no file is left.
    """

class Arena:
    """Two versions of a set of units in a file of shared memory that outlives the process.

    A version is visible whole or not at all, also when the process is killed in the middle of a write:

        arena = Arena.create("/dev/shm/job/rank0", "{}", [("dense", 4096)])
        index = arena.begin(version=1)         # from here on the buffer has no version
        arena.buffer(index)[64:64 + 4096] = 7  # where each unit is: arena.units()
        arena.commit(index)                    # digests are made, then version 1 is there
    """

    @staticmethod
    def create(
        path: str | PathLike[str],
        meta: str,
        units: list[tuple[str, int]],
        *,
        reserves: bool = True,
        room: str | PathLike[str] | None = None,
    ) -> Arena:
        """Make an arena of units (name, bytes) with all its space reserved, or left to `reserve`.

        `room` is a file of zeros in the same folder, which becomes the arena's with the space that it has. OSError if
        the path exists or there is too little space; nothing is left behind, `room` neither.
        """
    def reserve(self, most_bytes: int) -> bool:
        """Reserve at most so many bytes more of its space; return whether all is reserved, and the next buffer ready.

        Nothing may be written to a buffer before that; a `Capture` sees to it itself. Ask before each version: the
        second buffer takes its page faults before the second one. It takes time for each byte, without the GIL. OSError
        if the space is not there any more; it may be tried again.
        """
    @staticmethod
    def open(path: str | PathLike[str]) -> Arena:
        """Open what an earlier process left.

        OSError if it is missing, CorruptCopy if it is not a whole arena.
        """
    @property
    def meta(self) -> str:
        """What was given to `create`."""
    @property
    def path(self) -> str:
        """Where the file is, or was."""
    @property
    def payload_bytes(self) -> int:
        """Bytes of one buffer: version, digests and units."""
    @property
    def mapped_bytes(self) -> int:
        """Bytes of the whole file."""
    def page_lock(self, device: int) -> None:
        """Page-lock all of it as long as it is mapped, so that CUDA devices write into it; in builds with CUDA.

        Once; the driver waits for all work of the device. RuntimeError if it refuses, with its reason.
        """
    @property
    def is_page_locked(self) -> bool:
        """Whether it is: then `CopyEngine.capture_device` copies straight into it."""
    def units(self) -> list[tuple[str, int, int]]:
        """(name, offset in a buffer, bytes) of each unit; offsets are multiples of 64, after the table."""
    def begin(self, version: int) -> int:
        """Start to overwrite the buffer that has no version, else the older one; returns its index."""
    def buffer(self, index: int) -> NDArray[np.uint8]:
        """A whole buffer, writable, in the shared memory itself: version and digests, then units."""
    def commit(self, index: int) -> list[int]:
        """Make the digests of a buffer that was begun, show it and return them."""
    def commit_received(self, index: int) -> None:
        """Show a buffer that came whole from a peer, version and digests included.

        CorruptCopy names the units that do not match their digests; the buffer then stays without a version.
        """
    def versions(self) -> list[tuple[int, int]]:
        """(index, version) of the complete buffers, newest first."""
    def digests(self, index: int) -> list[int]:
        """The digests of a complete buffer, one for each unit."""
    def verify(self, index: int) -> list[str]:
        """Names of the units of a complete buffer whose bytes do not match their digests."""
    def unlink(self) -> None:
        """Remove the file; arrays of it stay valid."""

def digest(array: NDArray[np.uint8]) -> int:
    """xxh3-64 of contiguous bytes."""

def digests(units: Sequence[Sequence[NDArray[np.uint8]]]) -> list[int]:
    """xxh3-64 of several units, by a few threads; each lies in contiguous parts, whose bytes follow each other."""

# ---- end of planners and arenas ----

# ---- captures: src/python/engine.rs -----------------------------------------------------------

def copy_units(sources: Sequence[Sequence[tuple[int, int]]], outs: list[NDArray[np.uint8]]) -> None:
    """Copy the runs (address, nbytes) of each unit in CPU memory, one after the other, to `outs`, without the GIL.

    A thread that gives way to others copies, and is waited for. Nobody may write the runs meanwhile, or let them go.
    ValueError for runs that do not add up to their place.
    """

def digest_lanes(sizes: list[int], count: int | None = None) -> list[list[int]]:
    """The units of each lane of `digests_on_device`: of `sizes` in bytes, about as many bytes in each.

    As many lanes as threads are worth it, of half of the processors, unless a `count` is given.

    Example: `digest_lanes([10, 60, 30, 40], 2)` is `[[1, 0], [3, 2]]`: 70 bytes each.
    """

class CopyEngine:
    """A thread that captures scattered memory into arenas beside training, while its gate is open.

        engine = CopyEngine()                          # the gate is closed
        runs = [[(tensor.data_ptr(), tensor.nbytes)]]  # of each unit of the arena
        capture = engine.capture(arena, version=1, sources=runs, keep=tensor)
        engine.open()                                  # here the network or the cores are idle
        engine.close_gate()                            # here they are not
        capture.hurry()                                # the optimizer wants to write the tensor now
        capture.wait()                                 # it may: version 1 is in the arena

    The thread copies and hashes a chunk at a time, one capture after the other, in their order. On Linux it runs as a
    batch job with a nice value 5 higher than the caller's. It belongs to the process that made it, not to forked ones.
    """

    def __new__(cls, chunk_bytes: int = 1 << 20) -> CopyEngine:
        """Start the thread; it looks at the gate after at most so many bytes."""
    def capture(
        self, arena: Arena, version: int, sources: Sequence[Sequence[tuple[int, int]]], keep: object
    ) -> Capture:
        """Begin `version` in the arena now and let the thread copy it.

        `sources` holds for each unit of the arena, in their order, its runs (address, nbytes) in CPU memory, which
        `keep` owns: it is released when the capture is over. Until then nobody may write the runs, or begin another
        version in the arena. ValueError names the unit whose runs do not add up to its bytes; also while an earlier
        capture into this arena is not over, and after `shutdown`. No version is then begun.
        """
    def capture_device(
        self,
        arena: Arena,
        version: int,
        copier: ChunkCopier,
        tensors_per_unit: Sequence[int],
        current_stream: int,
    ) -> Capture:
        """As `capture`, of a copier's CUDA tensors: straight into an arena that is page-locked, else through
        page-locked memory of the copier; in builds with CUDA.

        They are captured as the stream will have left them. The first unit is the copier's first `tensors_per_unit[0]`
        tensors, and so on. Until the capture is over nobody may write the tensors, also not on a stream, or use the
        copier for anything but the next captures. The device is asked for whole transfers of the copier, some ahead of
        the thread, and so for up to `staging` + 1 transfers more than the gate allows. An error of the device cancels
        the capture.
        """
    def open(self, nbytes: int | None = None) -> None:
        """Let so many more bytes of units be copied, or all that come until `close_gate`.

        This replaces what an earlier `open` allowed. A capture without bytes needs no gate.
        """
    def close_gate(self) -> None:
        """Let nothing more be copied after the chunk in progress."""
    def shutdown(self) -> None:
        """Cancel all captures and end the thread, as the end of the engine's life does. Twice is fine."""

class Capture:
    """A version on its way into an arena; made by `CopyEngine.capture`. Dropping it changes nothing."""

    @property
    def index(self) -> int:
        """The buffer of the arena that is written."""
    @property
    def version(self) -> int:
        """The version that it will have."""
    @property
    def state(self) -> str:
        """ "waiting", "copying", "whole" (published) or "cancelled" (nothing is read any more)."""
    @property
    def done_bytes(self) -> int:
        """The units' bytes before this offset of the buffer are in place.

        The digests at the buffer's start are not, until the version is published; only then are these all of
        the arena's `payload_bytes`.
        """
    @property
    def seconds_busy(self) -> float:
        """Time that the thread has spent on copying it."""
    def wait(self, nbytes: int | None = None, timeout: float | None = None) -> int:
        """Wait until `done_bytes` is at least `nbytes`, or the version is published; returns `done_bytes`.

        After `timeout` seconds it returns what there is. CaptureCancelled if it is cancelled, also meanwhile.
        """
    def hurry(self) -> None:
        """Let it and the captures before it pass the gate; their bytes do not count against what `open` allows."""
    def cancel(self) -> None:
        """Give it up unless it is over; returns when nothing is read any more. Its buffer has no version then."""

# ---- end of captures --------------------------------------------------------------------------

# ---- copies: src/python/chunks.rs; in builds with CUDA ----------------------------------------

class ChunkCopier:
    """Copies CUDA tensors to chunks in page-locked host memory and back; `evermoe.snapshot.ChunkedCopy` drives it."""

    @staticmethod
    def workspace_bytes(sizes: list[int], chunk_bytes: int, staging: int) -> int:
        """Bytes of device memory that it needs."""
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
        """Copier of tensors (device address, bytes). `kept` owns them, the workspace and the host memory.

        `for_captures`: with memory on the host for a few transfers alone, which they use in turn; for `capture_device`.
        """
    def chunks(self) -> NDArray[np.uint8]: ...
    def hashes(self) -> NDArray[np.int64]: ...
    def wrong(self) -> NDArray[np.int64]: ...
    def save(self, current_stream: int, first: int, end: int) -> None: ...
    def restore(self, current_stream: int, first: int, end: int) -> None: ...
    def release(self, current_stream: int) -> None: ...
    def is_done(self, first: int, end: int) -> bool: ...
    def wait(self, first: int, end: int) -> None: ...

def digests_on_device(
    lanes: list[tuple[ChunkCopier, int, list[list[NDArray[np.uint8] | None]]]],
) -> list[list[int]]:
    """xxh3-64 of the units of each lane, a thread for each, without the GIL.

    A lane is a copier that was made `for_captures`, torch's current stream, and the parts of each unit, whose bytes
    follow each other: contiguous bytes on the CPU, or None for the copier's next tensor. The tensors are taken as the
    stream will have left them. Nobody may write them meanwhile, or use the copier. ValueError where units have more or
    fewer tensors than the copier, RuntimeError for an error of the device; nothing is read any more then.
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
# epoch, version, the unit's own count of steps, numbers, gradients, bytes, whether all is what came
_Batch = tuple[int, int, int | None, NDArray[np.float32], _Gradients, int, bool]

def encode_gradient(
    gradient: NDArray[np.float32] | NDArray[np.uint16], numbers: list[float], record: NDArray[np.uint8]
) -> _Payload:
    """Write a gradient (float32, or bits of bfloat16) after a record's header; (encoding, bytes, digest)."""

FRAME_HEAD_BYTES: int
"""Bytes of a frame before the sizes of its records."""

def fill_frame(
    frame: NDArray[np.uint8],
    most: int,
    records: Sequence[NDArray[np.uint8] | tuple[str, int, int, list[float], NDArray[np.float32] | NDArray[np.uint16]]],
    tail: NDArray[np.uint8],
) -> tuple[int, int]:
    """Write records, at most `most`, into a frame, those that do not fit into the tail; the bytes of both.

    A record is its bytes, or name, step, the unit's own count of steps, numbers and the gradient, which is encoded.
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
    """Write the header of "step", "no_step", "skip_all", "full_state" or "proof"; returns the record's bytes."""

def state_digest(parts: list[NDArray[np.uint8]]) -> int:
    """Digest of a state that lies in parts: XXH3-64 of the XXH3-64 of each 4096 bytes; proofs have it."""

def version_of(generation: int, step: int) -> int:
    """The version after `step` steps, the last of them taken by the members of `generation`.

    Example: step 5 of generation 2 is 2 · 2⁴⁰ + 5; it is newer than step 9 of generation 1.
    """

def step_of(version: int) -> int:
    """Steps that the state of a version has taken."""

def generation_of(version: int) -> int:
    """The membership that made a version."""

PROTOCOL: int
"""Number of the protocol of what members tell each other."""

class Secret:
    """What the members of a job know, and nobody else: `src/secret.rs`.

    Raises:
        ValueError: the text has fewer than 16 characters.
    """

    def __init__(self, text: str) -> None: ...
    def tag(self, purpose: str, parts: Sequence[bytes]) -> bytes:
        """HMAC-SHA-256 of the parts for a purpose: 32 bytes."""

    def is_tag(self, tag: bytes, purpose: str, parts: Sequence[bytes]) -> bool:
        """Whether it is the tag of the parts, compared in constant time."""

def promote(id: str, job: str, generation: int | None = None, secret: Secret | None = None) -> str:
    """The JSON by which an operator tells the members of a job's set to go on though others may be missing.

    It holds while `generation` is the newest of the members; without one it only asks who is there.
    """

def tell(id: str, job: str, message: str, secret: Secret | None = None) -> str:
    """The JSON by which a member tells the others about itself, from that of a `protocol::Message`.

    Raises:
        ValueError: the message is not one.
    """

def tell_ended(id: str, job: str, member: str, secret: Secret | None = None) -> str:
    """The JSON by which others tell, under the name `id`, that the process of `member` has ended."""

def hear(id: str, text: str, secret: Secret | None = None) -> str:
    """JSON of a `protocol::Heard`: what to make of something that the Lighthouse has passed on. Fails for no text."""

class Protocol:
    """The commit protocol of one member as a state machine: `src/protocol/`, driven by `evermoe.train.protocol`.

    Args:
        settings: JSON of `protocol::Settings`.
    """

    def __init__(self, settings: str) -> None: ...
    def handle(self, event: str) -> str:
        """JSON of the commands that follow on an event, given as JSON.

        Raises:
            ValueError: the event does not answer what is under way; nothing changes.
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

class Door:
    """A port that answers for one member from a thread of its own: `src/reach/`.

    Args:
        member: id of the member.
        address: numeric address to listen on; None for all.
        secret: that of the job; it answers those alone that have it.

    Raises:
        OSError: the system has no port or no thread left, or the address is not this machine's.
        ValueError: the address is a name.
    """

    def __init__(self, member: str, address: str | None = None, secret: Secret | None = None) -> None: ...
    @property
    def port(self) -> int:
        """Its port."""

    def set_computes(self, group: int) -> None:
        """Says the group for whose next step the member computes; 0 for none."""

    def set_gave_up(self, group: int) -> None:
        """Says the group in which the member has waited in vain; 0 for none."""

def ask_all(
    members: Sequence[tuple[str, str]], milliseconds: int, secret: Secret | None = None
) -> tuple[list[tuple[int, int] | None], list[str]]:
    """What members, by id and address of the door (`host:port`), answer within so many milliseconds.

    For each: the group for whose next step it computes and the one in which it has waited in vain, 0 for none. None
    for one that does not answer. Then the ids of those whose processes have ended, as their hosts refuse a connection.
    """

class Watch:
    """Asks the members of a group, by id and address of the door (`host:port`), until there is something to see."""

    def __init__(
        self, members: Sequence[tuple[str, str]], group: int, milliseconds: int, secret: Secret | None = None
    ) -> None: ...
    def wait(self) -> tuple[list[str], bool, str | None]:
        """Waits until a member has not answered for so many milliseconds, or its process has ended.

        Returns:
            Its id, then those of others that have missed an answer; whether its process has ended; else a member that
            has waited in vain in the group. Nothing once the watch is stopped.
        """

    def stop(self) -> None:
        """Ends the watch."""

class Port:
    """A port for the connections of a member's groups, one after the other: `src/transport/`.

    Args:
        address: numeric address to listen on; None for all.
        secret: that of the job; those alone may connect that have it.
        ucx: names or paths of UCX's library, of which the first is taken that fits; long messages then go by UCX. None:
            all go by TCP.

    Raises:
        OSError: the system has no port or no thread left, or the address is not this machine's.
        ValueError: the address is a name, or no such library fits.
    """

    def __init__(
        self, address: str | None = None, secret: Secret | None = None, ucx: Sequence[str] | None = None
    ) -> None: ...
    @property
    def port(self) -> int:
        """Its port."""

class Links:
    """The messages between a member and the others of a group.

    Args:
        port: the member's.
        group: names the group.
        rank: the member's.
        addresses: `host:port` of all members' ports, by rank.
        streams: connections on which messages come from one member.
        milliseconds: how long a connection may take to be made.

    Raises:
        ValueError: a rank that is none, or no stream.
    """

    def __init__(
        self, port: Port, group: int, rank: int, addresses: Sequence[str], streams: int, milliseconds: int
    ) -> None: ...
    def send(self, data: np.ndarray, peer: int, tag: int) -> Transfer:
        """Begins to send uint8 `[n]`, which stays as it is until the transfer is over.

        Raises:
            ValueError: a rank that is none of the others', or bytes with gaps.
        """

    def receive(self, data: np.ndarray, peer: int, tag: int) -> Transfer:
        """Begins to receive into uint8 `[n]`, which may be larger than the message.

        Raises:
            ValueError: a rank that is none of the others', or bytes with gaps.
        """

    def end(self, reason: str) -> None:
        """Ends all connections, and all transfers with them."""

class Transfer:
    """A message that is under way."""

    def wait(self, milliseconds: int) -> str | None:
        """Waits until it is over; returns why it failed, None if it did not."""

class TripleBuffer:
    """Who may use which of three slots of host memory: the writer, the persister, or nobody. The bytes are elsewhere.

    An event that cannot happen now is a ValueError and changes nothing. `evermoe.persist.persister` drives it.
    """

    def __init__(self) -> None: ...
    @property
    def slots(self) -> list[tuple[str, int | None]]:
        """(state, version) of the three: "empty", "writing", "snapshot", "persisting" or "recovery"."""
    @property
    def writing(self) -> int | None:
        """The slot that is being written."""
    @property
    def persisting(self) -> int | None:
        """The slot that is being persisted."""
    @property
    def recovery(self) -> int | None:
        """The slot of the newest durable version."""
    @property
    def next_to_persist(self) -> int | None:
        """The slot that `persist` would take: the newest snapshot, unless one is being persisted."""
    def begin(self, version: int) -> None:
        """The writer starts a version, newer than all that are there, in an empty slot or over the oldest snapshot."""
    def commit(self) -> None:
        """What is being written is whole."""
    def abandon(self) -> None:
        """What is being written will never be whole."""
    def persist(self) -> None:
        """The persister starts with the newest snapshot."""
    def durable(self) -> None:
        """What is being persisted is in the store; all older versions leave their slots."""
    def failed(self) -> None:
        """The store refused it: it is a snapshot again."""
    def rewind(self, version: int) -> None:
        """Newer versions, none of them durable, belong to steps that never were."""

class ReplayLog:
    """A replica's records, until it repeats the steps; `evermoe.replay.Replica` drives it."""

    def __init__(self, units: list[tuple[str, int, int]], limit_bytes: int) -> None: ...
    def accept(self, record: NDArray[np.uint8], hold: bool = False) -> tuple[str, int | None, str, int | None]:
        """(code, unit, message, digest); code "state" asks for `installed` once the record's payload is in place.

        With `hold` a step counts only from `release` on, and `discard` takes it back.
        """
    def hold_all(
        self, records: NDArray[np.uint8], sizes: list[int]
    ) -> tuple[int, tuple[str, int | None, str, int | None] | None]:
        """Hold records that lie one after the other, up to one that is more than logged; how many, and its fate."""
    def waiting(self) -> list[int | None]:
        """How many steps each unit's newest one is ahead of its state; None without a state."""
    def release(self, clip: float | None) -> None:
        """The held steps count; None: they change nothing, as the trainers have left them out."""
    def discard(self) -> None: ...
    def take(self, unit: int, max_steps: int, until: int) -> _Batch | None: ...
    def begin(self, unit: int, step: int) -> None:
        """A unit gets its full state of after a step from elsewhere; `installed` must follow."""
    def installed(self, unit: int) -> None: ...
    def applied(self, unit: int, epoch: int, version: int, nbytes: int) -> bool: ...
    def forget(self, unit: int) -> None: ...
    def newest(self, unit: int) -> int | None: ...
    def version(self, unit: int) -> int | None: ...
    def proof(self, unit: int) -> int | None:
        """The trainer's digest of the unit's state at its version; once, and None where the trainer sent none."""
    def needs_state(self, unit: int) -> bool: ...
    def fullest(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...

# ---- end of replicas --------------------------------------------------------------------------

# ---- objects in stores: src/python/store.rs; not in a build without the feature `object-store` ----

class ObjectPlace:
    """Objects under a URL: `evermoe.persist.object_store.ObjectStore`."""

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
