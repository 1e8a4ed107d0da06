"""A GPU's own reports of faults, which NVML passes on: Xid errors as they come, and its state when asked.

NVIDIA's catalog says for each Xid what must be done (https://docs.nvidia.com/deploy/xid-errors). A GPU that it wants to
be reset, or its machine restarted, is faulty: further steps would fail, or be wrong. After other errors of hardware the
GPU computes on, at least for a while. Errors of applications, such as 13 or 31, say nothing about a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

FAULTS = {
    46: "the GPU has stopped processing",
    48: "a double-bit error of its memory",
    62: "its microcontroller has halted",
    64: "a row of its memory could not be remapped",
    79: "the GPU has fallen off the bus",
    95: "an uncontained error of its memory",
    109: "a context switch has timed out",
    110: "a security fault",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) has failed",
    136: "a link could not be trained",
    140: "an unrecovered error of its memory",
    143: "the GPU could not be initialised",
    156: "a part of the GPU is retired",
    158: "a fatal timeout of the GPU",
}
"""Xids for which the catalog demands a reset of the GPU or a restart of its machine, for 48 after further checks."""
CONCERNS = {
    63: "a row of its memory will be remapped at the next reset",
    74: "an error of NVLink",
    92: "many single-bit errors of its memory",
    94: "a contained error of its memory: it ends the processes that use that memory",
    **dict.fromkeys(range(144, 151), "an error of NVLink"),
    155: "an error of NVLink",
}
"""Other Xids of hardware. The GPU computes on; a process that is hit gets an error of CUDA."""
RECOVERY_FAULTS = {
    1: "reset of the GPU",
    2: "restart of the machine",
    6: "reset of the bus",
    7: "restart of the system",
}
"""Recovery actions of NVML after which the GPU can be used again, and not before."""


class Problem(NamedTuple):
    """A finding about this member's hardware."""

    text: str
    is_fault: bool
    """Whether further steps may fail or be wrong."""


class Gpu:
    """A GPU, as NVML knows it.

    Args:
        uuid: of the GPU, as NVML writes it.

    Raises:
        LookupError: NVML does not know it, or is missing.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml  # torch, too, imports it only where it is needed

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML: {error}") from None
        self._events: Any = None
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._first_errors = self._memory_errors()
        except pynvml.NVMLError as error:
            self.close()
            raise LookupError(f"NVML, {uuid}: {error}") from None
        with suppress(pynvml.NVMLError):  # virtual GPUs have no events
            events = pynvml.nvmlEventSetCreate()
            try:
                pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, events)
                self._events = events
            except pynvml.NVMLError:
                pynvml.nvmlEventSetFree(events)

    def wait(self, seconds: float) -> Problem | None:
        """Wait for an Xid of hardware, without the GIL; None if the time is over or the error is an application's."""
        try:
            data = self._nvml.nvmlEventSetWait(self._events, round(seconds * 1000))
        except self._nvml.NVMLError_Timeout:
            return None
        except self._nvml.NVMLError as error:
            self._events = None
            return self._refused(error)
        number = int(data.eventData)
        logger.info("the GPU reports Xid %d", number)
        about = FAULTS.get(number) or CONCERNS.get(number)
        return Problem(f"Xid {number}: {about}", number in FAULTS) if about else None

    @property
    def has_events(self) -> bool:
        """Whether the GPU has events; none after an error."""
        return self._events is not None

    def problems(self) -> list[Problem]:
        """Return what is wrong with the GPU now."""
        found: list[Problem] = []
        for look in (self._recovery, self._rows, self._errors, self._heat):
            try:
                found += look()
            except self._nvml.NVMLError as error:
                found += [refused] if (refused := self._refused(error)) else []
        return found

    def _refused(self, error: Exception) -> Problem | None:
        lost = self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_ResetRequired
        return Problem(f"NVML: {error}", True) if isinstance(error, lost) else None

    def _recovery(self) -> Iterator[Problem]:
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        action = value.value.uiVal if value.nvmlReturn == self._nvml.NVML_SUCCESS else 0
        if action:
            what = RECOVERY_FAULTS.get(action, f"recovery action {action}")
            yield Problem(f"the driver demands a {what}", action in RECOVERY_FAULTS)

    def _rows(self) -> Iterator[Problem]:
        _, _, is_pending, has_failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        if has_failed:
            yield Problem(FAULTS[64], True)
        elif is_pending:
            yield Problem(CONCERNS[63], False)

    def _memory_errors(self) -> int:
        kinds = self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC
        try:
            return int(self._nvml.nvmlDeviceGetTotalEccErrors(self._handle, *kinds))
        except self._nvml.NVMLError_NotSupported:
            return 0

    def _errors(self) -> Iterator[Problem]:
        if self._memory_errors() > self._first_errors:
            yield Problem("new uncorrectable errors of its memory", False)

    def _heat(self) -> Iterator[Problem]:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        hot = self._nvml.nvmlClocksEventReasonHwThermalSlowdown | self._nvml.nvmlClocksEventReasonSwThermalSlowdown
        if reasons & hot:
            yield Problem("the GPU is slowed down, as it is too hot", False)

    def close(self) -> None:
        """Release NVML."""
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
