"""`horizon-profile sm`: the shared stage under fixed SM caps (HorizonServe 3.3, 4.2 and Figure 4).

For every level of the ladder, round by round on one server:

    alone    TPOT of a text answer, and TTFT of short requests, while nothing else runs
    co-run   TTFT of short requests while audio requests keep the stages downstream at work

Chosen from them:

    S_cap    the smallest level whose TPOT is within ``tolerance`` of the best and whose co-run TTFT
             is within ``degradation`` of the best among those
    S_min    the smallest level whose TPOT is within ``slowest`` of the best
    B_sat    median pressure while co-running at S_cap

The best may be the whole device; what is chosen leaves the stages downstream something.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import ServerError
from horizonserve.config import Settings
from horizonserve.profile import SmLevel, SmProfile
from horizonserve.slo import RequestClass
from horizonserve.spatial.report import report
from horizonserve.workload import Item

#: Text answers that are timed, and the words of every prompt.
ANSWER_TOKENS: Final = 48
PROMPT_WORDS: Final = 32
#: Audio requests that are kept open beside the co-run measurement.
BESIDE: Final = 2
BESIDE_TOKENS: Final = 96
_START_LIMIT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmConfig:
    """Everything that decides the sweep and what is chosen from it."""

    rounds: int = 5
    #: Co-run requests per level and round.
    shorts: int = 4
    tolerance: float = 0.03
    degradation: float = 0.1
    slowest: float = 0.25
    budget_s: float = 1_800.0
    seed: int = 1


class Short(NamedTuple):
    """A short request: when it was sent since the sweep began, and what it saw."""

    at_s: float
    ttft_s: float
    co_run: bool
    pressure: float | None


@dataclass(slots=True)
class Measured:
    """What was seen at one level; times in seconds."""

    tpot_s: list[float] = field(default_factory=list)
    shorts: list[Short] = field(default_factory=list)

    @property
    def corun_ttft_s(self) -> list[float]:
        return [short.ttft_s for short in self.shorts if short.co_run]

    @property
    def corun_pressure(self) -> list[float]:
        return [s.pressure for s in self.shorts if s.co_run and s.pressure is not None]


Levels = Sequence[tuple[int, int]]


async def sweep(
    live: Live,
    levels: Levels,
    config: SmConfig,
    say: Callable[[str], None] = lambda _words: None,
) -> tuple[dict[int, Measured], str]:
    """Measure every level until all rounds are done.

    Returns what was seen, by shared SMs, and why it is not all: the budget ended, a request failed,
    nothing downstream started; empty when it is.
    """
    found = {shared: Measured() for shared, _ in levels}
    try:
        if not await _rounds(live, levels, config, say, found):
            return found, "the budget ended before all rounds"
    except (LiveError, ServerError) as error:
        return found, str(error)
    return found, ""


async def _rounds(
    live: Live,
    levels: Levels,
    config: SmConfig,
    say: Callable[[str], None],
    found: dict[int, Measured],
) -> bool:
    """Fill ``found``; whether there was time for every round."""
    began_s = time.monotonic()
    base = Settings(scheduler="horizon", lending=False)

    async def shorts(shared: int, turn: int, co_run: bool) -> None:
        for index in range(config.shorts):
            at_s = time.monotonic() - began_s
            # No prompt comes twice: a cache of prefixes would answer it.
            seed = hash((config.seed, shared, co_run, turn, index)) % 2**31
            result = await _answered(live, _item(RequestClass.T2T, 1, seed), f"at {shared} SMs")
            assert result.first_s is not None
            short = Short(at_s, result.first_s, co_run, _pressure(live))
            found[shared].shorts.append(short)

    await _timed(live, config, 0, -1)  # loads what the first request loads
    for turn in range(config.rounds):
        # Every other round backwards, so that a drift of the machine favours no level.
        for shared, _ in levels if turn % 2 == 0 else list(reversed(levels)):
            if time.monotonic() - began_s >= config.budget_s:
                return False
            say(f"round {turn + 1}/{config.rounds}, {shared} SMs")
            await live.idle()
            await live.switch(base.changed({"fixed_sms": shared}))
            found[shared].tpot_s.append(await _timed(live, config, shared, turn))
            await shorts(shared, turn, co_run=False)
            async with _downstream_at_work(live, config, turn):
                await shorts(shared, turn, co_run=True)
    return True


def choose(levels: Levels, found: dict[int, Measured], config: SmConfig, backend: str) -> SmProfile:
    """The profile of a sweep; bounds only where every level was measured."""
    rows = tuple(
        SmLevel(
            shared_sms=shared,
            downstream_sms=downstream,
            tpot_p50_ms=_ms(found[shared].tpot_s, 0.5),
            corun_ttft_p50_ms=_ms(found[shared].corun_ttft_s, 0.5),
            corun_ttft_p95_ms=_ms(found[shared].corun_ttft_s, 0.95),
            samples=len(found[shared].tpot_s),
        )
        for shared, downstream in levels
    )
    cap_sms = s_cap(rows, config.tolerance, config.degradation)
    at_cap = found[cap_sms].corun_pressure if cap_sms is not None else []
    b_sat = float(np.median(at_cap)) if at_cap else None
    return SmProfile.model_validate(
        {
            "backend": backend,
            "levels": rows,
            "s_min_sms": s_min(rows, config.slowest),
            "s_cap_sms": cap_sms,
            "b_sat": b_sat or None,
        }
    )


def s_cap(rows: Sequence[SmLevel], tolerance: float, degradation: float) -> int | None:
    """S_cap; None where a level was not measured, or none that leaves something is good enough."""
    tpots_ms = [row.tpot_p50_ms for row in rows]
    ttfts_ms = [row.corun_ttft_p50_ms for row in rows]
    if None in tpots_ms or None in ttfts_ms:
        return None
    best_ms = min(ms for ms in tpots_ms if ms is not None)
    near = [r for r in _shares(rows) if (r.tpot_p50_ms or 0.0) <= (1 + tolerance) * best_ms]
    if not near:
        return None
    least_ms = min(row.corun_ttft_p50_ms or 0.0 for row in near)
    whole = [r for r in near if (r.corun_ttft_p50_ms or 0.0) <= (1 + degradation) * least_ms]
    return min(row.shared_sms for row in whole)


def s_min(rows: Sequence[SmLevel], slowest: float) -> int | None:
    """S_min; None where a level was not measured, or none that leaves something is good enough."""
    tpots_ms = [row.tpot_p50_ms for row in rows]
    if None in tpots_ms:
        return None
    best_ms = min(ms for ms in tpots_ms if ms is not None)
    fast = [r for r in _shares(rows) if (r.tpot_p50_ms or 0.0) <= (1 + slowest) * best_ms]
    return min((row.shared_sms for row in fast), default=None)


def _shares(rows: Sequence[SmLevel]) -> list[SmLevel]:
    return [row for row in rows if row.downstream_sms]


async def _timed(live: Live, config: SmConfig, shared: int, turn: int) -> float:
    """TPOT of a text answer alone."""
    item = _item(RequestClass.T2T, ANSWER_TOKENS, hash((config.seed, shared, turn)) % 2**31)
    result = await _answered(live, item, "alone on the server")
    if result.tpot_s is None:
        raise LiveError(f"a text answer of {result.tokens} tokens has no time per token")
    return result.tpot_s


async def _answered(live: Live, item: Item, where: str) -> Result:
    """A text answer.

    Raises:
        LiveError: there was none.
    """
    result = (await live.ask(item)).not_cut()
    if result.status is not Status.OK:
        raise LiveError(f"a text request {where}: {result.error or result.status.value}")
    return result


@contextlib.asynccontextmanager
async def _downstream_at_work(live: Live, config: SmConfig, turn: int) -> AsyncIterator[None]:
    """Keep audio requests open; entered once one of them has answered."""
    started = asyncio.Event()
    failed: list[str] = []

    async def keep_asking(number: int) -> None:
        for index in range(1_000):
            item = _item(RequestClass.T2A, BESIDE_TOKENS, config.seed + 97 * turn + 7 * number)
            result: Result = await live.ask(item, index)
            if result.status is not Status.OK:
                failed.append(result.error)
            started.set()
            if failed:
                return

    def check() -> None:
        if failed:
            raise LiveError(f"an audio request beside the others: {failed[0]}")

    tasks = [asyncio.create_task(keep_asking(number)) for number in range(BESIDE)]
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            await started.wait()
        check()
        yield
        check()
    except TimeoutError as error:
        raise LiveError(f"no audio within {_START_LIMIT_S:.0f} s") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _item(request_class: RequestClass, tokens: int, seed: int) -> Item:
    return Item(0.0, request_class, PROMPT_WORDS, tokens, seed)


def _pressure(live: Live) -> float | None:
    found = live.record()
    pressure = report(found.identity["spatial"], found.settings).get("pressure")
    return None if pressure is None else float(pressure)


def _ms(values_s: Sequence[float], q: float) -> float | None:
    return float(np.quantile(values_s, q)) * 1e3 if values_s else None
