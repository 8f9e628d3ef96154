"""Each class alone: what a first response takes when nothing else is there.

Requests of one class follow one another, each after the end of the last; the first ones warm the
server up and are left out. The target of a class is a multiple of its p95 (HorizonServe 6.1: 5x),
over the prompt lengths that the mix draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.metrics import quantile
from horizonserve.bench.result import Status
from horizonserve.slo import Output, RequestClass
from horizonserve.workload import Item, Mix, make_trace

_WARM_UP: Final = 1
_FEWEST: Final = 3
#: Enough of an answer for a TPOT; a first token does not depend on how many follow.
_TEXT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Solo:
    """First responses of a class alone on the server."""

    request_class: RequestClass
    count: int
    first_p50_s: float
    first_p95_s: float
    tpot_p50_s: float | None

    def slo_ms(self, multiple: float) -> float:
        """The target that follows."""
        return self.first_p95_s * multiple * 1_000

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "count": self.count,
            "first_p50_s": self.first_p50_s,
            "first_p95_s": self.first_p95_s,
            "tpot_p50_s": self.tpot_p50_s,
        }

    @classmethod
    def from_json(cls, name: str, plain: Mapping[str, Any]) -> Solo:
        """The figures of ``to_json``."""
        return cls(RequestClass(name), **plain)


def items_of(mix: Mix, request_class: RequestClass, count: int, seed: int) -> list[Item]:
    """The first requests of that class that the mix would draw."""
    trace = make_trace(mix.alone(request_class), 1.0, 3.0 * count + 30.0, seed)
    items = list(islice(trace.items, count))
    if request_class.output is Output.TEXT:
        return [replace(i, output_tokens=min(i.output_tokens, _TEXT_TOKENS)) for i in items]
    return items


async def measure(
    live: Live,
    mix: Mix,
    request_class: RequestClass,
    *,
    count: int,
    limit_s: float,
    seed: int = 1_000,
    progress: Callable[[str], None] = lambda _text: None,
) -> Solo:
    """Measure one class, with ``count`` requests or as many as fit into ``limit_s`` (at least 3).

    Raises:
        LiveError: a request failed; alone on the server none should.
    """
    firsts_s: list[float] = []
    tpots_s: list[float] = []
    start_s = time.monotonic()
    for index, item in enumerate(items_of(mix, request_class, count + _WARM_UP, seed)):
        if time.monotonic() - start_s > limit_s and len(firsts_s) >= _FEWEST:
            break
        result = await live.ask(item, index)
        if result.status is not Status.OK or result.first_s is None:
            raise LiveError(f"{request_class.value} alone on the server: {result.error}")
        if index >= _WARM_UP:
            firsts_s.append(result.first_s)
            tpots_s += [] if result.tpot_s is None else [result.tpot_s]
        progress(f"{request_class.value} {len(firsts_s)}/{count}")
    p50_s, p95_s = quantile(firsts_s, 0.5), quantile(firsts_s, 0.95)
    assert p50_s is not None and p95_s is not None
    return Solo(request_class, len(firsts_s), p50_s, p95_s, quantile(tpots_s, 0.5))
