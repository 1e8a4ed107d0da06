"""A preset with its options and the number of copies: what the modules that keep copies need to know."""

from __future__ import annotations

from dataclasses import dataclass

from evermoe.options import Options, option
from evermoe.planning.presets import PRESETS, Preset, PresetName
from evermoe.planning.recovery import Lagging
from evermoe.presets import IdleWindows, PresetOptions, Versions


@dataclass(frozen=True, kw_only=True)
class CopyConfig(Options):
    """A preset, and the number of nodes that hold each unit."""

    preset: PresetOptions
    """The preset, with its options."""
    replication: int = option(2, shared=True, least=0)
    """Nodes that hold each unit's state after every step, those that train it included; 0 for no copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.choices.max_replication
        if most is not None and self.replication > most:
            others = ", ".join(name for name, preset in PRESETS.items() if preset.max_replication is None)
            raise ValueError(
                f"expected replication to be at most {most} with the preset {self.name}, got {self.replication}: it "
                "copies an expert to its own node's memory and to the checkpoint store, not to other nodes; use one of "
                f"{others}"
            )

    @property
    def name(self) -> PresetName:
        """Name of the preset."""
        return self.preset.name

    @property
    def choices(self) -> Preset:
        """Planners that the preset uses."""
        return self.preset.choices

    @property
    def windows(self) -> IdleWindows:
        """Options of snapshots that travel while the network is idle."""
        return self.preset.group(IdleWindows)

    @property
    def steps_per_version(self) -> int | None:
        """Steps over which each version of the complete state is copied; None for as few as idle windows need."""
        return self.preset.group(Versions).snapshot_interval if self.choices.copies_late else 1

    @property
    def lagging(self) -> Lagging:
        """Whether a recovery may take experts at older versions than the rest."""
        lagging = self.choices.lagging
        return lagging if lagging != "if needed" or self.replication else "never"

    def shared(self) -> dict[str, str]:
        """Return what must be the same for all members, as text by name: preset, replication, the preset's options."""
        own = {f"{self.name}.{name}": value for name, value in self.preset.shared().items()}
        return {"preset": self.name, **super().shared(), **own}
