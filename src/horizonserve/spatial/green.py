"""CUDA Green Contexts: caps one stage process to its side of each split (HorizonServe 5).

Contexts and streams are made once and live as long as the process: streams and captured graphs
die with their context. The primary context stays current; work is capped by the stream on which
it is launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from horizonserve.spatial.driver import Device, DriverError, Split, bindings, call, resolved
from horizonserve.spatial.ladder import Level, Side


class Wraps(Protocol):
    """Makes streams of a framework."""

    def wrap(self, pointer: int) -> Any:
        """A stream of the framework from a driver's handle."""
        ...


class Streams(Wraps, Protocol):
    """The framework that launches work; torch in a server."""

    def use(self, stream: Any) -> AbstractContextManager[int]:
        """Launch on ``stream`` inside the context; gives the handle of the surrounding stream."""
        ...


def conditions(mps: bool, environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """What two processes with green contexts need to run side by side, and what is wrong with it.

    Args:
        mps: whether the device says that MPS is running.
        environment: of the server's processes.
    """
    percentage = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "").strip()
    try:
        whole = float(percentage or 100) == 100
    except ValueError:
        whole = False
    partition = environment.get("CUDA_MPS_SM_PARTITION")
    return {
        "MPS runs": None
        if mps
        else "MPS is not running: two processes take turns on the GPU; start the server under"
        " `scripts/mps run`",
        "no thread percentage": None
        if whole
        else f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage} changes how many SMs a level has;"
        " unset it or give 100",
        "no SM partition": f"CUDA_MPS_SM_PARTITION={partition} already splits the device; unset it"
        if partition
        else None,
    }


def refusals(mps: bool, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Why two processes with green contexts would not run side by side; empty if they would."""
    return [wrong for wrong in conditions(mps, environment).values() if wrong is not None]


Undo = list[Callable[[], object]]


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """A green context with the SMs of one side of a split, its stream and two events."""

    context: Any
    handle: Any
    stream: Any
    #: Recorded by the surrounding stream before a forward, and by ours after it.
    before: Any
    after: Any


class GreenBackend:
    """This process's side of each level.

    Only one thread may activate; levels change between forwards.

    Raises:
        DriverError: a context could not be made as granted; those made before are gone again.
    """

    def __init__(
        self, device: Device, levels: tuple[Level, ...], side: Side, streams: Streams
    ) -> None:
        self.levels = levels
        self._streams = streams
        #: None for the whole, which runs on the surrounding stream.
        self._rungs: dict[Level, Rung | None] = {}
        # Looked up once: four of these calls go with every forward.
        self._record = resolved("cuEventRecord")
        self._wait = resolved("cuStreamWaitEvent")
        with making(device) as undo:
            for level in levels:
                self._rungs[level] = (
                    None
                    if level.whole
                    else make_rung(device, granted(device, level), side, streams, undo)
                )
        # The levels live as long as this object, so no other object has their id.
        self._by_id = {id(level): self._rungs[level] for level in levels}

    def activate(self, level: Level) -> AbstractContextManager[None]:
        """Launch on the level's stream, ordered after what came before and before what follows.

        Raises:
            ValueError: the level is none of ``levels``.
            DriverError: ordering failed; the surrounding stream is in use again.
        """
        # The same few objects come again and again, and hashing one costs more than this.
        rung = self._by_id.get(id(level))
        if rung is None:
            if level not in self._rungs:
                raise ValueError(f"{level} is not on the ladder")
            rung = self._rungs[level]
        if rung is None:
            return nullcontext()
        return _Activation(rung, self._streams.use(rung.stream), self._record, self._wait)


@contextmanager
def making(device: Device) -> Iterator[Undo]:
    """Green contexts may be made inside; what was made is gone again where that fails.

    Gives the list that gets a step for everything that was made.
    """
    undo: Undo = []
    pushed = False
    try:
        # Green contexts are made of a device whose primary context is active.
        if not int(call("cuCtxGetCurrent")):
            primary = call("cuDevicePrimaryCtxRetain", device.handle)
            undo.append(lambda: call("cuDevicePrimaryCtxRelease", device.handle))
            call("cuCtxPushCurrent", primary)
            pushed = True
            undo.append(_pop)
        yield undo
        if pushed:
            # Not twice: a second pop would take a context that is not ours.
            undo.remove(_pop)
            _pop()
    except BaseException as error:
        for step in reversed(undo):
            try:
                step()
            except DriverError as second:
                error.add_note(f"undoing it failed too: {second}")
        raise


def granted(device: Device, level: Level) -> Split:
    """The split of a level.

    Raises:
        DriverError: the call failed, or the level is not granted any more as it was.
    """
    split = device.split(level.shared_sms)
    if split.level != level:
        raise DriverError(device.split_function, f"{level} has become {split.level}")
    return split


def make_rung(device: Device, split: Split, side: Side, streams: Wraps, undo: Undo) -> Rung:
    """A context with one side of a split, inside `making`.

    Raises:
        DriverError: a call failed, or the context has other SMs than the side.
    """
    driver = bindings()
    descriptor = call("cuDevResourceGenerateDesc", [_side(split, side)], 1)
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = call("cuGreenCtxCreate", descriptor, device.handle, flag)
    undo.append(lambda: call("cuGreenCtxDestroy", context))
    sms = int(call("cuGreenCtxGetDevResource", context, device.sm_type).sm.smCount)
    wanted = split.level.shared_sms if side is Side.SHARED else split.level.downstream_sms
    if sms != wanted:
        raise DriverError("cuGreenCtxGetDevResource", f"{sms} SMs, not the {wanted} granted")
    kind = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    handle = call("cuGreenCtxStreamCreate", context, kind, 0)
    undo.append(lambda: call("cuStreamDestroy", handle))
    events = []
    for _ in range(2):
        event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        undo.append(lambda event=event: call("cuEventDestroy", event))  # type: ignore[misc]
        events.append(event)
    return Rung(context, handle, streams.wrap(int(handle)), *events)


def _pop() -> None:
    call("cuCtxPopCurrent")


def _side(split: Split, side: Side) -> Any:
    return split.group if side is Side.SHARED else split.remainder


class _Activation:
    """A class, as a generator context costs more than the driver calls."""

    __slots__ = ("_record", "_rung", "_surrounding", "_use", "_wait")

    def __init__(
        self,
        rung: Rung,
        use: AbstractContextManager[int],
        record: Callable[..., Any],
        wait: Callable[..., Any],
    ) -> None:
        self._rung = rung
        self._use = use
        self._record = record
        self._wait = wait

    def __enter__(self) -> None:
        rung = self._rung
        self._surrounding = surrounding = self._use.__enter__()
        try:
            self._record(rung.before, surrounding)
            self._wait(rung.handle, rung.before, 0)
        except BaseException as error:
            self._use.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rung = self._rung
        try:
            self._record(rung.after, rung.handle)
            self._wait(self._surrounding, rung.after, 0)
        except DriverError as second:
            if error is None:
                raise
            # The forward failed first, and that is what has to be seen.
            error.add_note(f"leaving the level failed too: {second}")
        finally:
            self._use.__exit__(kind, error, trace)
