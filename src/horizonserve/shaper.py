"""When generated tokens leave for the client: paced to what was promised (HALO 5.3).

    strict    R_1 = max(G_1, A + TTFT)    the first token no earlier than promised
    asap      R_1 = G_1
              R_k = max(G_k, R_(k-1) + TBT)

for tokens generated at G_k. A piece of several tokens leaves at the release of its first and takes
the time of all: text cannot be cut, and nothing may be late. At the end of an answer the rest
leaves at once (``flush``) or as promised (``pace``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf


class First(StrEnum):
    """When the first token leaves."""

    STRICT = "strict"
    ASAP = "asap"


class Finish(StrEnum):
    """What happens to tokens that are held when the answer is complete."""

    FLUSH = "flush"
    PACE = "pace"


@dataclass(frozen=True, slots=True)
class Pace:
    """What a stream was promised; times on one clock."""

    #: A + TTFT.
    deadline_s: float
    tbt_s: float
    first: First = First.STRICT
    finish: Finish = Finish.FLUSH


class Releases:
    """The release times of one stream's pieces."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        #: Earliest release of the next piece.
        self._next_s = pace.deadline_s if pace.first is First.STRICT else -inf

    def release_s(self, now_s: float, tokens: int, finished: bool) -> float:
        """When a piece of so many tokens that was generated now is to leave.

        ``finished``: the answer ends with it.
        """
        if finished and self.pace.finish is Finish.FLUSH:
            return now_s
        release_s = max(now_s, self._next_s)
        self._next_s = release_s + tokens * self.pace.tbt_s
        return release_s
