"""N:M rotation of the shared stage between the short and the long path (HorizonServe 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from horizonserve.slo import Path

M: Final = 2
N_MIN: Final = 2
N_MAX: Final = 8


@dataclass(slots=True)
class Rotation:
    """Short for N contested steps, then long for M of them.

    - N is latched when a cycle starts, so that a cycle cannot stretch while it runs and the long
      path gets at least M / (N_MAX + M) = 20% of the contested steps.
    - A step is contested, and counts, only when a slot is free and both paths have ordinary
      prefills that wait for it.
    """

    n: int = N_MIN
    position: int = 0

    def phase(self, protected_share: float) -> Path:
        """The path of this contested step.

        ``protected_share`` is the share in [0, 1] of the waiting short requests that are protected.
        """
        if self.position == 0:
            self.n = N_MIN + round(protected_share * (N_MAX - N_MIN))
        return Path.SHORT if self.position < self.n else Path.LONG

    def advance(self) -> None:
        """Count one contested step."""
        self.position = (self.position + 1) % (self.n + M)
