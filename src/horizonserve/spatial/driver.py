"""The CUDA driver through cuda.bindings: one way to call it, and how it splits a device.

Needs cuda-bindings 12.9 or 13 and a driver with green contexts (12.5). Nothing is imported or
resolved before the first call, so that machines without a GPU can import this module.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from horizonserve.spatial.ladder import Die, Level, aligned, existing, requests, smallest

#: First driver with structured splits, and first whose resources report minimum and alignment.
STRUCTURED_SINCE: Final = 13_010
REPORTS_SINCE: Final = 13_000
_RESOURCE_SM: Final = "CU_DEV_RESOURCE_TYPE_SM"
#: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION; also for a split that comes back without a group.
NO_GROUP: Final = 915
#: With CUDA_ERROR_INVALID_VALUE: this die has no such split.
_NO_SUCH_SPLIT: Final = frozenset({1, NO_GROUP})

_REMEDIES: Final = {
    "import": "install cuda-bindings 12.9 or 13 (it comes with vLLM's CUDA build)",
    "cuInit": "check that nvidia-smi sees a GPU and that the driver is loaded",
    "cuDeviceGet": "check CUDA_VISIBLE_DEVICES and the device number",
}
_REMEDY: Final = "update to an NVIDIA driver for CUDA 12.5 or later, or switch spatial control off"


class DriverError(RuntimeError):
    """A driver call that failed; ``code`` is its CUresult, None where the bindings raised."""

    def __init__(self, function: str, reason: str, code: int | None = None) -> None:
        self.function, self.code = function, code
        super().__init__(f"{function}: {reason}; {_REMEDIES.get(function, _REMEDY)}")


def bindings() -> ModuleType:
    """cuda.bindings.driver.

    Raises:
        DriverError: it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError("import", f"no cuda.bindings ({error})") from error


def resolved(function: str) -> Callable[..., Any]:
    """A driver call looked up once, for the hot path; gives the bindings' tuple, code first.

    Raises:
        DriverError: the bindings lack it; each call raises it where the call fails.
    """
    try:
        raw = getattr(bindings(), function)
    except AttributeError as error:
        raise DriverError(function, f"these cuda.bindings lack it ({error})") from error

    def checked(*arguments: Any) -> Any:
        try:
            outcome = raw(*arguments)
        except Exception as error:
            # No libcuda, a symbol newer than the driver, a result code newer than the bindings.
            raise DriverError(function, f"{type(error).__name__}: {error}") from error
        code = outcome[0]
        if code:
            raise DriverError(function, f"{getattr(code, 'name', code)} ({int(code)})", int(code))
        return outcome

    return checked


def call(function: str, *arguments: Any) -> Any:
    """The results of one driver call: None, the one, or a tuple.

    Raises:
        DriverError: the call failed, in whichever way.
    """
    _, *results = resolved(function)(*arguments)
    return None if not results else results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True, slots=True)
class Split:
    """Both sides of one split, as the driver's opaque resources."""

    group: Any
    remainder: Any
    #: Of the device that was split.
    uuid: bytes

    @property
    def level(self) -> Level:
        """What was granted; the opaque bytes of both sides and the device are its fingerprint."""
        content = bytes(self.group._internal_padding) + bytes(self.remainder._internal_padding)
        digest = hashlib.sha256(self.uuid + content).digest()
        return Level(_sms(self.group), _sms(self.remainder), int.from_bytes(digest[:8], "little"))


def _sms(resource: Any) -> int:
    # An empty side has no type, and its count is not to be read.
    return int(resource.sm.smCount) if int(resource.type) else 0


class Device:
    """One GPU as the driver describes it; makes no context.

    Raises:
        DriverError: no driver, no such device, or no green contexts.
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver = bindings()
        call("cuInit", 0)
        self.handle = call("cuDeviceGet", ordinal)
        self.uuid = bytes(call("cuDeviceGetUuid", self.handle).bytes)
        self.driver_version = int(call("cuDriverGetVersion"))
        attribute = driver.CUdevice_attribute
        self.compute_capability = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.mps = bool(self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED))
        self.sm_type = getattr(driver.CUdevResourceType, _RESOURCE_SM)
        self.resource = call("cuDeviceGetDevResource", self.handle, self.sm_type)
        self.structured = self.driver_version >= STRUCTURED_SINCE and hasattr(
            driver, "cuDevSmResourceSplit"
        )
        try:
            minimum, alignment = smallest(self.compute_capability)
        except ValueError as error:
            raise DriverError("cuDeviceGetDevResource", str(error)) from error
        sm = self.resource.sm
        if self.driver_version >= REPORTS_SINCE and hasattr(sm, "minSmPartitionSize"):
            minimum = int(sm.minSmPartitionSize) or minimum
            alignment = int(sm.smCoscheduledAlignment) or alignment
        self.die = Die(int(sm.smCount), minimum, alignment)

    @property
    def nvml_uuid(self) -> str:
        """The UUID as NVML and nvidia-smi write it."""
        return f"GPU-{uuid.UUID(bytes=self.uuid)}"

    def _attribute(self, attribute: Any) -> int:
        return int(call("cuDeviceGetAttribute", attribute, self.handle))

    @property
    def split_function(self) -> str:
        """The driver call that splits this device."""
        return "cuDevSmResourceSplit" if self.structured else "cuDevSmResourceSplitByCount"

    def split(self, requested_sms: int) -> Split:
        """The split of the whole device that asks for so many SMs.

        Raises:
            DriverError: the call failed, also where the die has no such split.
        """
        if self.structured:
            group = bindings().CU_DEV_SM_RESOURCE_GROUP_PARAMS()
            group.smCount = requested_sms
            group.coscheduledSmCount = self.die.alignment_sms
            groups, rest = call(self.split_function, 1, self.resource, 0, [group])
        else:
            groups, count, rest = call(self.split_function, 1, self.resource, 0, requested_sms)
            groups = groups[:count]
        if not groups:
            raise DriverError(self.split_function, f"no group of {requested_sms} SMs", NO_GROUP)
        return Split(groups[0], rest, self.uuid)

    def levels(self) -> tuple[Level, ...]:
        """Every level of the die without the whole, from splits that make no context.

        Raises:
            DriverError: a call failed, a split does not cover the device, or the device refuses
                every split although two minimal partitions fit.
        """
        refusal: DriverError | None = None

        def grant(requested_sms: int) -> Level | None:
            nonlocal refusal
            try:
                return self.split(requested_sms).level
            except DriverError as error:
                if error.code not in _NO_SUCH_SPLIT:
                    raise
                # The first request is the smallest, which every die should grant.
                refusal = refusal or error
                return None

        try:
            levels = existing(self.die, grant)
        except ValueError as error:
            raise DriverError(self.split_function, str(error)) from error
        if not levels and requests(self.die):
            # A call that this driver finds malformed must not pass for a die without levels.
            raise refusal or DriverError(self.split_function, f"no level on {self.die}")
        return levels


def levels_here(backend: str) -> tuple[Die, tuple[Level, ...]]:
    """The die of this machine and all its levels: CPU cores for ``cores``, else its first GPU.

    Raises:
        DriverError: it needs a GPU, and there is none, or none with green contexts.
    """
    if backend == "cores":
        die = Die(len(os.sched_getaffinity(0)), 1, 1)
        return die, existing(die, aligned(die))
    device = Device()
    return device.die, device.levels()
