"""Deadlines and slack of a request, from its arrival to its last token.

Before its first step a request is judged by its slack ratio u(t) = (d - t) / r, for deadline d and
estimated remaining time r (HorizonServe 4.2); view.py says whom that protects and whom it gives up.

Afterwards all requests of the shared stage are compared by one quantity, the time by which their
next piece of work must be done (*due*); slack is due - now:

- a short request before its first token: its first-response deadline;
- a short request that streams: the release time of its next token. R_1 = max(G_1, d) and
  R_k = max(G_k, R_(k-1) + TBT) for tokens generated at G_k (HALO 5.3): a token in advance of its
  release is time in the bank;
- a long request: what its first-response deadline leaves when the stages downstream and the rest
  of its tokens have had theirs.

A request whose promise is broken is never due. It is served with what the others leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

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
    #: Promised time between tokens; infinite where none is.
    tbt_s: float = inf
    #: Whose request it is, where services share a server (HALO).
    service: str = ""
    prompt_tokens: int = 0
    #: Whether R_1 = G_1: its first token is not held until the deadline.
    asap: bool = False
    #: Whether a member of the group was ever admitted; from then on it is no longer held back.
    started: bool = False
    #: When that was; None where the stock policy let it in.
    entered_s: float | None = None
    #: Release time of the last generated token, R_g; None before the first.
    released_s: float | None = None
    #: When it last took part in a step.
    served_s: float = -inf
    #: Whether one of its promises can no longer be kept.
    broken: bool = False

    def slack_ratio(self, now_s: float) -> float:
        """u(t); negative once the deadline has passed."""
        return (self.deadline_s - now_s) / self.estimate_s

    def renew(self, now_s: float) -> None:
        """Promise again what was promised at first: a session goes on with its next input."""
        self.deadline_s += now_s - self.arrival_s
        self.arrival_s = now_s
        self.released_s, self.broken = None, False
        self.entered_s = None  # its next answer does not begin with its first step

    def token(self, now_s: float, count: int = 1) -> None:
        """Note tokens that were generated now."""
        self.served_s = now_s
        if self.path is Path.LONG:
            return
        # As due_s(), without a call: this is done for every token that the server generates.
        for _ in range(count):
            released_s = self.released_s
            due_s = self.deadline_s if released_s is None else released_s + self.tbt_s
            if now_s > due_s:
                self.broken = True
                due_s = now_s
            self.released_s = now_s if released_s is None and self.asap else due_s

    def due_s(self, in_flight: int = 0) -> float:
        """When the next token of a short request must be there.

        ``in_flight``: tokens that steps under way will generate before it.
        """
        if self.released_s is None:
            return self.deadline_s + (in_flight * self.tbt_s if in_flight else 0.0)
        return self.released_s + (1 + in_flight) * self.tbt_s
