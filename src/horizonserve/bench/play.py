"""Play a trace: open loop, bounded in count and time, with one rule for the end.

Every request is sent at its scheduled time, whatever happened to those before it. After the last
arrival the run goes on until everything is decided, at most ``drain_s``: a request is decided
when it ended or its deadline passed. Then what is still open is cut off by hanging up. metrics.py
says how each counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from horizonserve.bench.client import body, send
from horizonserve.bench.result import Result
from horizonserve.bench.server import Server
from horizonserve.slo import RequestClass
from horizonserve.workload import Item, Trace

#: Told how many requests were sent and how many ended.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a run may take at most."""

    drain_s: float = 60.0
    #: A single request, from its scheduled arrival; what takes longer counts as missed.
    request_limit_s: float = 300.0
    requests: int = 20_000


class Send(Protocol):
    """Sends one item; a seam for tests. Cancelled, it returns a result with ``CUT``."""

    def __call__(self, item: Item, index: int, scheduled_s: float) -> Coroutine[Any, Any, Result]:
        """Follow one request to its end."""


def http_send(session: aiohttp.ClientSession, server: Server, trace: Trace, bounds: Bounds) -> Send:
    """Sends over HTTP; makes all bodies now, because media take long to make."""
    bodies = [body(item) for item in trace.items]

    def one(item: Item, index: int, scheduled_s: float) -> Coroutine[Any, Any, Result]:
        return send(
            session,
            server,
            item,
            index=index,
            scheduled_s=scheduled_s,
            limit_s=bounds.request_limit_s,
            payload=bodies[index],
        )

    return one


async def play(
    trace: Trace,
    send_one: Send,
    slo_s: Mapping[RequestClass, float],
    *,
    bounds: Bounds,
    on_result: Callable[[Result], None],
    progress: Progress = lambda _sent, _ended: None,
) -> None:
    """Play a trace and hand out each result as it comes, cut-off ones last.

    Raises:
        ValueError: the trace has more requests than ``bounds`` allows.
    """
    if len(trace.items) > bounds.requests:
        raise ValueError(f"trace: {len(trace.items)} requests, at most {bounds.requests}")
    run = _Run(slo_s, on_result, progress)
    start_s = time.monotonic()
    try:
        for index, item in enumerate(trace.items):
            await _sleep_until(start_s + item.at_s)
            run.start(send_one(item, index, start_s + item.at_s), item, start_s + item.at_s)
        await _sleep_until(start_s + trace.duration_s)
        until_s = start_s + trace.duration_s + bounds.drain_s
        while run.undecided(time.monotonic()) and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
    finally:
        await run.cut()


async def _sleep_until(at_s: float) -> None:
    # Yield even when late, so that a burst does not starve the answers that arrive.
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


class _Run:
    def __init__(
        self,
        slo_s: Mapping[RequestClass, float],
        on_result: Callable[[Result], None],
        progress: Progress,
    ) -> None:
        self._slo_s, self._on_result, self._progress = slo_s, on_result, progress
        self._deadline_s: dict[asyncio.Task[Result], float] = {}
        self._sent = self._ended = 0
        self._broken: BaseException | None = None

    def start(self, coroutine: Coroutine[Any, Any, Result], item: Item, scheduled_s: float) -> None:
        task = asyncio.create_task(coroutine)
        self._deadline_s[task] = scheduled_s + self._slo_s[item.request_class]
        task.add_done_callback(self._done)
        self._sent += 1
        self._progress(self._sent, self._ended)

    def _done(self, task: asyncio.Task[Result]) -> None:
        del self._deadline_s[task]
        self._ended += 1
        if not task.cancelled():
            try:
                self._on_result(task.result())
            except Exception as error:
                # A callback cannot raise; a result that is not recorded must not go unnoticed.
                self._broken = error
        self._progress(self._sent, self._ended)

    def undecided(self, now_s: float) -> bool:
        """Whether an open request has its deadline ahead."""
        if self._broken:
            raise self._broken
        return any(deadline_s > now_s for deadline_s in self._deadline_s.values())

    async def cut(self) -> None:
        """Hang up on everything that is open, and wait until that is done."""
        open_tasks = list(self._deadline_s)
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        if self._broken:
            raise self._broken
