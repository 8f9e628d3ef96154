"""What right estimates are worth: `horizon` with those of a profile against constants per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from horizonserve.bench.compare import Arm
from horizonserve.bench.metrics import Promise
from horizonserve.bench.study import Study, StudyConfig, runs_guess_s
from horizonserve.bench.summary import Ratio, ratios

LEARNED: Final = "learned"
CONSTANT: Final = "constant"
_FREE: Final = {"scheduler": "horizon", "slots": None, "token_budget": None}
ARMS: Final = tuple(Arm(name, {**_FREE, "estimates": name}) for name in (LEARNED, CONSTANT))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateConfig(StudyConfig):
    """Everything that decides the study's figures."""

    slots: tuple[int, ...] = ()
    token_budgets: tuple[int, ...] = ()
    #: The demo's load, and one at which not every promise can be kept.
    loads: tuple[float, ...] = (1.3, 2.2)
    pick_load: float = 1.0
    duration_s: float = 90.0

    @property
    def guess_s(self) -> float:
        """How long the study may take on the server; for the display only."""
        runs = len(ARMS) * len(self.loads) * len(self.seeds)
        return self.effort.guess_s + runs_guess_s(runs, self.duration_s)


class EstimateStudy(Study):
    """Plays it."""

    config: EstimateConfig

    async def play_parts(self) -> None:
        """Both arms on the demo's mix, seed by seed."""
        c = self.config
        await self.play_by_seed(
            [
                self.experiment(f"load-{load:g}x", load, c.duration_s, c.seeds, ARMS)
                for load in c.loads
            ]
        )

    def ratios(self, name: str) -> list[Ratio]:
        """Learned over constant."""
        runs = self.runs[name]
        found = [ratios(runs, LEARNED, CONSTANT, which) for which in (Promise.FIRST, Promise.BOTH)]
        return [one for one in found if one]
