"""Report of `evermoe plan --copies` as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evermoe.cli.plan.advice import percent, survived
from evermoe.cli.plan.auto_plan import AutoReport, KindRow
from evermoe.cli.plan.compare_presets import PresetRow
from evermoe.cli.plan.show import print_wrapped
from evermoe.planning.presets import PRESETS

MAX_EXAMPLES = 6


def show_copies(console: Console, auto: AutoReport, presets: Sequence[PresetRow]) -> None:
    """Print the setting, both tables, survival, examples and advice."""
    console.print("[bold]how each unit is protected[/]")
    for name, text in _facts(auto):
        print_wrapped(console, f"{name:10}", text)
    console.print(_kinds(auto))
    print_wrapped(console, "survives  ", _survival(auto))
    print_wrapped(console, "costs     ", _costs(auto))
    for number, example in enumerate(auto.examples[:MAX_EXAMPLES]):
        print_wrapped(console, " " * 10 if number else "such as   ", example.text)
    if len(auto.examples) > MAX_EXAMPLES:
        print_wrapped(console, " " * 10, f"and {len(auto.examples) - MAX_EXAMPLES} other ways; --json has each unit")
    console.print()
    console.print("[bold]the other presets, with the same model and links[/]")
    console.print(_presets(presets))
    print_wrapped(console, "", _legend(auto))
    for row in presets:
        if row.experts_per_save is not None:
            console.print()
            print_wrapped(console, f"{row.preset:10}", _levels(auto, row))
    console.print()
    print_wrapped(console, "advice    ", advise_copies(auto, presets))


def advise_copies(auto: AutoReport, presets: Sequence[PresetRow]) -> str:
    """Return one sentence about gains and costs of `auto`, or about what it lacks."""
    layout, plan = auto.layout, auto.plan
    open_units = [choice for choice in plan.units if not choice.covered]
    row = {row.preset: row for row in presets}
    if not open_units:
        lost = auto.layout.cluster.losses(layout.setting.replication - 1)
        what = "nothing is sent" if not auto.bytes else f"{row['auto'].peer_bytes:.3g} bytes a parameter in each step"
        gemini = f"copies of everything (gemini) take {row['gemini'].peer_bytes:.3g}"
        return f"auto survives any loss of {lost} without a lost step: {what}, where {gemini}."
    reasons = [choice.reason for choice in open_units]
    reason = max(sorted(set(reasons)), key=reasons.count)
    some = "" if len(set(reasons)) == 1 else f" {reasons.count(reason):,} of them"
    return f"{len(open_units):,} of {len(plan.units):,} units may lose steps,{some} because {_CURES[reason](auto)}."


def _memory_cure(auto: AutoReport) -> str:
    return f"{auto.layout.setting.host_gib:g} GiB of host memory are full: raise --host-gib{_slots_cure(auto)}"


def _time_cure(auto: AutoReport) -> str:
    setting = auto.layout.setting
    return (
        f"{percent(setting.network_idle)} of a step and --budget {setting.budget:g} leave too little time to send "
        "more: "
        f"raise --budget{_slots_cure(auto)}"
    )


def _slots_cure(auto: AutoReport) -> str:
    """Return the slots with which experts train on enough nodes and need no copies."""
    layout = auto.layout
    cluster, wanted = layout.cluster, layout.setting.replication
    slots = cluster.slots_for(layout.share_LE.shape[1], wanted)
    if cluster.min_replicas >= wanted and slots <= cluster.slots:
        return ""
    flags = f"--expert-slots {max(slots, cluster.slots)} --min-replicas {wanted}"
    return f", or give each expert {wanted} replicas, which {flags} do"


def _domains_cure(auto: AutoReport) -> str:
    cluster = auto.layout.cluster
    available = (
        f"there is only 1 {cluster.unit}"
        if len(cluster.domains) == 1
        else f"there are {len(cluster.domains)} {cluster.unit}s"
    )
    return f"{available} for --replication {auto.layout.setting.replication}"


_CURES: dict[str, Callable[[AutoReport], str]] = {
    "no_memory": _memory_cure,
    "no_time": _time_cure,
    "too_few_domains": _domains_cure,
}


def size(nbytes: float) -> str:
    """Format bytes with three digits.

    >>> size(0), size(999), size(1_500_000)
    ('0 B', '999 B', '1.5 MB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        nbytes /= 1000
        if nbytes < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} EB"


def _facts(auto: AutoReport) -> list[tuple[str, str]]:
    setting, cluster = auto.layout.setting, auto.layout.cluster
    shards = "" if setting.dense == "replicated" else ", in shards"
    return [
        (
            "model",
            f"{auto.layout.parameters / 1e9:.4g} billion parameters: {auto.layout.share_LE.size:,} experts of "
            f"{setting.expert_parameters / 1e6:.4g} million, {setting.dense_parameters / 1e6:.4g} million others"
            f"{shards}; {setting.state_bytes} bytes of state and {setting.gradient_bytes} of gradient each; experts "
            f"placed by {auto.policy}",
        ),
        (
            "time",
            f"a step of {setting.step_seconds:g} s, network of {setting.network_gbps:g} Gbit/s idle for "
            f"{percent(setting.network_idle)} of it; a node fails every {setting.mtbf_hours:g} hours, so that the "
            f"cluster has a failure every {setting.mtbf_hours / cluster.nodes:,.1f}",
        ),
    ]


def _kinds(auto: AutoReport) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("\nkind", no_wrap=True)
    names = ("\nexperts", "\nothers", "their\ntokens", "sent in\na step", "of all\nwindows")
    for name in (*names, "memory\na node", "steps lost\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in auto.kinds:
        table.add_row(
            _kind(row),
            f"{row.experts:,}",
            f"{row.others:,}",
            percent(row.tokens),
            size(row.bytes),
            "-" if row.window_share is None else percent_over(row.window_share),
            size(row.memory_bytes / auto.layout.cluster.nodes),
            f"{row.most_lost_steps:,}",
        )
    return table


def percent_over(part: float) -> str:
    """Format like `percent`, for shares that may exceed 1.

    >>> percent_over(0.5), percent_over(1.25)
    ('50.0%', '125.0%')
    """
    return percent(part) if part <= 1 else f"{part:.1%}"


def _kind(row: KindRow) -> str:
    if row.kind != "snapshot":
        return row.kind
    first, last = row.periods
    if last == 1:
        return "snapshot each step"
    return f"snapshot every {first}" + (f" to {last}" if last > first else "") + " steps"


def _survival(auto: AutoReport) -> str:
    parts = []
    for row in auto.survival:
        older = "" if row.without_loss == row.with_loss else f", {survived(row.with_loss)} with older copies"
        parts.append(
            f"{auto.layout.cluster.losses(row.failures)}: {survived(row.without_loss)} without a lost step{older}"
        )
    return "; ".join(parts)


def _costs(auto: AutoReport) -> str:
    setting, busiest = auto.layout.setting, auto.busiest
    windows = setting.network_idle * setting.step_seconds
    delay = auto.plan.delay_seconds / setting.step_seconds
    return (
        f"a step takes {percent_over(delay)} longer; the busiest node uses {busiest.network_seconds:.3g} s of its "
        f"network, idle for {windows:.3g} s, the fullest {size(busiest.host_bytes)} of its host memory"
        + (f" and {size(busiest.device_bytes)} of its devices'" if busiest.device_bytes else "")
    )


def _presets(rows: Sequence[PresetRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("\npreset", no_wrap=True)
    names = ("sent, bytes a\nparam., step", "steps a\nversion", "\ndelay", "without\ndelay", "1 lost:\nsurvives")
    for name in (*names, "steps\nrepeated", "steps'\ntokens lost"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.preset,
            f"{row.peer_bytes:.3g}",
            "-" if row.steps_per_version is None else f"{row.steps_per_version:,.0f}",
            "-" if row.delay is None else percent_over(row.delay),
            _in_windows(row),
            percent(row.survives),
            f"{row.repeated_steps:,.1f}",
            _few(row.lost_steps),
            style="bold" if _chooses_copies(row) else None,
        )
    return table


def _chooses_copies(row: PresetRow) -> bool:
    return PRESETS[row.preset].chooses_copies


def _in_windows(row: PresetRow) -> str:
    if row.peer_bytes == 0 or (_chooses_copies(row) and row.delay):
        return "-"
    return ">4096" if row.steps_in_windows is None else f"{row.steps_in_windows:,}"


def _few(number: float) -> str:
    """Format with three digits; 0 appears only where it is exact."""
    if 0 < number < 0.001:
        return "<0.001"
    return f"{number:,.1f}" if number >= 100 else f"{number:.3g}"


def _legend(auto: AutoReport) -> str:
    unit, setting = auto.layout.cluster.unit, auto.layout.setting
    return (
        "each preset with its own placement, as a session has it. sent: bytes to peers. steps a version: steps from "
        "one copy of a unit to its next, for the worst unit; pec and lazarus keep them in the store, where each preset "
        f"has a checkpoint each {setting.persist_steps:,} steps. without delay: steps in which windows alone have room "
        f"for a version. 1 lost: after the failure of a {unit}, the probability that memory holds everything, the "
        "steps that the job repeats, without the interrupted one, and the tokens lost for good as some experts go back "
        "alone, in steps of the complete model; means. -: unknown, or nothing is sent."
    )


def _levels(auto: AutoReport, row: PresetRow) -> str:
    """Return a sentence about the two levels of a preset."""
    layout = auto.layout
    every, experts = layout.setting.snapshot_interval, layout.share_LE.shape[1]
    lost = _few(row.restart_lost_steps or 0.0)
    return (
        f"{row.experts_per_save} of {experts} experts of each layer go to the store each "
        f"{layout.setting.persist_steps:,} steps, and {row.experts_per_snapshot} to their own node's memory each "
        f"{'step' if every == 1 else f'{every:,} steps'}. Where all processes end and the nodes live, {lost} steps' "
        "tokens are lost."
    )
