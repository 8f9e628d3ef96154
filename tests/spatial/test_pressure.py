"""The sampler: smoothing, outages, its thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.spatial import pressure
from horizonserve.spatial.pressure import (
    RETRY_S,
    STALE_S,
    Sample,
    Sampler,
    SourceError,
)


class Scripted:
    """A source that says what it is told to, on a clock that is told to pass."""

    name = "a script"

    def __init__(self) -> None:
        self.now_s = 100.0
        self.values: list[float] = []
        self.error: BaseException | None = None
        self.looks = 0
        self.closed = 0

    def clock(self) -> float:
        return self.now_s

    def sample(self) -> list[Sample]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        values, self.values = self.values, []
        return [Sample(self.now_s, value) for value in values]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def source() -> Scripted:
    return Scripted()


@pytest.fixture
def sampler(source: Scripted) -> Sampler:
    return Sampler(source, clock=source.clock)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[str, str]]]:
    """Log lines of the sampler, as (level, message)."""
    lines: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelname, record.getMessage()))

    handler = Handler()
    pressure.logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger=pressure.logger.name):
        yield lines
    pressure.logger.removeHandler(handler)


def look(sampler: Sampler, source: Scripted, *values: float) -> float | None:
    source.values = list(values)
    wait_s = sampler.look()
    seen = sampler.pressure(source.now_s)
    source.now_s += wait_s
    return seen


def test_unknown_before_the_first_sample(sampler: Sampler, source: Scripted) -> None:
    assert sampler.pressure(source.now_s) is None
    assert source.looks == 0  # nothing was opened
    assert look(sampler, source) is None
    assert look(sampler, source, 0.5) == 0.5


def test_a_new_sample_weighs_gamma(sampler: Sampler, source: Scripted) -> None:
    assert look(sampler, source, 0.5) == 0.5
    assert look(sampler, source, 1.0) == pytest.approx(0.4 * 1.0 + 0.6 * 0.5)
    for _ in range(20):  # looks without a new sample move nothing
        assert look(sampler, source) == pytest.approx(0.7)
    assert look(sampler, source, 0.0, 0.0) == pytest.approx(0.6 * 0.6 * 0.7)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0.01, 1))
def test_the_average_stays_between_the_samples(values: list[float], gamma: float) -> None:
    source = Scripted()
    sampler = Sampler(source, gamma=gamma, clock=source.clock)
    seen = [look(sampler, source, value) for value in values]
    for count, average in enumerate(seen, start=1):
        assert average is not None
        low, high = min(values[:count]), max(values[:count])
        assert low - 1e-9 <= average <= high + 1e-9


def test_a_failure_is_unknown_and_said_once(
    sampler: Sampler, source: Scripted, said: list[tuple[str, str]]
) -> None:
    look(sampler, source, 0.5)
    source.error = SourceError("lost")
    for _ in range(5):
        assert look(sampler, source, 0.5) is None
    assert source.closed == 5
    source.error = None
    assert look(sampler, source) is None
    assert look(sampler, source, 0.9) == 0.9  # what was before the outage is forgotten
    assert said == [
        ("INFO", "memory pressure from a script"),
        ("WARNING", "memory pressure unknown, SM level held: a script: lost"),
        ("INFO", "memory pressure from a script"),
    ]


@pytest.mark.parametrize("error", [OSError(5, "io"), KeyError("x"), RuntimeError(), MemoryError()])
def test_no_error_of_a_source_gets_out(
    sampler: Sampler, source: Scripted, error: Exception, said: list[tuple[str, str]]
) -> None:
    source.error = error
    assert look(sampler, source) is None
    assert len(said) == 1


def test_pauses_between_attempts_grow_to_a_limit(sampler: Sampler, source: Scripted) -> None:
    source.error = SourceError("no driver")
    assert [sampler.look() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_pauses_start_small_again_after_a_calm_stretch(sampler: Sampler, source: Scripted) -> None:
    """And only then: a source that comes and goes is not opened, nor said, every second."""
    source.error = SourceError("flaps")
    assert [sampler.look() for _ in range(3)] == [1, 2, 4]
    source.error = None
    look(sampler, source, 0.5)
    source.error = SourceError("flaps")
    assert sampler.look() == 8
    source.error = None
    source.now_s += RETRY_S[1] + 1
    look(sampler, source, 0.5)
    source.error = SourceError("flaps")
    assert sampler.look() == 1


def test_a_source_that_falls_silent_is_an_outage(
    sampler: Sampler, source: Scripted, said: list[tuple[str, str]]
) -> None:
    began_s = source.now_s
    assert look(sampler, source, 0.5) == 0.5
    while look(sampler, source) is not None:
        assert source.now_s - began_s <= STALE_S + 1
    assert source.closed == 1
    assert said[-1][1].endswith("no new sample for 5 s")
    # It is given the same patience anew, not one look.
    assert look(sampler, source) is None
    assert source.closed == 1
    assert look(sampler, source, 0.7) == 0.7


def test_a_figure_ages_although_nobody_looks(sampler: Sampler, source: Scripted) -> None:
    """The thread may hang in the driver; the reader knows by the time."""
    look(sampler, source, 0.5)
    began_s = source.now_s - 0.1
    assert sampler.pressure(began_s + STALE_S) == 0.5
    assert sampler.pressure(began_s + STALE_S + 0.01) is None


@pytest.mark.parametrize(
    ("wrong", "named"), [({"gamma": 0}, "gamma 0"), ({"period_s": 0.04}, "at least 0.05")]
)
def test_wrong_arguments_are_named(source: Scripted, wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampler(source, **wrong)  # type: ignore[arg-type]


def test_the_thread_samples_and_ends(source: Scripted) -> None:
    sampler = Sampler(source, period_s=0.05)
    source.values = [0.5]
    sampler.start()
    until_s = time.monotonic() + 20
    while sampler.pressure(time.monotonic()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    threads = [thread for thread in threading.enumerate() if thread.name == "horizon-pressure"]
    assert [thread.daemon for thread in threads] == [True]
    sampler.close()
    assert not threads[0].is_alive()
    assert source.closed == 1
    assert sampler.pressure(time.monotonic()) is None
    looks = source.looks
    time.sleep(0.12)
    assert source.looks == looks


def test_no_more_than_twenty_looks_a_second(source: Scripted) -> None:
    sampler = Sampler(source, period_s=pressure.MIN_PERIOD_S)
    began_s = time.monotonic()
    sampler.start()
    time.sleep(0.5)
    sampler.close()
    assert 1 <= source.looks <= 20 * (time.monotonic() - began_s) + 1


def test_closing_what_was_never_started(sampler: Sampler, source: Scripted) -> None:
    sampler.close()
    sampler.close()
    assert source.looks == 0


def test_closing_ends_a_long_pause(source: Scripted) -> None:
    source.error = SourceError("no driver")
    sampler = Sampler(source)
    sampler.start()
    while not source.looks:
        time.sleep(0.01)
    began_s = time.monotonic()
    sampler.close(wait_s=30)
    assert time.monotonic() - began_s < 10
