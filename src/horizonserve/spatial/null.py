"""A backend that caps nothing and records what it was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from horizonserve.spatial.ladder import Level


class NullBackend:
    """For dry runs and machines without a GPU."""

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self.levels = levels
        #: The last levels activated, oldest first.
        self.decisions: deque[Level] = deque(maxlen=10_000)

    @contextmanager
    def activate(self, level: Level) -> Iterator[None]:
        if level not in self.levels:
            raise ValueError(f"{level} is not on the ladder")
        self.decisions.append(level)
        yield
