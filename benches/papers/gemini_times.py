"""Gemini's times: wasted time, and copies in idle windows of the network."""

from __future__ import annotations

import math

from benches.papers.figure import Row, stated
from benches.papers.sizes import ModelSize, checkpoint_bytes
from evermoe.planning.schedule import ALPHA_SECONDS, ChunkReason, CopyItem, Link, Memory, plan_chunks
from evermoe.planning.windows import Span, StepProfile, Windows, find_windows

GBPS = 1e9 / 8
"""One gigabit per second, in bytes per second."""
REMOTE = 20 * GBPS
"""Bytes per second of all machines together to remote storage (experiment setup; section 2.2)."""
MACHINES, GPUS, NETWORK = 16, 8, 400 * GBPS
"""p4d.24xlarge: machines, GPUs per machine, bytes per second of each machine (experiment setup)."""
STRAWMAN = 3 * 3600.0
"""Seconds between checkpoints of the baseline Strawman (section 7.2)."""
STEP = STRAWMAN / 170
"""Seconds of a step of GPT-2 100B, which our copy does not state: Gemini checkpoints at each step, 170 times as
often as Strawman (section 7.2; Figure 12)."""
BUFFERS = Memory(256 << 20, 4, Link(ALPHA_SECONDS, NETWORK / GPUS))
"""A few hundred MB on a GPU (section 5.2), copied to the host about as fast as the network fills them."""


def state_bytes(parameters: float) -> int:
    """Bytes of master weight and two moments: for 100 billion parameters 9.4 GB on each of 128 GPUs."""
    size = ModelSize(non_expert_parameters=round(parameters), layers=0, experts=0, expert_parameters=0, weight_bytes=0)
    return checkpoint_bytes(size, "full").total_bytes


def wasted(checkpoint: float, interval: float, retrieval: float) -> float:
    """Average seconds lost by a failure (equation 1): the checkpoint, half of the interval, and its retrieval."""
    return checkpoint + interval / 2 + retrieval


def _idle(step: float, share: float, gaps: int = 96) -> Windows:
    """Return a network that is idle for a share of each step, in equal gaps between equal spans of traffic."""
    busy, gap = step * (1 - share) / gaps, step * share / gaps
    spans = [Span(f"layer {at}", "collective", "network", at * (busy + gap), busy) for at in range(gaps)]
    return find_windows([StepProfile(step, spans)], gamma=1.0)


def _sent(nbytes: float, step: float, idle: float, bandwidth: float, memory: Memory) -> ChunkReason:
    """Plan a machine's copy to one other machine, in pieces, into idle windows."""
    link = Link(ALPHA_SECONDS, bandwidth)
    return plan_chunks([CopyItem("state", round(nbytes), [1])], _idle(step, idle), link, memory, policy="gemini").reason


def _transfer(nbytes: float, bandwidth: float) -> float:
    """Return the seconds of that copy on an otherwise idle network."""
    return _sent(nbytes, 1.0, 0.0, bandwidth, BUFFERS).delay_seconds


def gpt2_100b() -> tuple[float, float]:
    """Return the seconds of a checkpoint of GPT-2 100B to remote storage, and to another machine."""
    total = state_bytes(100e9)
    return total / REMOTE, _transfer(total / MACHINES / GPUS, NETWORK / GPUS)


def equation_1() -> list[Row]:
    """Return the rows of section 2.2: time wasted by a failure."""
    minutes = state_bytes(530e9) / REMOTE / 60
    return [
        Row(
            quantity="checkpoint of MT-NLG 530B to remote storage at 20 Gbps",
            unit="min",
            paper=stated("section 2.2", 42),
            ours=minutes,
            how="arithmetic",
            is_fitted=True,
            why="parameters times bytes over bandwidth. The paper does not state 12 bytes a parameter: they follow "
            "from 9.4 GB on each GPU",
        ),
        Row(
            quantity="average time wasted by a failure of MT-NLG",
            unit="min",
            paper=stated("section 2.2, equation 1", 105),
            ours=wasted(minutes, minutes, minutes),
            how="arithmetic",
            is_fitted=True,
            why="one checkpoint after another: t + t / 2 + t, with that t; the paper rounds it to 42",
        ),
        Row(
            quantity="checkpoint of GPT-2 100B on each of 128 GPUs",
            unit="GB",
            paper=stated("section 5.2", 9.4),
            ours=state_bytes(100e9) / MACHINES / GPUS / 1e9,
            how="arithmetic",
            is_fitted=True,
            why="fp32 master weight and two moments, 12 bytes a parameter, chosen because this number results; 16 "
            "bytes, with fp16 weight and gradient, would be 12.5 GB",
        ),
    ]


def figure_7() -> list[Row]:
    """Return the rows of a step's time, and of the idle time that copies use."""
    plan = _sent(state_bytes(100e9) / MACHINES / GPUS, STEP, 0.1, NETWORK / GPUS, BUFFERS)
    return [
        Row(
            quantity="a step of GPT-2 100B made longer by a copy at each step",
            unit="%",
            paper=stated("section 7.2; Figure 7", 0),
            ours=None,
            how="not computed",
            why="our copy does not state how long the network is idle. For any network that is idle longer than the "
            "next row's share, `plan_chunks` adds nothing to the step",
        ),
        Row(
            quantity="idle time of the network that the copies need (Figure 8)",
            unit="% of a step",
            paper=None,
            ours=100 * plan.used_seconds / STEP,
            how="planner",
            why="`plan_chunks`, policy gemini, for a network that is idle in a tenth of the step, which is assumed; "
            "the step's time follows from the 170 times of Figure 12. The paper says that idle time is left, without "
            "a number in our copy",
        ),
    ]


def wasted_times() -> tuple[float, float]:
    """Return the average seconds wasted by a failure (Eq. 1), with HighFreq and with Gemini."""
    remote, peer = gpt2_100b()
    interval = math.ceil(remote / STEP) * STEP
    return wasted(remote, interval, remote), wasted(STEP, STEP, peer)


def figure_10() -> list[Row]:
    """Return the rows of average wasted time."""
    frequent, ours = wasted_times()
    return [
        Row(
            quantity="average wasted time, HighFreq over Gemini, GPT-2 100B, recovered from memory",
            unit="×",
            paper=stated("section 7.2; Figure 10", at_least=13),
            ours=frequent / ours,
            how="planner",
            why="equation 1, with the transfer of gemini-f11; a copy is complete at the end of the step that sends "
            "it. The step's time follows from Figure 12's 170, which is rounded down",
        ),
    ]


def figure_11() -> list[Row]:
    """Return the rows of the time of a checkpoint."""
    remote, peer = gpt2_100b()
    return [
        Row(
            quantity="time of a checkpoint, remote storage over Gemini, 16 machines, 400 Gbps",
            unit="×",
            paper=stated("section 7.2; Figure 11", at_least=250),
            ours=remote / peer,
            how="planner",
            why="`plan_chunks` on an idle network at its nominal bandwidth, with an assumed startup time of each "
            "message; the paper measures",
        )
    ]


def figure_12() -> list[Row]:
    """Return the rows of the frequency of checkpoints."""
    remote, _ = gpt2_100b()
    return [
        Row(
            quantity="checkpoints of Gemini for each of Strawman, GPT-2 100B",
            unit="×",
            paper=stated("section 7.2; Figure 12", at_least=170),
            ours=STRAWMAN / STEP,
            how="arithmetic",
            is_fitted=True,
            why="our copy does not state the step's time: 3 hours over 170, from this number, here and in all rows",
        ),
        Row(
            quantity="checkpoints of Gemini for each of HighFreq, GPT-2 100B",
            unit="×",
            paper=stated("section 7.2; Figure 12", 8),
            ours=math.ceil(remote / STEP),
            how="arithmetic",
            is_fitted=True,
            why="HighFreq's checkpoint takes this number of steps of that time",
        ),
    ]


def profile() -> list[Row]:
    """Return the row of the profile's deviation."""
    return [
        Row(
            quantity="normalized standard deviation of the idle times of 20 steps",
            unit="%",
            paper=stated("section 5.4", at_most=10),
            ours=None,
            how="not computed",
            why="measured on the paper's cluster, and our copy has none of its timelines. evermoe measures its own "
            "profile, and plans no windows where steps differ",
        )
    ]


def figure_16() -> list[Row]:
    """Return the rows of ways to interleave copies with training."""
    machine = state_bytes(40e9) / MACHINES
    bandwidth = 100 * GBPS
    blocked = machine / bandwidth
    step = blocked / 0.101
    one = Memory(64 << 20, 1, Link(ALPHA_SECONDS, bandwidth))
    four = Memory(256 << 20, 4, Link(ALPHA_SECONDS, bandwidth))

    def delay(share: float, memory: Memory) -> float:
        return 100 * _sent(machine, step, share, bandwidth, memory).delay_seconds / step

    idle = min((share / 1000 for share in range(100, 300)), key=lambda share: abs(delay(share, one) - 3.5))
    return [
        Row(
            quantity="a step of GPT-2 40B made longer by copies that block training",
            unit="%",
            paper=stated("section 7.4; Figure 16", 10.1),
            ours=delay(0.0, four),
            how="planner",
            is_fitted=True,
            why=f"`plan_chunks` for a network without idle time; the step's time ({step:.1f} s) follows from this "
            "number",
        ),
        Row(
            quantity="the same, copies that travel in one buffer, without a pipeline",
            unit="%",
            paper=stated("section 7.4; Figure 16", 3.5),
            ours=delay(idle, one),
            how="planner",
            is_fitted=True,
            why=f"`plan_chunks` for that step; the network's idle time ({100 * idle:.1f} %) follows from this number",
        ),
        Row(
            quantity="the same in four buffers, with the pipeline",
            unit="%",
            paper=None,
            ours=delay(idle, four),
            how="planner",
            why="`plan_chunks` for that step and idle time. Almost as long as without copies, says the paper, without "
            "a number in our copy",
        ),
    ]


def table_2() -> list[Row]:
    """Return the rows of model sizes."""
    hidden, layers, vocabulary = 12_288, 96, 50_265
    return [
        Row(
            quantity="parameters of GPT-2 100B with the sizes in our copy: 96 layers, hidden size 12288",
            unit="billion",
            paper=stated("experiment setup; Table 2", 100),
            ours=(12 * layers * hidden**2 + vocabulary * hidden) / 1e9,
            how="arithmetic",
            why="12 hidden² parameters a layer and the embedding; these are the sizes of GPT-3 175B, so that our "
            "copy's text is wrong here. All rows take 100 billion, with which 9.4 GB on a GPU agrees",
        )
    ]
