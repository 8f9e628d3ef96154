"""Each class alone on a server: one request at a time, every size in turn.

Round after round, so that a sweep that is cut short has something of every size, and a machine that
becomes slower meanwhile does so for all of them. The first round of every start does not count: it
loads what each size needs, and tells what the pipeline takes. A class is done when every size has
enough samples and the interval of its p95 is narrow enough, at one of few looks. Text classes go on
as long as any other does: they cost next to nothing beside it, and have seen the same machine then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from horizonserve.bench.result import Result, Status
from horizonserve.profiling.fit import looks, relative_width
from horizonserve.profiling.plan import Cell
from horizonserve.profiling.samples import Sample, Samples
from horizonserve.slo import Output, RequestClass

#: A class whose requests fail so often, one after another, is given up.
GIVE_UP: Final = 3
_ANSWER_NEEDS: Final = "the stream ended without"
#: vLLM's words for a model without that kind of input; some pipelines send them as a 500.
_NONE_OF_IT: Final = "At most 0 "


class Ask(Protocol):
    """Sends one request to an idle server and waits for its end."""

    async def __call__(self, cell: Cell, seed: int) -> Result:
        """Raises ServerGoneError when there is no server any more."""
        ...


class ServerGoneError(RuntimeError):
    """The server does not answer any more; the samples so far are kept."""


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop."""

    until_s: float
    #: Half the width of a p95's interval, as a share of it.
    precision: float = 0.25
    seed: int = 1


@dataclass(slots=True)
class Sweep:
    """A sweep over the sizes of a plan."""

    plan: Sequence[Cell]
    samples: Samples
    ask: Ask
    effort: Effort
    say: Callable[[str], None] = lambda _words: None
    #: Class that the pipeline has but that could not be measured -> why.
    failed: dict[RequestClass, str] = field(default_factory=dict)

    async def run(self) -> bool:
        """Measure until all is done, or time is up; whether it was all.

        Raises:
            ServerGoneError: the server died.
        """
        if not await self._round(-1, self._classes()):
            return False
        turn = 0
        while left := {name for name in self._classes() if not self.done(name)}:
            left |= {name for name in self._classes() if name.output is Output.TEXT}
            if not await self._round(turn, left):
                return False
            turn += 1
        return True

    def done(self, request_class: RequestClass) -> bool:
        """Whether the class needs no more samples."""
        each = [self.samples.of(index) for index in self._indices(request_class)]
        return any(
            relative_width([s for found in each for s in found[:look]]) <= self.effort.precision
            for look in looks(min(map(len, each), default=0))
        )

    async def _round(self, turn: int, classes: Collection[RequestClass]) -> bool:
        """Each size once; whether there was time for it."""
        for index, cell in enumerate(self.plan):
            if cell.request_class not in classes or self._has(index, turn):
                continue
            if cell.request_class in self.failed:
                continue
            if self._time_is_up():
                return False
            await self._measure(index, cell, turn)
        return True

    def _classes(self) -> list[RequestClass]:
        """Those that the server takes, in the order of the plan."""
        named = dict.fromkeys(cell.request_class for cell in self.plan)
        return [name for name in named if name not in self.failed and self._indices(name)]

    def _indices(self, request_class: RequestClass) -> list[int]:
        return [
            index
            for index, cell in enumerate(self.plan)
            if cell.request_class is request_class and index not in self.samples.refused
        ]

    def _has(self, index: int, turn: int) -> bool:
        refused = index in self.samples.refused
        return refused or any(sample.turn == turn for sample in self.samples.of(index))

    async def _measure(self, index: int, cell: Cell, turn: int) -> None:
        name = cell.request_class.value
        result = await self._ask(index, turn)
        if result is None:
            return
        if (why := _not_taken(result)) is not None:
            self.samples.refuse(index, why)
            self.say(f"{name}: {why}")
            return
        if turn < 0:
            self.say(f"{name} warm-up")
            return
        assert result.first_s is not None
        self.samples.add(Sample(index, turn, result.first_s, result.prompt_tokens, result.tpot_s))
        count = sum(len(self.samples.of(i)) for i in self._indices(cell.request_class))
        self.say(f"{name} {count} samples")

    async def _ask(self, index: int, turn: int) -> Result | None:
        """The answer, or the server's clear no; None when the class was given up."""
        cell = self.plan[index]
        seed = hash((self.effort.seed, index, turn)) % 2**31
        why = ""
        for _ in range(GIVE_UP):
            result = (await self.ask(cell, seed)).not_cut()
            if result.status is Status.OK or _not_taken(result) is not None:
                return result
            why = result.error
        self.failed[cell.request_class] = why
        self.say(f"{cell.request_class.value} given up: {why}")
        return None

    def _time_is_up(self) -> bool:
        return time.monotonic() >= self.effort.until_s


def _not_taken(result: Result) -> str | None:
    """Why the server does not take such requests at all; None for an answer and for a failure."""
    if result.status is not Status.FAILED:
        return None
    # Of the other answers, 401 or 404 speak of the server; 408, 429 and 5xx pass, or do not. A
    # text where audio was asked for is a pipeline that has none.
    refused = re.match(r"HTTP (400|413|422)\b", result.error)
    if refused or _NONE_OF_IT in result.error or result.error.startswith(_ANSWER_NEEDS):
        return result.error
    return None
