"""Deadlines and slack of requests that wait for their first step (HorizonServe 4.2).

For a request with deadline d and estimated remaining time r, the slack ratio at time t is
u(t) = (d - t) / r. It is *protected* iff u(t) < u_guard and *lost* once t > d.
"""

from __future__ import annotations

from dataclasses import dataclass

from horizonserve.slo import Path, RequestClass


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """What the policy knows of one request group: a request and its CFG companions.

    Times are seconds on the monotonic clock. A group is scheduled, hidden and counted as one.
    """

    group: str
    request_class: RequestClass
    path: Path
    arrival_s: float
    deadline_s: float
    estimate_s: float

    def slack_ratio(self, now_s: float) -> float:
        """u(t); negative once the deadline has passed."""
        return (self.deadline_s - now_s) / self.estimate_s

    def protect_at_s(self, u_guard: float) -> float:
        """The time at which the slack ratio falls below the guard."""
        return self.deadline_s - u_guard * self.estimate_s
