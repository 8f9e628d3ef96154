"""Deadlines and slack of requests that wait for their first step (HorizonServe 4.2).

For a request with deadline d and estimated remaining time r, the slack ratio at time t is
u(t) = (d - t) / r. Which requests a small slack ratio protects and which it gives up is said in
view.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from horizonserve.slo import Path, RequestClass


@dataclass(slots=True, eq=False)
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
    #: Whether a member of the group was ever admitted; from then on it is no longer held back.
    started: bool = False

    def slack_ratio(self, now_s: float) -> float:
        """u(t); negative once the deadline has passed."""
        return (self.deadline_s - now_s) / self.estimate_s
