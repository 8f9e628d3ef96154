"""Earliest first-response deadline first: the baseline that orders and hides nothing."""

from __future__ import annotations

from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting


def earliest_deadline_first(waiting: Waiting, limit: int) -> list[Ticket]:
    """The first ``limit`` waiting groups by deadline."""
    return waiting.everything().first(limit)
