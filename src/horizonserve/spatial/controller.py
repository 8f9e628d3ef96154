"""Which SM level the shared stage runs at (HorizonServe 4.4, Equation 1).

With downstream activity A, smoothed memory pressure B in [0, 1] and the ladder S_min .. S_cap:

    A = 0:  S_aggr
    A > 0:  snap(S_min + rho (S_cap - S_min)),   rho = clamp(B / B_sat, 0, 1)

More pressure gives the shared stage *more* SMs, never more than S_cap: "low memory pressure leaves
more SMs to downstream generation, while high pressure raises the shared-stage cap only up to
S_cap" (4.4). Pressure means that short requests are in danger; the harm of the full allocation is
avoided by S_cap itself. ``snap`` takes the nearest rung, the lower one on a tie.

A change of level is held back, except where that would break the bound:

- *Leaving S_aggr* (downstream has become active) is at once: S_cap is a promise.
- *Rung to rung* needs ``step`` rungs of difference and ``min_dwell_s`` since the last change.
- *Returning to S_aggr* needs ``min_dwell_s`` since downstream was last seen active. Downstream
  works in bursts; a forward of the shared stage that starts on all SMs in the gap between two of
  them runs into the next. Until then the rung stays: the cost is small, since the shared stage is
  near its best at S_cap (3.3).

So two changes may follow one another at once, the third is a dwell later: at most 2 (T / dwell + 1)
changes in T seconds. With ``min_dwell_s`` 0 this is the paper's own rule (Algorithm 1, step 3).

While the pressure is unknown the level is held. Downstream that starts meanwhile gets S_cap, the
level nearest to the one held.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite


@dataclass(frozen=True, slots=True)
class Rules:
    """What the controller is given; SM counts as the driver granted them.

    Raises:
        ValueError: the field and what would be right.
    """

    #: The ladder, ascending: the first rung is S_min, the last S_cap.
    rungs_sms: tuple[int, ...]
    #: S_aggr, above S_cap: the shared stage's SMs while no downstream stage is active.
    aggregate_sms: int
    #: B_sat: the pressure at which the shared stage gets S_cap. Depends on the source; the paper
    #: gives no figure, but saw 0.76 solo and 0.93 co-running (3.3).
    saturation: float = 0.9
    #: Delta_step: fewest rungs that are worth a change.
    step: int = 1
    #: Shortest stay (see above). NVML renews its figure every 1/6 to 1 s; 0: the paper's rule.
    min_dwell_s: float = 0.5

    def __post_init__(self) -> None:
        levels = (0, *self.rungs_sms, self.aggregate_sms)
        if not self.rungs_sms or any(low >= high for low, high in pairwise(levels)):
            raise ValueError(
                f"rungs_sms {self.rungs_sms}, aggregate_sms {self.aggregate_sms}: must be at least"
                " one rung, positive, ascending, the aggregate above the last"
            )
        if not 0 < self.saturation <= 1:
            raise ValueError(f"saturation {self.saturation}: must be above 0 and at most 1")
        if self.step < 1:
            raise ValueError(f"step {self.step}: must be at least 1 rung")
        if not (isfinite(self.min_dwell_s) and self.min_dwell_s >= 0):
            raise ValueError(f"min_dwell_s {self.min_dwell_s}: must be 0 or more seconds")


class Controller:
    """The level of the shared stage, chosen anew before each of its forwards."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        low_sms, cap_sms = rules.rungs_sms[0], rules.rungs_sms[-1]
        # The pressure at which Equation 1 is half way between two neighbouring rungs: counting
        # those below B is clamp and snap in one.
        self._edges = [
            rules.saturation * ((lower + upper) / 2 - low_sms) / (cap_sms - low_sms)
            for lower, upper in pairwise(rules.rungs_sms)
        ]
        self._rung: int | None = None  # None: the aggregate level
        self._changed_s = -inf
        self._active_s = -inf

    def level_sms(self, now_s: float, active: bool, pressure: float | None) -> int:
        """SMs of the shared stage's next forward: a rung, or the aggregate level.

        Args:
            now_s: time on any clock that does not run backwards.
            active: whether a downstream stage runs (A > 0).
            pressure: smoothed memory pressure in [0, 1]; None when it is unknown.
        """
        rules, rung = self.rules, self._rung
        if not active:
            if rung is None or now_s - self._active_s >= rules.min_dwell_s:
                self._rung = None
                return rules.aggregate_sms
            return rules.rungs_sms[rung]
        self._active_s = now_s
        if rung is None:
            rung = len(self._edges) if pressure is None else bisect_left(self._edges, pressure)
        elif pressure is None or now_s - self._changed_s < rules.min_dwell_s:
            return rules.rungs_sms[rung]
        else:
            wanted = bisect_left(self._edges, pressure)
            if -rules.step < wanted - rung < rules.step:
                return rules.rungs_sms[rung]
            rung = wanted
        self._rung, self._changed_s = rung, now_s
        return rules.rungs_sms[rung]
