"""Playing a trace: open loop, bounded, and one rule for the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from horizonserve.bench.play import Bounds, play
from horizonserve.bench.result import Result, Status
from horizonserve.slo import RequestClass
from horizonserve.workload import Item, Mix, Trace, make_trace

SLO_S = dict.fromkeys(RequestClass, 0.2)


def trace(*at_s: float, duration_s: float = 0.3) -> Trace:
    items = tuple(Item(at, RequestClass.T2T, 5, 3, 1) for at in at_s)
    return Trace(items, 1.0, duration_s, 0)


class Fake:
    """Answers after so many seconds, or never."""

    def __init__(self, *takes_s: float) -> None:
        self.takes_s, self.sent_at_s = takes_s, dict[int, float]()

    async def __call__(self, item: Item, index: int, scheduled_s: float) -> Result:
        self.sent_at_s[index] = time.monotonic()
        status, first_s = Status.OK, None
        try:
            await asyncio.sleep(self.takes_s[index % len(self.takes_s)])
            first_s = time.monotonic() - scheduled_s
        except asyncio.CancelledError:
            status = Status.CUT
        end_s = time.monotonic() - scheduled_s
        return Result(index, item.request_class, item.at_s, status, first_s, end_s)


def run(what: Trace, fake: Fake, **bounds: float) -> tuple[list[Result], float]:
    results: list[Result] = []
    start_s = time.monotonic()
    limits = Bounds(**bounds)  # type: ignore[arg-type]
    asyncio.run(play(what, fake, SLO_S, bounds=limits, on_result=results.append))
    return results, time.monotonic() - start_s


def test_slow_answers_do_not_hold_back_later_requests() -> None:
    fake = Fake(5.0, 0.0, 0.0)
    results, _ = run(trace(0.0, 0.1, 0.2), fake, drain_s=0.0)
    assert [round(fake.sent_at_s[i] - fake.sent_at_s[0], 1) for i in range(3)] == [0.0, 0.1, 0.2]
    assert [result.index for result in results] == [1, 2, 0]


def test_the_run_ends_when_everything_is_decided() -> None:
    results, took_s = run(trace(0.0, 0.25), Fake(60.0), drain_s=30.0)
    # The second deadline is at 0.45 s; nothing can change after it.
    assert 0.4 < took_s < 1.0
    assert [result.status for result in results] == [Status.CUT, Status.CUT]
    assert all(result.end_s > 0.2 for result in results)


def test_the_drain_is_bounded() -> None:
    results, took_s = run(trace(0.0, 0.29), Fake(60.0), drain_s=0.05)
    assert took_s < 0.6
    assert {result.index: result.end_s > 0.2 for result in results} == {0: True, 1: False}


def test_every_request_has_one_result() -> None:
    what = make_trace(Mix(), 200.0, 0.5, 1)
    results, _ = run(what, Fake(0.0, 0.05, 60.0), drain_s=1.0)
    assert sorted(result.index for result in results) == list(range(len(what.items)))


def test_too_many_requests_are_refused_before_the_first() -> None:
    with pytest.raises(ValueError, match="2 requests, at most 1"):
        run(trace(0.0, 0.1), Fake(0.0), requests=1)


def test_a_result_that_cannot_be_recorded_is_not_lost_silently() -> None:
    def on_result(_: Result) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(play(trace(0.0), Fake(0.0), SLO_S, bounds=Bounds(), on_result=on_result))


def test_an_interrupt_hangs_up_and_records() -> None:
    results: list[Result] = []

    async def main() -> None:
        task = asyncio.create_task(
            play(trace(0.0, 5.0), Fake(60.0), SLO_S, bounds=Bounds(), on_result=results.append)
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [result.status for result in results] == [Status.CUT]
