"""What the record of the stages costs per step: one update and one read, 5 us each at most.

The fastest of 100 rounds of 500 calls counts: what else runs on the machine only adds.

python -m pytest benchmarks/spatial_monitor_cost.py --benchmark-columns=min,median,iqr,rounds
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from horizonserve.spatial import monitor as module
from horizonserve.spatial.monitor import Level, Monitor, Slot, State

LEVELS: Final = tuple(Level(8 * i, 132 - 8 * i, i) for i in range(2, 8))
LIMIT_S: Final = 5e-6


@pytest.fixture
def shared() -> Iterator[tuple[Monitor, Slot]]:
    """A record where it will lie: in memory."""
    record = Monitor.create()
    slot = record.claim(0, LEVELS)
    slot.publish(State(True, 1.0, 2, 2, 1, 0.5, 1.0), time.monotonic())
    yield record, slot
    record.close()
    assert not Path(module.DIRECTORY, record.path.name).exists()


def cost_s(benchmark: Any, function: Any) -> float:
    benchmark.pedantic(function, rounds=100, iterations=500, warmup_rounds=5)
    return float(benchmark.stats.stats.min)


def test_an_update(benchmark: Any, shared: tuple[Monitor, Slot]) -> None:
    publish, clock = shared[1].publish, time.monotonic

    def update() -> None:
        publish(State(True, 1.0, 2, 2, 1, 0.5, 1.0), clock())

    assert cost_s(benchmark, update) <= LIMIT_S


def test_a_read(benchmark: Any, shared: tuple[Monitor, Slot]) -> None:
    read = shared[0].read
    assert cost_s(benchmark, lambda: read(0)) <= LIMIT_S


def test_a_decision(benchmark: Any, shared: tuple[Monitor, Slot]) -> None:
    """What a downstream stage asks before each forward, with the look into /proc it now and then
    takes."""
    decision, clock = shared[0].decision, time.monotonic
    assert cost_s(benchmark, lambda: decision(LEVELS, clock())) <= LIMIT_S


def test_whether_a_stage_is_active(benchmark: Any, shared: tuple[Monitor, Slot]) -> None:
    active, clock = shared[0].active, time.monotonic
    assert cost_s(benchmark, lambda: active(0, clock(), 60.0)) <= LIMIT_S
