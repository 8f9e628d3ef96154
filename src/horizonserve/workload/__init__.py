"""Seeded request traces, without any engine.

Pure Python and numpy: no engine, clock or file access. A trace is data, so that every policy can
be played the very same one.
"""

from __future__ import annotations

from horizonserve.workload.mix import Mix
from horizonserve.workload.trace import Item, Trace, make_trace

__all__ = ["Item", "Mix", "Trace", "make_trace"]
