"""The saturation rate of a mix: how many requests per second `default` can complete.

Closed loop: ``in_flight`` requests of the mix are always open, a new one for each that ended. The
backlog of every stage that limits the mix then settles, and

    saturation = completions in the window / length of the window,   after a ramp

is the rate at which the server keeps up with arrivals of this mix: an open-loop load below it is
served, one above it queues without bound. Unlike a search over open-loop rates it needs one short
run, and no threshold on a noisy ratio. Its standard error is about rate / sqrt(completions).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.result import Result, Status
from horizonserve.slo import RequestClass
from horizonserve.workload import Item, Mix, make_trace


@dataclass(frozen=True, slots=True)
class Saturation:
    """A measured saturation rate."""

    rate_rps: float
    completed: int
    window_s: float
    in_flight: int
    #: Share of each class among the completions: far from the mix, the ramp was too short.
    shares: dict[str, float]

    @property
    def standard_error_rps(self) -> float:
        return self.rate_rps / math.sqrt(max(1, self.completed))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Saturation:
        """The figures of ``to_json``."""
        return cls(**plain)


async def measure(
    live: Live,
    mix: Mix,
    *,
    in_flight: int = 16,
    ramp_s: float = 15.0,
    window_s: float = 45.0,
    seed: int = 2_000,
    progress: Callable[[str], None] = lambda _text: None,
) -> Saturation:
    """Measure under the settings that are in force.

    Raises:
        LiveError: requests fail, or none ended in the window.
    """
    done = await closed_loop(
        live.ask, mix, in_flight=in_flight, limit_s=ramp_s + window_s, seed=seed, progress=progress
    )
    in_window = [name for at_s, name in done if at_s >= ramp_s]
    if not in_window:
        raise LiveError(f"no request ended within {window_s:.0f} s; give it longer")
    return Saturation(
        rate_rps=len(in_window) / window_s,
        completed=len(in_window),
        window_s=window_s,
        in_flight=in_flight,
        shares={
            name.value: round(in_window.count(name) / len(in_window), 3) for name in mix.classes
        },
    )


async def closed_loop(
    ask: Callable[[Item, int], Awaitable[Result]],
    mix: Mix,
    *,
    in_flight: int,
    limit_s: float,
    seed: int,
    progress: Callable[[str], None],
) -> list[tuple[float, RequestClass]]:
    """Keep so many requests open for so long; when each completed, and its class."""
    # Far more than can be served: the stream must not run dry.
    items = iter(make_trace(mix, 50.0, max(60.0, limit_s), seed).items)
    start_s, done, numbers = (
        time.monotonic(),
        list[tuple[float, RequestClass]](),
        iter(range(10**9)),
    )

    async def client() -> None:
        for item in items:
            result = await ask(item, next(numbers))
            if result.status is Status.CUT:
                return
            if result.status is not Status.OK:
                raise LiveError(f"closed loop: {result.request_class.value}: {result.error}")
            done.append((time.monotonic() - start_s, item.request_class))
            progress(f"{len(done)} completed")

    clients = [asyncio.create_task(client()) for _ in range(in_flight)]
    try:
        finished, _ = await asyncio.wait(
            clients, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in finished:
            task.result()
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return done
