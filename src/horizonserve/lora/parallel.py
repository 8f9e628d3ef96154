"""A base layer and its LoRA layer at the same time, each on its side of one split (HALO 4.1).

    surrounding   record start ..............................  wait base, wait LoRA, combine
    base side     wait start, base layer, record base
    LoRA side     wait start, LoRA layer, record LoRA

The order is the same inside a graph capture, where it becomes the graph. Memory that a side has
allocated is safe to use again there: whatever that side does next waits for the surrounding
stream, which has waited for all users.

The surrounding stream may be any. One thread only may fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from horizonserve.spatial.driver import Device, DriverError, resolved
from horizonserve.spatial.green import Rung, Wraps, granted, make_rung, making
from horizonserve.spatial.ladder import Level, Side

Out = TypeVar("Out")
Shrunk = TypeVar("Shrunk")
Other = TypeVar("Other")

#: What of the LoRA layer runs beside the base layer. ``shrink``: only x A; (x A) B is added to the
#: base output after the join. These are the kernels and sums of the path without overlap, so the
#: bits are the same wherever that path gives the same bits twice.
#: ``full``: all of it, into zeros that are added after the join, which rounds once more.
Overlap = Literal["shrink", "full"]
#: SMs of the base layer and of the LoRA layer.
Pair = tuple[int, int]


class Fork(Protocol):
    """Runs two pieces of work at the same time, or as if."""

    def both(self, base: Callable[[], Out], lora: Callable[[], Other], /) -> tuple[Out, Other]:
        """What the two return; the surrounding stream waits for both, also if one raises."""
        ...


class Work(NamedTuple, Generic[Out, Shrunk]):
    """One layer with its LoRA layer, on one input; each call launches on the current stream."""

    #: The base layer's output, tokens x outputs.
    base: Callable[[], Out]
    #: x A of every slice and token.
    shrink: Callable[[], Shrunk]
    #: Adds (x A) B in place; nothing for tokens without an adapter.
    expand: Callable[[Out, Shrunk], None]
    #: As the output, all zero: a token without an adapter is not written to.
    zeros: Callable[[], Out]


def run(fork: Fork, overlap: Overlap, work: Work[Out, Shrunk]) -> Out:
    """The layer's output with its LoRA part."""
    if overlap == "shrink":
        output, shrunk = fork.both(work.base, work.shrink)
        work.expand(output, shrunk)
        return output

    def lora() -> Out:
        delta = work.zeros()
        work.expand(delta, work.shrink())
        return delta

    found: tuple[Any, Out] = fork.both(work.base, lora)
    output, delta = found
    output += delta
    return output


class InTurn:
    """One after the other on the current stream, for a device without streams."""

    def both(self, base: Callable[[], Out], lora: Callable[[], Other], /) -> tuple[Out, Other]:
        return base(), lora()


class Streams(Wraps, Protocol):
    """The framework that launches work; torch in a server."""

    def current(self) -> int:
        """The handle of the stream that is launched on."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Launch on ``stream`` inside the context; orders nothing."""
        ...


class GreenFork:
    """The two sides of one split."""

    def __init__(self, base: Rung, lora: Rung, streams: Streams) -> None:
        self._base, self._lora = base, lora
        self._streams = streams
        self._record = resolved("cuEventRecord")
        self._wait = resolved("cuStreamWaitEvent")

    def both(self, base: Callable[[], Out], lora: Callable[[], Other], /) -> tuple[Out, Other]:
        """See `Fork`.

        Raises:
            DriverError: ordering failed. What was forked has been joined as far as possible.
        """
        surrounding = self._streams.current()
        start = self._base.before
        forked: list[Rung] = []

        def on(side: Rung, work: Callable[[], Any]) -> Any:
            self._wait(side.handle, start, 0)
            forked.append(side)
            with self._streams.on(side.stream):
                return work()

        self._record(start, surrounding)
        try:
            found = on(self._base, base), on(self._lora, lora)
        except BaseException as error:
            # A side that is left unjoined would end the capture, and hide why.
            for second in self._join(forked, surrounding):
                error.add_note(f"joining failed too: {second}")
            raise
        if failed := self._join(forked, surrounding):
            raise failed[0]
        return found

    def _join(self, sides: Sequence[Rung], surrounding: int) -> list[DriverError]:
        """Have the surrounding stream wait for all sides; what went wrong."""
        failed = []
        for side in sides:
            try:
                self._record(side.after, side.handle)
                self._wait(surrounding, side.after, 0)
            except DriverError as error:
                failed.append(error)
        return failed


def splits(levels: Iterable[Level]) -> dict[Pair, tuple[Level, Side]]:
    """Every pair that one split grants: its level, and which side of it the base layer takes.

    The group where there is a choice: only there the SMs of a thread block cluster are together.
    """
    levels = tuple(levels)
    on_rest = {(x.downstream_sms, x.shared_sms): (x, Side.DOWNSTREAM) for x in levels}
    on_group = {(x.shared_sms, x.downstream_sms): (x, Side.SHARED) for x in levels}
    return on_rest | on_group


def forks(device: Device, pairs: Iterable[Pair], streams: Streams) -> dict[Pair, GreenFork]:
    """A fork for each different pair. They stay as long as the process, as captured graphs do.

    To be made before graphs are captured: a kernel in a graph keeps the SMs of its capture.

    Raises:
        ValueError: no split of the device grants a pair as it is.
        DriverError: a call failed, or a split is not granted twice alike. None is left then.
    """
    known = splits(device.levels())
    made = {}
    with making(device) as undo:
        for pair in dict.fromkeys(pairs):
            if pair not in known:
                near = min(known, key=lambda other: abs(other[0] - pair[0]), default=None)
                raise ValueError(
                    f"no split of this device gives {pair[0]} SMs to the base layer and {pair[1]}"
                    f" to the LoRA layer; the nearest is {near}"
                )
            level, side = known[pair]
            other = Side.DOWNSTREAM if side is Side.SHARED else Side.SHARED
            split = granted(device, level)
            made[pair] = GreenFork(
                make_rung(device, split, side, streams, undo),
                make_rung(device, split, other, streams, undo),
                streams,
            )
    return made
