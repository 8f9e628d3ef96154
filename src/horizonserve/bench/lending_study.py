"""`horizon` without a slot count against the other policies at their best, and what each of its
rules is worth.

rates      `default` and `edf`, each at its own best slot count and token budget, and `horizon` with
           neither, at several rates: all rates of the first seed, then of the next one
ablation   at one stressed rate: `horizon`, and with each rule the other way round
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from horizonserve.bench.compare import Arm
from horizonserve.bench.metrics import Promise
from horizonserve.bench.study import Study, StudyConfig, runs_guess_s
from horizonserve.bench.summary import ALL, Ratio, ratios, rows
from horizonserve.workload import Mix

BASELINES: Final = ("default", "edf")
HORIZON: Final = "horizon"
ABLATION: Final = "ablation"
#: What the ratios are of.
COUNTED: Final = (Promise.FIRST, Promise.BOTH)


def _horizon(name: str = "", **changes: Any) -> Arm:
    # The base has the slot count of the saturation; none means up to the stage's own.
    unbounded = {"scheduler": HORIZON, "slots": None, "token_budget": None}
    return Arm(f"{HORIZON}-{name}" if name else HORIZON, {**unbounded, **changes})


#: `horizon` as it is, then with one rule the other way round, then with every rule of the paper on.
ARMS: Final = (
    _horizon(),
    _horizon("no-lending", lending=False),
    _horizon("lost-protect", lost="protect"),
    _horizon("rotation", rotation=True),
    _horizon("guard", slack_guard=True),
    _horizon("cap", long_cap=True),
    _horizon("paper-rules", rotation=True, slack_guard=True, long_cap=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingConfig(StudyConfig):
    """Everything that decides the study's figures."""

    mix: Mix = field(
        default_factory=lambda: replace(Mix.of_audio_share(0.3), long_words=(60, 2_000))
    )
    slots: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    token_budgets: tuple[int, ...] = (4_096, 2_048, 1_024, 512, 256, 128)
    #: With so many slots the stage, not their number, is what saturates.
    saturation_slots: int = 32
    #: Where slot counts differ: below, the same trace is kept whole by several.
    pick_load: float = 1.0
    pick_duration_s: float = 30.0
    ablation_load: float = 1.0
    parts: tuple[str, ...] = ("rates", ABLATION)
    loads: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    duration_s: float = 120.0

    @property
    def guess_s(self) -> float:
        """How long the study may take on the server; for the display only."""
        total_s = self.effort.guess_s
        if "rates" in self.parts:
            arms = (len(BASELINES) + 1) * len(self.loads)
            total_s += self.pick_guess_s(BASELINES)
            total_s += runs_guess_s(arms * len(self.seeds), self.duration_s)
        if ABLATION in self.parts:
            total_s += runs_guess_s(len(ARMS) * len(self.seeds), self.duration_s)
        return total_s


class LendingStudy(Study):
    """Plays it."""

    config: LendingConfig

    async def play_parts(self) -> None:
        """The rates seed by seed, then the ablation."""
        c = self.config
        if "rates" in c.parts:
            arms = [*await self.pick(BASELINES), ARMS[0]]
            experiments = [
                self.experiment(f"rate-{load:g}x", load, c.duration_s, c.seeds, arms)
                for load in c.loads
            ]
            await self.play_by_seed(experiments)
        if ABLATION in c.parts:
            await self.play(self.experiment(ABLATION, c.ablation_load, c.duration_s, c.seeds, ARMS))

    def ratios(self, name: str) -> list[Ratio]:
        """`horizon` over the best of the others; in the ablation, over its own variants."""
        runs = self.runs[name]
        others = [row for row in rows(runs) if row.request_class == ALL and row.arm != HORIZON]
        found = []
        for promise in COUNTED:
            kept = {
                row.arm: (row.attainment if promise is Promise.FIRST else row.both) or 0.0
                for row in others
            }
            overs = list(kept) if name == ABLATION else sorted(kept, key=lambda a: -kept[a])[:1]
            found += [ratios(runs, HORIZON, over, promise) for over in overs]
        return [one for one in found if one]
