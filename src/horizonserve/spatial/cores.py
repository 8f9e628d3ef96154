"""CPU cores in the place of SMs: the same levels, kept by the affinity of a stage's threads.

For machines without a GPU, so that the whole loop runs and its effect is measured there. It says
nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from horizonserve.spatial.ladder import Die, Level, Side, choose, existing

_TASKS = Path("/proc/self/task")


class CoresBackend:
    """Keeps all threads of this process on its side of a level's cores.

    Threads of the math library belong to the forward as much as the one that launches it, and which
    they are is not known; so the whole process moves. It stays where it is until another level is
    activated: forwards follow one another within milliseconds, levels change a few times a second,
    and between two forwards there is little to do.
    """

    def __init__(
        self,
        side: Side,
        set_threads: Callable[[int], object],
        most_threads: int,
        s_min_cores: int | None = None,
        s_cap_cores: int | None = None,
    ) -> None:
        """Capping starts with the first activation.

        Args:
            side: whose cores of a level this process takes.
            set_threads: told how many threads a forward is to use: with more threads than cores,
                those that wait for each other spin on the core that the others need.
            most_threads: how many it uses without a cap.
            s_min_cores: least and most cores of the shared stage while it is capped.
            s_cap_cores: see above.

        Raises:
            ValueError: no level lies within these bounds; two cores are the least.
        """
        self._cores = sorted(os.sched_getaffinity(0))
        self._side = side
        self._set_threads = set_threads
        self._most_threads = most_threads
        die = Die(len(self._cores), 1, 1)
        # The same in each process that may use the same cores.
        digest = hashlib.sha256(repr(self._cores).encode()).digest()
        fingerprint = int.from_bytes(digest[:8], "little")
        found = existing(die, lambda n: Level(n, len(self._cores) - n, fingerprint))
        self.levels = choose(die, found, s_min_cores, s_cap_cores)
        self._applied = self.levels[-1]

    def activate(self, level: Level) -> AbstractContextManager[None]:
        """Use this side's cores of the level from now on.

        Raises:
            ValueError: the level is none of ``levels``.
        """
        if level is not self._applied and level != self._applied:
            if level not in self.levels:
                raise ValueError(f"{level} is not on the ladder")
            cores = self._mine(level)
            _move(cores)
            self._set_threads(min(len(cores), self._most_threads))
            self._applied = level
        return nullcontext()

    def _mine(self, level: Level) -> list[int]:
        if level.whole:
            return self._cores
        shared = level.shared_sms
        return self._cores[:shared] if self._side is Side.SHARED else self._cores[shared:]


def _move(cores: list[int]) -> None:
    # A thread that starts meanwhile may take the old cores from the one that started it.
    moved: set[int] = set()
    while left := {int(task.name) for task in _TASKS.iterdir()} - moved:
        for thread in left:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
        moved |= left
