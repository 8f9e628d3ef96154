"""What every spatial backend offers the stage that it caps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from horizonserve.spatial.ladder import Level


class Backend(Protocol):
    """Caps the forwards of one stage process to a level of its ladder."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """What can be activated, by rising SMs of the shared stage; the last one is the whole."""
        ...

    def activate(self, level: Level) -> AbstractContextManager[None]:
        """Cap what the calling thread launches inside the context.

        What is launched after it is at the surrounding level or the next one that is activated.

        Raises:
            ValueError: the level is none of ``levels``.
        """
        ...
