"""The loss scale of mixed precision in float16, the same on all members, and part of the state that is protected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from evermoe.errors import UnsupportedState


class LossScale:
    """The factor of losses and its changes, by the settings of a `torch.amp.GradScaler`.

    The scale is known to the host, so that nothing waits for a GPU. It is written to the scaler after each step.

    Args:
        scaler: of the script; None, or one that is not enabled, for a scale of 1 always.

    Raises:
        ValueError: it is no `torch.amp.GradScaler`.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
            raise ValueError(f"expected scaler to be a torch.amp.GradScaler, got {scaler!r}")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.value = 1.0
        """The scale now."""
        self._steps = 0
        """Finite steps since it last changed."""
        if self._scaler is not None:
            self._read(self._scaler.state_dict())

    def check(self, model: nn.Module) -> None:
        """Check the parameters' types.

        Raises:
            UnsupportedState: some are float16, in which gradients that are scaled back would vanish.
        """
        names = [name for name, p in model.named_parameters() if p.dtype == torch.float16 and p.requires_grad]
        if self._scaler is not None and names:
            raise UnsupportedState(
                f"a GradScaler cannot scale back gradients in float16, which parameter {names[0]} has: keep the "
                "parameters in float32 and compute under torch.autocast(dtype=torch.float16)"
            )

    @property
    def is_used(self) -> bool:
        """Whether there is a scaler."""
        return self._scaler is not None

    def settings(self) -> dict[str, str]:
        """Return the settings that all members must share, by name; empty without a scaler."""
        if self._scaler is None:
            return {}
        names = ("growth_factor", "backoff_factor", "growth_interval")
        state = self._scaler.state_dict()
        return {"scaler": ", ".join(f"{name} {state[name]}" for name in names)}

    def update(self, *, has_overflowed: bool) -> None:
        """Update the scale after a step: it shrinks if gradients were not finite, and grows after many finite steps."""
        if self._scaler is None:
            return
        self._steps += 1
        if has_overflowed:
            self._set(self.value * self._scaler.get_backoff_factor())
        elif self._steps == self._scaler.get_growth_interval():
            self._set(self.value * self._scaler.get_growth_factor())
        self._write()

    def _set(self, value: float) -> None:
        rounded = float(torch.tensor(value, dtype=torch.float32))
        self.value = rounded if math.isfinite(rounded) else self.value
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume; empty without a scaler."""
        return {"scale": self.value, "_growth_tracker": self._steps} if self._scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken. No-op without a scaler on either side."""
        if self.is_used and state:
            self._read(state)
            self._write()

    def _read(self, state: dict[str, Any]) -> None:
        self.value, self._steps = float(state["scale"]), int(state["_growth_tracker"])

    def _write(self) -> None:
        assert self._scaler is not None
        factors = {
            "growth_factor": self._scaler.get_growth_factor(),
            "backoff_factor": self._scaler.get_backoff_factor(),
            "growth_interval": self._scaler.get_growth_interval(),
        }
        self._scaler.load_state_dict(factors | self.state_dict())
