"""Earliest first-response deadline first: the baseline that orders and hides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from horizonserve.policy.slack import Ticket


def earliest_deadline_first(waiting: Sequence[Ticket]) -> list[Ticket]:
    """The waiting groups by deadline; equal deadlines keep their order."""
    return sorted(waiting, key=attrgetter("deadline_s"))
