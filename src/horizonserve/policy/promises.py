"""Which promises can be kept at all, and which to give up when not all can."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Promise(NamedTuple):
    """Work that has to be done by a time; sorts by that time."""

    due_s: float
    work_s: float
    #: What it belongs to; breaks ties, so it must be unique.
    owner: int


def most_kept(promises: Iterable[Promise], now_s: float, speed: float) -> list[Promise]:
    """As many of the promises as can be kept, each in its turn by due time.

    ``promises`` in the order of their due times; ``speed`` is the share of time that is left for
    work. Where they cannot all be kept, the one with the most work among those due so far is given
    up, which leaves the largest number on time (Moore 1968).
    """
    kept: list[tuple[float, int, Promise]] = []
    work_s = 0.0
    for promise in promises:
        heapq.heappush(kept, (-promise.work_s, promise.owner, promise))
        work_s += promise.work_s
        if work_s > speed * (promise.due_s - now_s):
            work_s += heapq.heappop(kept)[0]
    return [entry[2] for entry in kept]
