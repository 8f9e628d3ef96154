"""What else the machine did: a figure measured beside a busy neighbour should say so."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizonserve.process import stat_fields


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    busy_s: float
    own_s: dict[int, float]


@dataclass(slots=True)
class Neighbours:
    """Cores kept busy by processes that are neither the server nor the harness."""

    owns: Callable[[int], bool]
    _start: _Reading | None = None

    def start(self) -> None:
        """Count from now on."""
        self._start = self._read()

    def cores(self) -> float | None:
        """Cores used by others since ``start``; None where the kernel does not tell."""
        start, now = self._start, self._read()
        if start is None or now is None or now.at_s <= start.at_s:
            return None
        own_s = sum(used_s - start.own_s.get(pid, 0.0) for pid, used_s in now.own_s.items())
        return max(0.0, (now.busy_s - start.busy_s - own_s) / (now.at_s - start.at_s))

    def _read(self) -> _Reading | None:
        ticks = os.sysconf("SC_CLK_TCK")
        own_s: dict[int, float] = {}
        try:
            cpu = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal; steal is a neighbour too.
        busy = sum(int(cpu[index]) for index in (0, 1, 2, 5, 6, 7))
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if pid == os.getpid() or self.owns(pid):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    fields = stat_fields(pid)
                    own_s[pid] = (int(fields[11]) + int(fields[12])) / ticks
        return _Reading(time.monotonic(), busy / ticks, own_s)
