"""Contention for cores, as a stand-in for memory pressure where there is no GPU.

A proxy: nothing here measures memory bandwidth. /proc has no figure for that; memory stalls
(/proc/pressure/memory) count waiting for pages, which a server that fits into RAM never does. What
co-running stages do feel of each other on a CPU is that work waits for a core. So the value is the
share of time in which some task that could run had to wait for one:

- from the container's own cgroup, or else from the whole machine (pressure stall information);
- where the kernel has neither, the share of runnable tasks that are without a core, from a count
  at one instant.

All are of the container or the machine, as NVML's figure is of the whole device, and not of one
stage: which stage waits depends on the caps, and the caps depend on this value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from horizonserve.spatial.pressure import Sample, SourceError

#: Time one sample covers, as short as NVML's shortest.
SAMPLE_S: Final = 1 / 6

_STALLS: Final = ("sys/fs/cgroup/cpu.pressure", "proc/pressure/cpu")


class CpuProxy:
    """The share of time in which runnable work waited for a core; see above."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        """``root`` is where /proc and /sys are; ``clock`` counts seconds."""
        self._root = root
        self._clock = clock
        self._file: Path | None = None
        self._before = (0.0, 0.0)  # clock and total stall at the last sample, s

    @property
    def name(self) -> str:
        return "CPU proxy (share of time in which work waits for a core; not memory bandwidth)"

    def sample(self) -> list[Sample]:
        """One sample per ``SAMPLE_S``. Raises SourceError when /proc tells nothing."""
        if self._file is None:
            self._open()
            return []
        now_s = self._clock()
        took_s = now_s - self._before[0]
        if took_s < SAMPLE_S:
            return []
        if self._file.name == "stat":
            stall_s, value = 0.0, _share_without_core(self._file)
        else:
            stall_s = _total_stall_s(self._file)
            value = min(1.0, max(0.0, (stall_s - self._before[1]) / took_s))
        self._before = now_s, stall_s
        return [Sample(now_s, value)]

    def close(self) -> None:
        self._file = None

    def _open(self) -> None:
        for name in _STALLS:
            file = self._root / name
            try:
                self._before = self._clock(), _total_stall_s(file)
            except SourceError:
                continue
            self._file = file
            return
        stat = self._root / "proc/stat"
        _share_without_core(stat)
        self._before, self._file = (self._clock(), 0.0), stat


def _total_stall_s(file: Path) -> float:
    """Seconds since boot in which some task waited: ``some avg10=0.00 ... total=<us>``."""
    try:
        some = file.read_text().partition("\n")[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: {error}") from error


def _share_without_core(file: Path) -> float:
    """Of the tasks that could run now, this one left out, the share that has no core."""
    try:
        lines = dict(line.partition(" ")[::2] for line in file.read_text().splitlines())
        running = int(lines["procs_running"]) - 1
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{file}: {error!r}") from error
    # The count is the machine's, not the container's, and so are the cores.
    cores = os.cpu_count() or 1
    return max(0.0, 1 - cores / running) if running > 0 else 0.0
