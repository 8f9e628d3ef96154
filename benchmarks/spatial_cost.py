"""What spatial control costs a step of the shared stage: choosing a level, reading the pressure.

    python -m pytest benchmarks/spatial_cost.py --benchmark-columns=median,iqr,rounds

Both are done before each forward; the goal for each is 1 us at the median.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from horizonserve.config import Settings
from horizonserve.spatial.controller import Controller, Rules
from horizonserve.spatial.ladder import Level
from horizonserve.spatial.monitor import VARIABLE, Monitor
from horizonserve.spatial.pressure import Sample, Sampler
from horizonserve.spatial.stage import DownstreamStage, SharedStage

GOAL_S = 1e-6
RULES = Rules((16, 32, 48, 64, 80), aggregate_sms=132)


@pytest.mark.parametrize("dwell_s", [0.5, 0.0], ids=["dwell", "paper"])
@pytest.mark.parametrize(
    ("active", "pressure"),
    [(False, 0.8), (True, 0.8), (True, None)],
    ids=["idle", "busy", "unknown"],
)
def test_choosing_a_level(
    benchmark: Any, active: bool, pressure: float | None, dwell_s: float
) -> None:
    controller = Controller(replace(RULES, min_dwell_s=dwell_s))
    controller.level_sms(0.0, active, pressure)
    benchmark(controller.level_sms, 5.0, active, pressure)  # every dwell has passed
    assert benchmark.stats.stats.median <= GOAL_S


def test_changing_the_level_with_every_call(benchmark: Any) -> None:
    """Onto the ladder, up, and off it; the time includes taking the next step of the tale."""
    controller = Controller(replace(RULES, min_dwell_s=0.0))
    steps = cycle([(0.0, True, 0.1), (0.0, True, 0.9), (0.0, False, 0.5)])
    benchmark(lambda: controller.level_sms(*next(steps)))
    assert benchmark.stats.stats.median <= GOAL_S


class Steady:
    """A source that counts how often it is asked."""

    name = "steady"

    def __init__(self) -> None:
        self.looks = 0

    def sample(self) -> list[Sample]:
        self.looks += 1
        return [Sample(0.0, 0.5)]

    def close(self) -> None:
        pass


def test_reading_the_pressure(benchmark: Any) -> None:
    """With the clock that the step has read anyway; the source is not touched."""
    source = Steady()
    sampler = Sampler(source)
    sampler.look()
    now_s = time.monotonic()
    assert benchmark(sampler.pressure, now_s) == 0.5
    assert source.looks == 1
    assert benchmark.stats.stats.median <= GOAL_S


def test_reading_an_unknown_pressure(benchmark: Any) -> None:
    sampler = Sampler(Steady())
    assert benchmark(sampler.pressure, time.monotonic()) is None
    assert benchmark.stats.stats.median <= GOAL_S


class Uncapped:
    """A backend that costs nothing."""

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self.levels = levels

    def activate(self, level: Level) -> AbstractContextManager[None]:
        return nullcontext()


def test_all_that_a_forward_of_the_shared_stage_carries(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressure, activity of two downstream stages, level, both updates; without the cap itself."""
    monkeypatch.delenv(VARIABLE, raising=False)
    record = Monitor.create()
    sampler = Sampler(Steady())
    sampler.look()
    levels = tuple(Level(sms, 132 - sms, sms) for sms in (*RULES.rungs_sms, 132))
    settings = Settings(scheduler="horizon")
    shared = SharedStage(Uncapped(levels), Monitor.attach(), sampler.pressure, settings)
    for index in (1, 2):
        with DownstreamStage(index, Uncapped(levels), Monitor.attach()).forward():
            pass

    def forward() -> None:
        with shared.forward():
            pass

    benchmark.pedantic(forward, rounds=100, iterations=500, warmup_rounds=5)
    shared.close()
    record.close()
    # The two updates and two reads of the record at 5 us each, and the choice at 1 us.
    assert benchmark.stats.stats.min <= 21e-6
