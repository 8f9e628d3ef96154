"""Two questions about slots, on one server.

(a) the paper's setting: every policy at 4 slots, 30% audio, 1.3x saturation, several seeds;
(b) every policy at its own best slot count and token budget, at several rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from horizonserve.bench.metrics import Promise
from horizonserve.bench.study import Study, StudyConfig, runs_guess_s, slots_arm
from horizonserve.bench.summary import Ratio, ratios

POLICIES: Final = ("default", "edf", "horizon")
#: Switches of `horizon`, one off at a time.
ABLATIONS: Final = ("rotation", "slack_guard", "long_cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsConfig(StudyConfig):
    """Everything that decides the study's figures."""

    slots: tuple[int, ...] = (1, 4, 8, 16)
    token_budgets: tuple[int, ...] = (4_096, 512)
    #: At 1.3x every policy keeps nearly everything with 16 slots (the demo shows it); these loads
    #: are where the shared stage stays the bottleneck at any slot count.
    pick_load: float = 2.2
    parts: tuple[str, ...] = ("a", "b")
    ablations: bool = False
    paper_load: float = 1.3
    #: Long enough for a queue that grows without bound to show what it does.
    paper_duration_s: float = 240.0
    best_loads: tuple[float, ...] = (2.2,)
    best_duration_s: float = 120.0
    best_seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def guess_s(self) -> float:
        """How long the study may take on the server; for the display only."""
        count = len(POLICIES)
        total_s = self.effort.guess_s
        if "a" in self.parts:
            arms = count + (len(ABLATIONS) if self.ablations else 0)
            total_s += runs_guess_s(arms * len(self.seeds), self.paper_duration_s)
        if "b" in self.parts:
            finals = len(self.best_loads) * len(self.best_seeds)
            total_s += self.pick_guess_s(POLICIES)
            total_s += runs_guess_s(count * finals, self.best_duration_s)
        return total_s


class SlotsStudy(Study):
    """Plays it."""

    config: SlotsConfig

    async def play_parts(self) -> None:
        """The paper's setting, then every policy at its best."""
        c = self.config
        if "a" in c.parts:
            arms = [slots_arm(policy, c.saturation_slots) for policy in POLICIES]
            if c.ablations:
                arms += [
                    slots_arm("horizon", c.saturation_slots, {name: False}) for name in ABLATIONS
                ]
            await self.play(
                self.experiment("paper", c.paper_load, c.paper_duration_s, c.seeds, arms)
            )
        if "b" in c.parts:
            best = await self.pick(POLICIES)
            for load in c.best_loads:
                await self.play(
                    self.experiment(f"best-{load:g}x", load, c.best_duration_s, c.best_seeds, best)
                )

    def ratios(self, name: str) -> list[Ratio]:
        """The first `horizon` arm over the first arm of each other policy."""
        runs = self.runs[name]
        arms = list(dict.fromkeys(run.head["arm"] for run in runs))
        of = next((arm for arm in arms if arm.startswith("horizon")), None)
        overs = [next((a for a in arms if a.startswith(p)), None) for p in ("default", "edf")]
        found = [
            ratios(runs, of, over, promise)
            for promise in (Promise.FIRST, Promise.BOTH)
            for over in overs
            if of and over
        ]
        return [one for one in found if one]
