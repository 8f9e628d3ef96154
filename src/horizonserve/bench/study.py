"""The study behind the README's figures: two questions, on one server, resumable.

(a) the paper's setting: every policy at 4 slots, 30% audio, 1.3x saturation, several seeds;
(b) every policy at its own best slot count and token budget, which is what a careful user would
    run, at several rates. The best are found by shorter runs on a trace that is not used again:
    slots first, at the largest budget, then the budget at those slots.

Rates are multiples of the saturation rate of `default` at 4 slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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
from horizonserve.bench.summary import ALL, rows
from horizonserve.config import Settings
from horizonserve.workload import Mix

POLICIES: Final = ("default", "edf", "horizon")
#: Switches of `horizon`, one off at a time.
ABLATIONS: Final = ("rotation", "slack_guard", "long_cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """Everything that decides the study's figures."""

    mix: Mix = field(default_factory=lambda: Mix.of_audio_share(0.3))
    seeds: tuple[int, ...] = (1, 2, 3)
    parts: tuple[str, ...] = ("a", "b")
    ablations: bool = False
    paper_slots: int = 4
    paper_load: float = 1.3
    #: Long enough for a queue that grows without bound to show what it does.
    paper_duration_s: float = 240.0
    slots: tuple[int, ...] = (1, 4, 8, 16)
    token_budgets: tuple[int, ...] = (4_096, 512)
    #: At 1.3x every policy keeps nearly everything with 16 slots (the demo shows it); these loads
    #: are where the shared stage stays the bottleneck at any slot count.
    pick_load: float = 2.2
    pick_duration_s: float = 25.0
    pick_seed: int = 100
    best_loads: tuple[float, ...] = (2.2,)
    best_duration_s: float = 120.0
    best_seeds: tuple[int, ...] = (1, 2, 3)
    #: A run drains for as long as the longest target, but no longer than this.
    drain_limit_s: float = 90.0
    effort: Effort = THOROUGH
    #: No run starts that would end later; a second start goes on.
    time_limit_s: float = 5_400.0


class TimeIsUpError(RuntimeError):
    """The next run would end after the limit; what there is, is in the store."""


@dataclass(slots=True)
class Study:
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
            self.live, self.store, c.mix, self.watch, slots=c.paper_slots, effort=c.effort
        )
        if "a" in c.parts:
            arms = tuple(_arm(policy, c.paper_slots) for policy in POLICIES)
            if c.ablations:
                arms += tuple(_arm("horizon", c.paper_slots, {name: False}) for name in ABLATIONS)
            await self._play("paper", c.paper_load, c.paper_duration_s, c.seeds, arms)
        if "b" in c.parts:
            best = await self._pick()
            for load in c.best_loads:
                await self._play(
                    f"best-{load:g}x", load, c.best_duration_s, c.best_seeds, tuple(best)
                )

    async def _pick(self) -> list[Arm]:
        c = self.config
        widest = c.token_budgets[0]
        by_slots = {
            policy: [_arm(policy, slots, {"token_budget": widest}) for slots in c.slots]
            for policy in POLICIES
        }
        scores = await self._scores("pick-slots", by_slots)
        best = _best(by_slots, scores)
        # The widest budget at these slots was just played, on the same trace.
        narrower = {
            policy: [
                _arm(policy, int(best[policy].changes["slots"]), {"token_budget": budget})
                for budget in c.token_budgets[1:]
            ]
            for policy in POLICIES
        }
        scores |= await self._scores("pick-budget", narrower)
        candidates = {policy: [best[policy], *narrower[policy]] for policy in POLICIES}
        return list(_best(candidates, scores).values())

    async def _scores(self, name: str, arms: dict[str, list[Arm]]) -> dict[str, float]:
        c = self.config
        every = [arm for of_policy in arms.values() for arm in of_policy]
        if not every:
            return {}
        runs = await self._play(name, c.pick_load, c.pick_duration_s, (c.pick_seed,), every)
        return {row.arm: row.attainment or 0.0 for row in rows(runs) if row.request_class == ALL}

    async def _play(
        self,
        name: str,
        load: float,
        duration_s: float,
        seeds: Sequence[int],
        arms: Sequence[Arm],
    ) -> list[Run]:
        assert self.calibration is not None and self.base is not None
        experiment = Experiment(
            name=name,
            mix=self.config.mix,
            rate_rps=round(load * self.calibration.saturation.rate_rps, 3),
            duration_s=duration_s,
            seeds=tuple(seeds),
            arms=tuple(arms),
            bounds=Bounds(drain_s=self.calibration.drain_s(self.config.drain_limit_s)),
        )
        try:
            await compare(
                self.live,
                self.store,
                experiment,
                self.base,
                self.calibration.slo_ms,
                self.watch,
                before_run=self._check_time,
            )
        finally:
            # Also when the time is up in the middle: what there is can be shown.
            self.runs[name] = stored_runs(self.store, experiment)
        return self.runs[name]

    def _check_time(self, experiment: Experiment) -> None:
        if time.monotonic() + experiment.run_guess_s > self.until_s:
            raise TimeIsUpError(
                f"{self.config.time_limit_s / 60:.0f} minutes are up; start it again with the same"
                f" results directory ({self.store.directory}) to go on"
            )


def guess_s(config: StudyConfig) -> float:
    """How long the study may take on the server; for the display only."""
    count = len(POLICIES)
    total_s = config.effort.guess_s

    def runs_s(number: int, duration_s: float) -> float:
        return number * (duration_s + DRAIN_GUESS_S + SETTLE_GUESS_S)

    if "a" in config.parts:
        arms = count + (len(ABLATIONS) if config.ablations else 0)
        total_s += runs_s(arms * len(config.seeds), config.paper_duration_s)
    if "b" in config.parts:
        picks = len(config.slots) + len(config.token_budgets[1:])
        total_s += runs_s(count * picks, config.pick_duration_s)
        finals = len(config.best_loads) * len(config.best_seeds)
        total_s += runs_s(count * finals, config.best_duration_s)
    return total_s


def _best(arms: dict[str, list[Arm]], scores: dict[str, float]) -> dict[str, Arm]:
    """The arm of each policy with the highest attainment; the first of equals, which has fewer
    slots or the larger budget."""
    return {
        policy: max(of_policy, key=lambda arm: scores.get(arm.name, 0.0))
        for policy, of_policy in arms.items()
    }


def _arm(policy: str, slots: int, more: dict[str, Any] | None = None) -> Arm:
    more = more or {}
    words = [f"{slots}s"]
    for name, value in more.items():
        words.append(f"no-{name}" if value is False else f"{value}t")
    return Arm("-".join([policy, *words]), {"scheduler": policy, "slots": slots, **more})
