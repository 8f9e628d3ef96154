"""What every study does: one server, experiments one after another, resumable, within a time limit.

A policy's best slot count and token budget, which a careful user would run, are found by short runs
on a trace that is not used again: slots first, at the largest budget, then the budget at those
slots. The best keeps most by both ways of counting, first responses and both promises, taken
together; of equals the first, which has fewer slots or the larger budget.

Rates are multiples of the saturation rate of `default` at ``saturation_slots`` slots.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horizonserve.bench.calibrate import THOROUGH, Calibration, Effort, calibrate
from horizonserve.bench.compare import (
    DRAIN_GUESS_S,
    SETTLE_GUESS_S,
    Arm,
    Experiment,
    Watch,
    compare,
    stored_runs,
)
from horizonserve.bench.live import Live
from horizonserve.bench.play import Bounds
from horizonserve.bench.store import Run, Store
from horizonserve.bench.summary import ALL, Ratio, Row, rows
from horizonserve.config import Settings
from horizonserve.workload import Mix


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(ABC):
    """What decides the figures of every study."""

    mix: Mix = field(default_factory=lambda: Mix.of_audio_share(0.3))
    seeds: tuple[int, ...] = (1, 2, 3)
    saturation_slots: int = 4
    slots: tuple[int, ...]
    token_budgets: tuple[int, ...]
    pick_load: float
    pick_duration_s: float = 25.0
    pick_seed: int = 100
    #: A run drains for as long as the longest target, but no longer than this.
    drain_limit_s: float = 90.0
    effort: Effort = THOROUGH
    #: No run starts that would end later; a second start goes on.
    time_limit_s: float = 5_400.0

    @property
    @abstractmethod
    def guess_s(self) -> float:
        """How long the study may take on the server; for the display only."""

    def pick_guess_s(self, policies: Sequence[str]) -> float:
        """How long it may take to find the best arm of each policy."""
        count = len(policies) * (len(self.slots) + len(self.token_budgets) - 1)
        return runs_guess_s(count, self.pick_duration_s)


class TimeIsUpError(RuntimeError):
    """The next run would end after the limit; what there is, is in the store."""


@dataclass(slots=True)
class Study(ABC):
    """Runs the parts of a configuration on a server."""

    config: StudyConfig
    live: Live
    store: Store
    watch: Watch
    until_s: float
    calibration: Calibration | None = None
    base: Settings | None = None
    #: Every run so far, by experiment, in order.
    runs: dict[str, list[Run]] = field(default_factory=dict)

    async def run(self) -> None:
        """All parts.

        Raises:
            TimeIsUpError: not all of them fitted.
        """
        c = self.config
        self.calibration, self.base = await calibrate(
            self.live, self.store, c.mix, self.watch, slots=c.saturation_slots, effort=c.effort
        )
        await self.play_parts()

    @abstractmethod
    async def play_parts(self) -> None:
        """Everything after the calibration."""

    @abstractmethod
    def ratios(self, name: str) -> list[Ratio]:
        """The ratios that the runs of an experiment are about."""

    async def pick(self, policies: Sequence[str]) -> list[Arm]:
        """The best arm of each policy."""
        c = self.config
        widest = c.token_budgets[0]
        by_slots = {
            policy: [slots_arm(policy, slots, {"token_budget": widest}) for slots in c.slots]
            for policy in policies
        }
        scores = await self._scores("pick-slots", by_slots)
        best = best_arms(by_slots, scores)
        # The widest budget at these slots was just played, on the same trace.
        narrower = {
            policy: [
                slots_arm(policy, int(best[policy].changes["slots"]), {"token_budget": budget})
                for budget in c.token_budgets[1:]
            ]
            for policy in policies
        }
        scores |= await self._scores("pick-budget", narrower)
        candidates = {policy: [best[policy], *narrower[policy]] for policy in policies}
        return list(best_arms(candidates, scores).values())

    async def _scores(self, name: str, arms: dict[str, list[Arm]]) -> dict[str, float]:
        c = self.config
        every = [arm for of_policy in arms.values() for arm in of_policy]
        if not every:
            return {}
        what = self.experiment(name, c.pick_load, c.pick_duration_s, (c.pick_seed,), every)
        await self.play(what)
        return {row.arm: score(row) for row in rows(self.runs[name]) if row.request_class == ALL}

    def experiment(
        self,
        name: str,
        load: float,
        duration_s: float,
        seeds: Sequence[int],
        arms: Sequence[Arm],
    ) -> Experiment:
        """Arms x seeds at ``load`` times the saturation rate."""
        assert self.calibration is not None
        return Experiment(
            name=name,
            mix=self.config.mix,
            rate_rps=round(load * self.calibration.saturation.rate_rps, 3),
            duration_s=duration_s,
            seeds=tuple(seeds),
            arms=tuple(arms),
            bounds=Bounds(drain_s=self.calibration.drain_s(self.config.drain_limit_s)),
        )

    async def play(self, experiment: Experiment, only_seed: int | None = None) -> None:
        """Play what is missing of an experiment, or of one seed of it."""
        assert self.calibration is not None and self.base is not None
        try:
            await compare(
                self.live,
                self.store,
                experiment,
                self.base,
                self.calibration.targets,
                self.watch,
                before_run=self._check_time,
                only_seed=only_seed,
            )
        finally:
            # Also when the time is up in the middle: what there is can be shown.
            self.runs[experiment.name] = stored_runs(self.store, experiment)

    async def play_by_seed(self, experiments: Sequence[Experiment]) -> None:
        """All experiments of a seed before the next one, so that what there is when the time is up
        covers all of them."""
        for seed in self.config.seeds:
            for experiment in experiments:
                await self.play(experiment, only_seed=seed)

    def _check_time(self, experiment: Experiment) -> None:
        if time.monotonic() + experiment.run_guess_s > self.until_s:
            raise TimeIsUpError(
                f"{self.config.time_limit_s / 60:.0f} minutes are up; start it again with the same"
                f" results directory ({self.store.directory}) to go on"
            )


def runs_guess_s(count: int, duration_s: float) -> float:
    """How long so many runs may take; for the display only."""
    return count * (duration_s + DRAIN_GUESS_S + SETTLE_GUESS_S)


def slots_arm(policy: str, slots: int, more: Mapping[str, Any] | None = None) -> Arm:
    """A policy at a slot count, named by what differs; `horizon` then is the literal policy."""
    more = ({"lending": False} if policy == "horizon" else {}) | dict(more or {})
    words = [f"{slots}s"]
    for name, value in more.items():
        words.append(f"no-{name}" if value is False else f"{value}t")
    return Arm("-".join([policy, *words]), {"scheduler": policy, "slots": slots, **more})


def score(row: Row) -> float:
    """What the best arm has most of."""
    return (row.both or 0.0) + (row.attainment or 0.0)


def best_arms(arms: dict[str, list[Arm]], scores: dict[str, float]) -> dict[str, Arm]:
    """The arm of each policy with the highest score, the first of equals."""
    return {
        policy: max(of_policy, key=lambda arm: scores.get(arm.name, 0.0))
        for policy, of_policy in arms.items()
    }
