"""Levels as CPU affinity of real threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from horizonserve.spatial.cores import CoresBackend
from horizonserve.spatial.ladder import Level, Side

CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split")


@pytest.fixture(autouse=True)
def uncapped() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        os.sched_setaffinity(thread.native_id or 0, CORES)


@pytest.fixture
def worker() -> Iterator[Callable[[], set[int]]]:
    """Asks a thread that runs all the while which cores it may use."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda: pool.submit(os.sched_getaffinity, 0).result()


def cores(side: Side, told: list[int] | None = None) -> CoresBackend:
    return CoresBackend(side, [].append if told is None else told.append, 64, 1, len(CORES) - 1)


def test_both_sides_have_the_same_levels_and_share_the_cores(
    worker: Callable[[], set[int]],
) -> None:
    shared, downstream = cores(Side.SHARED), cores(Side.DOWNSTREAM)
    assert shared.levels == downstream.levels
    *rungs, whole = shared.levels
    assert rungs and whole.whole and len({level.fingerprint for level in rungs}) == 1
    for level in rungs:
        with shared.activate(level):
            mine = worker()
        with downstream.activate(level):
            theirs = worker()
        assert (len(mine), len(theirs)) == level[:2]
        assert not mine & theirs and mine | theirs == set(CORES)


def test_the_whole_gives_all_back(worker: Callable[[], set[int]]) -> None:
    told: list[int] = []
    backend = cores(Side.SHARED, told)
    with backend.activate(backend.levels[0]):
        pass
    # Kept between forwards, until the next level.
    assert worker() == os.sched_getaffinity(0) == set(CORES[:1])
    for _ in range(3):
        with backend.activate(backend.levels[-1]):
            assert worker() == os.sched_getaffinity(0) == set(CORES)
    assert told == [1, len(CORES)]


def test_never_more_threads_than_without_a_cap() -> None:
    told: list[int] = []
    backend = CoresBackend(Side.DOWNSTREAM, told.append, 1, 1, 1)
    for level in (backend.levels[0], backend.levels[-1]):
        backend.activate(level)
    assert told == [1, 1]


def test_other_cores_are_another_split() -> None:
    levels = cores(Side.SHARED).levels
    os.sched_setaffinity(0, CORES[:2])
    if len(CORES) > 2:
        assert cores(Side.SHARED).levels != levels
    os.sched_setaffinity(0, CORES[:1])
    with pytest.raises(ValueError):
        CoresBackend(Side.SHARED, [].append, 1, 2, 1)
    assert len(CoresBackend(Side.SHARED, [].append, 1).levels) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="not on the ladder"):
        cores(Side.SHARED).activate(Level(1, len(CORES) - 1, 12345))
