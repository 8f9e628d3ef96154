"""Which levels a die has and which of them are used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.spatial.ladder import Die, Level, aligned, choose, existing, smallest
from horizonserve.spatial.null import NullBackend


@pytest.mark.parametrize(
    ("total", "capability", "low", "high", "most", "shared"),
    [
        # Ends and spans that the rungs divide without rounding.
        (108, (8, 0), 4, 104, 4, [4, 54, 104, 108]),
        (132, (9, 0), 0, 132, 4, [8, 64, 120, 132]),
        (132, (9, 0), 16, 112, 6, [16, 40, 64, 88, 112, 132]),
        (142, (8, 9), 10, 50, 6, [10, 20, 30, 40, 50, 142]),
        (188, (12, 0), 0, 188, 5, [8, 64, 120, 176, 188]),
        # Around where decode saturates: a quarter to 0.6.
        (132, (9, 0), None, None, 6, [40, 48, 56, 64, 72, 132]),
        (16, (8, 0), None, None, 6, [4, 6, 8, 16]),
    ],
)
def test_even_rungs(total, capability, low, high, most, shared) -> None:
    die = Die(total, *smallest(capability))
    rungs = choose(die, existing(die, aligned(die)), low, high, most)
    assert [level.shared_sms for level in rungs] == shared


@given(st.integers(16, 256), st.sampled_from([(7, 5), (8, 6), (9, 0), (12, 0)]), st.data())
def test_rungs_exist_within_bounds(total: int, capability: tuple[int, int], data) -> None:
    die = Die(total, *smallest(capability))
    levels = existing(die, aligned(die))
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    most = data.draw(st.integers(2, 6))
    *rungs, whole = choose(die, levels, low, high, most)
    assert whole.whole and len(rungs) < most and set(rungs) <= set(levels)
    counts = [level.shared_sms for level in rungs]
    assert counts == sorted(set(counts))
    assert all(low <= count <= high for count in counts)
    assert all(level.shared_sms + level.downstream_sms == total for level in rungs)
    assert all(min(x.shared_sms, x.downstream_sms) >= die.minimum_sms for x in rungs)
    assert all(count % die.alignment_sms == 0 for count in counts)


def test_a_rounding_driver_gives_one_level_for_what_it_grants() -> None:
    die = Die(132, 8, 8)
    levels = existing(die, lambda requested: Level(max(requested, 64), 132 - max(requested, 64)))
    assert levels[0] == Level(64, 68)
    assert len({level.shared_sms for level in levels}) == len(levels)


def test_a_split_that_does_not_cover_the_die_is_refused() -> None:
    with pytest.raises(ValueError, match="132 SMs of the device"):
        existing(Die(132, 8, 8), lambda requested: Level(requested, 8))


def test_null_records_decisions() -> None:
    die = Die(132, 8, 8)
    backend = NullBackend(choose(die, existing(die, aligned(die))))
    with backend.activate(backend.levels[1]):
        pass
    assert list(backend.decisions) == [backend.levels[1]]
    with pytest.raises(ValueError), backend.activate(Level(1, 131)):
        pass
