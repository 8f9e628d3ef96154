"""Memory pressure of a GPU, from NVML (through nvidia-ml-py, module ``pynvml``).

Three figures, each a share in [0, 1]:

- *memory utilisation, buffered*: share of the driver's sample period in which device memory was
  read or written. The driver keeps the last samples with their times, so none is counted twice.
- *memory utilisation, the last*: the same without a time, where the driver keeps no buffer.
- *DRAM bandwidth* (GPM), on Hopper and later, when asked for: bytes moved over bytes possible. A
  different quantity than utilisation, with a B_sat of its own, so it has no stand-in.

All are of the whole device: under MPS, NVML books every client on the MPS server. With MIG the
driver refuses; there is no figure then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from horizonserve.spatial.pressure import Sample, SourceError

#: A buffer that stays silent for so long is taken for none (the driver's period is 1 s at most).
QUIET_S: Final = 2.5
#: The driver's longest sample period; an unchanged untimed figure is a new sample once in it.
LONGEST_PERIOD_S: Final = 1.0
#: Between the two readings of a GPM figure; NVIDIA asks for more than 100 ms.
GPM_INTERVAL_S: Final = 0.2


class _Meter(Protocol):
    def read(self, now_s: float) -> list[Sample]: ...

    def close(self) -> None: ...


class NvmlSource:
    """One device's memory pressure; found by UUID, as CUDA_VISIBLE_DEVICES renumbers devices."""

    def __init__(
        self, uuid: str, *, gpm: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Opens nothing yet.

        Args:
            uuid: the CUDA device's, with or without the ``GPU-`` or ``MIG-`` in front.
            gpm: DRAM bandwidth instead of memory utilisation.
            clock: counts seconds.
        """
        self.uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._gpm = gpm
        self._clock = clock
        self._nvml: Any = None
        self._meter: _Meter | None = None

    @property
    def name(self) -> str:
        return f"NVML {'DRAM bandwidth' if self._gpm else 'memory utilisation'} of {self.uuid}"

    def sample(self) -> list[Sample]:
        """New samples, oldest first.

        Raises:
            SourceError: no library, no driver, no such device, device lost, not supported (MIG,
                old driver), or any other code; the message has NVML's own words.
        """
        try:
            import pynvml as nvml
        except ImportError as error:
            raise SourceError(f"nvidia-ml-py is not usable: {error}") from error
        try:
            if self._meter is None:
                nvml.nvmlInit()
                self._nvml = nvml
                device = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
                self._meter = (_Gpm if self._gpm else _Utilisation)(nvml, device, self._clock())
            return self._meter.read(self._clock())
        except nvml.NVMLError as error:
            raise SourceError(f"{error} (NVML code {error.value})") from error

    def close(self) -> None:
        meter, self._meter = self._meter, None
        nvml, self._nvml = self._nvml, None
        if meter is not None:
            meter.close()
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


class _Utilisation:
    """Memory utilisation, from the driver's buffer while it has one."""

    def __init__(self, nvml: Any, device: Any, now_s: float) -> None:
        self._nvml = nvml
        self._device = device
        self._buffered = True
        self._last_us = 0
        self._new_s = now_s
        self._percent: int | None = None
        self._no_buffer = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_NO_PERMISSION,
        )

    def read(self, now_s: float) -> list[Sample]:
        if self._buffered:
            try:
                samples = self._from_buffer()
            except self._nvml.NVMLError as error:
                if error.value not in self._no_buffer:
                    raise
            else:
                if samples:
                    self._new_s = now_s
                if now_s - self._new_s < QUIET_S:
                    return samples
            self._buffered = False
        return self._last(now_s)

    def _from_buffer(self) -> list[Sample]:
        nvml = self._nvml
        try:
            kind, found = nvml.nvmlDeviceGetSamples(
                self._device, nvml.NVML_MEMORY_UTILIZATION_SAMPLES, self._last_us
            )
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # nothing newer
                return []
            raise
        field = _FIELD_OF_KIND.get(kind)
        if field is None:
            raise SourceError(f"samples of unknown type {kind}")
        samples = []
        for entry in sorted(found, key=lambda entry: int(entry.timeStamp)):
            percent = getattr(entry.sampleValue, field)
            # Anything else than a percentage is a slot that the driver has not filled.
            if entry.timeStamp > self._last_us and 0 <= percent <= 100:
                self._last_us = entry.timeStamp
                samples.append(Sample(entry.timeStamp / 1e6, percent / 100))
        return samples

    def _last(self, now_s: float) -> list[Sample]:
        percent = self._nvml.nvmlDeviceGetUtilizationRates(self._device).memory
        if percent == self._percent and now_s - self._new_s < LONGEST_PERIOD_S:
            return []
        self._percent, self._new_s = percent, now_s
        return [Sample(now_s, min(percent, 100) / 100)]

    def close(self) -> None:
        pass


#: nvmlValueType_t: which field of the union a sample is in.
_FIELD_OF_KIND: Final = dict(
    enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"))
)


class _Gpm:
    """DRAM bandwidth between two readings of the device's counters."""

    def __init__(self, nvml: Any, device: Any, now_s: float) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            raise SourceError("GPM is not supported on this device (Hopper and later)")
        self._nvml = nvml
        self._device = device
        self._at_s = now_s
        self._readings: list[Any] = []  # the earlier one first
        self._query = nvml.c_nvmlGpmMetricsGet_t()
        self._query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = 1
        self._query.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL

    def read(self, now_s: float) -> list[Sample]:
        nvml, query = self._nvml, self._query
        if not self._readings:
            for _ in range(2):
                self._readings.append(nvml.nvmlGpmSampleAlloc())
            nvml.nvmlGpmSampleGet(self._device, self._readings[0])
            self._at_s = now_s
        if now_s - self._at_s < GPM_INTERVAL_S:
            return []
        earlier, later = self._readings
        nvml.nvmlGpmSampleGet(self._device, later)
        query.sample1, query.sample2 = earlier, later
        nvml.nvmlGpmMetricsGet(query)
        metric = query.metrics[0]
        if metric.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(metric.nvmlReturn)
        self._readings, self._at_s = [later, earlier], now_s
        if metric.value >= 0:
            return [Sample(now_s, min(metric.value / 100, 1.0))]
        return []  # not a number: the counters were reset in between

    def close(self) -> None:
        for reading in self._readings:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(reading)
        self._readings = []
