"""How many tokens requests generate: learned from those that ended, per class."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import Final

from horizonserve.slo import RequestClass

#: Requests of a class that are remembered, and the share of them that an expectation covers.
_REMEMBERED: Final = 128
_COVERED: Final = 0.9
#: What is expected at least where none so long has ended.
_UNKNOWN_TOKENS: Final = 256


class Lengths:
    """The last lengths of each class. Clients ask for far more tokens than they get."""

    def __init__(self) -> None:
        self._last: dict[RequestClass, deque[int]] = {}
        self._sorted: dict[RequestClass, list[int]] = {}

    def ended(self, request_class: RequestClass, tokens: int) -> None:
        """Note a request that ended by itself after so many tokens."""
        last = self._last.setdefault(request_class, deque())
        ordered = self._sorted.setdefault(request_class, [])
        if len(last) == _REMEMBERED:
            ordered.remove(last.popleft())
        last.append(tokens)
        insort(ordered, tokens)

    def to_generate(self, request_class: RequestClass, generated: int, at_most: int) -> int:
        """Tokens to expect yet, from those that got so far: at least 1, at most ``at_most``."""
        ordered = self._sorted.get(request_class, [])
        shorter = bisect_right(ordered, generated)
        if shorter < len(ordered):
            total = ordered[shorter + int(_COVERED * (len(ordered) - shorter - 1))]
        else:
            # One that is longer than all is as likely as not to be twice as long.
            total = max(_UNKNOWN_TOKENS, 2 * generated)
        return max(1, min(at_most, total - generated))
