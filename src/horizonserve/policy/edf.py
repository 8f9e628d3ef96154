"""Earliest first-response deadline first."""

from __future__ import annotations

from collections import deque
from typing import Final

from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting

#: One opening in so many goes to a request whose deadline has passed, so that none starves.
LOST_TURN: Final = 11


def earliest_deadline_first(waiting: Waiting, limit: int) -> list[Ticket]:
    """The first ``limit`` waiting groups by deadline."""
    return waiting.everything().first(limit)


class LostLast:
    """The same, but for those whose deadline has passed: they are late whatever is done, and go
    behind those whose promise can be kept, all but one in ``LOST_TURN``."""

    def __init__(self) -> None:
        #: How many entered since the last of them.
        self._since_lost = 0

    def order(self, waiting: Waiting, limit: int, time_s: float) -> list[Ticket]:
        """The first ``limit`` waiting groups, for a first token at that time at the earliest."""
        ahead, passed = waiting.at(time_s)
        kept, lost = deque(ahead.first(limit)), deque(passed.first(limit))
        order: list[Ticket] = []
        since = self._since_lost
        while (kept or lost) and len(order) < limit:
            turn = bool(lost) and (not kept or since >= LOST_TURN - 1)
            order.append((lost if turn else kept).popleft())
            since = 0 if turn else since + 1
        return order

    def entered(self, ticket: Ticket, time_s: float) -> None:
        """A group entered, for a first token at that time at the earliest."""
        self._since_lost = 0 if ticket.deadline_s < time_s else self._since_lost + 1
