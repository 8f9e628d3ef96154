"""Equation 1, and what holds a change of level back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from horizonserve.spatial.controller import Controller, Rules

RUNGS = (16, 32, 48, 64, 80)
WHOLE = 132

#: Time (s), whether downstream is active, pressure.
Step = tuple[float, bool, float | None]


def rules(**changes: float) -> Rules:
    return Rules(RUNGS, WHOLE, **{"saturation": 0.8, "min_dwell_s": 1.0, **changes})


def levels(of: Rules, steps: Sequence[Step]) -> list[int]:
    controller = Controller(of)
    return [controller.level_sms(*step) for step in steps]


@pytest.mark.parametrize(
    ("pressure", "sms"),
    [(0, 16), (0.09, 16), (0.11, 32), (0.2, 32), (0.4, 48), (0.6, 64), (0.8, 80), (1, 80)],
)
def test_more_pressure_is_a_higher_rung_up_to_the_cap(pressure: float, sms: int) -> None:
    assert levels(rules(), [(0, True, pressure)]) == [sms]


def test_half_way_between_two_rungs_is_the_lower() -> None:
    assert levels(Rules((16, 32, 48), 132, saturation=1.0), [(0, True, 0.25)]) == [16]


def test_uneven_rungs_go_by_their_sms() -> None:
    ladder = Rules((8, 10, 80), 132, saturation=1.0)
    assert [levels(ladder, [(0, True, b / 10)])[0] for b in range(11)] == [8] + [10] * 5 + [80] * 5


def test_a_ladder_of_one_rung() -> None:
    one = Rules((64,), 132)
    assert levels(one, [(0, False, 0.5), (1, True, 0), (2, True, 1)]) == [132, 64, 64]


STORIES: dict[str, tuple[dict[str, float], list[Step], list[int]]] = {
    "nothing downstream: all SMs, whatever the pressure": (
        {},
        [(0, False, 0.0), (1, False, 1.0), (2, False, None)],
        [WHOLE, WHOLE, WHOLE],
    ),
    "downstream starts: at once, however short the stay was": (
        {},
        [(0, False, 0.4), (0.001, True, 0.4)],
        [WHOLE, 48],
    ),
    "downstream stops: all SMs a dwell after it was last seen": (
        {},
        [(0, True, 0.4), (5, True, 0.4), (5.9, False, 0.4), (6.0, False, 0.4)],
        [48, 48, 48, WHOLE],
    ),
    "a gap between two bursts stays on the ladder": (
        {},
        [(0, True, 0.4), (0.5, False, 0.4), (0.9, True, 0.4), (1.8, False, 0.4)],
        [48, 48, 48, 48],
    ),
    "after a long pause the first forward has all SMs": (
        {},
        [(0, True, 0.4), (60, False, 0.4)],
        [48, WHOLE],
    ),
    "in a gap the pressure changes nothing": (
        {},
        [(0, True, 0.4), (5, True, 0.4), (5.5, False, 1.0)],
        [48, 48, 48],
    ),
    "a change of rung waits for the dwell": (
        {},
        [(0, True, 0.4), (0.9, True, 0.8), (1.0, True, 0.8), (1.9, True, 0), (2.0, True, 0)],
        [48, 48, 80, 80, 16],
    ),
    "the dwell counts from the last change, not from the last wish": (
        {},
        [(0, True, 0.4), (3, True, 0.8), (3.5, True, 0.4), (4, True, 0.4)],
        [48, 80, 80, 48],
    ),
    "two rungs of difference": (
        {"step": 2, "min_dwell_s": 0},
        [(0, True, 0.4), (1, True, 0.6), (2, True, 0.2), (3, True, 0.8), (4, True, 0.4)],
        [48, 48, 48, 80, 48],
    ),
    "pressure unknown: held": (
        {"min_dwell_s": 0},
        [(0, True, 0.2), (9, True, None), (18, True, None), (19, True, 0.6)],
        [32, 32, 32, 64],
    ),
    "pressure unknown when downstream starts: the cap": (
        {},
        [(0, False, None), (1, True, None), (9, True, None), (10, True, 0)],
        [WHOLE, 80, 80, 16],
    ),
    "the cap binds although the step is larger than the ladder": (
        {"step": 9, "min_dwell_s": 0},
        [(0, False, 1), (1, True, 1), (2, True, 0)],
        [WHOLE, 80, 80],
    ),
    "the paper's rule: no dwell on any way": (
        {"min_dwell_s": 0},
        [(0, True, 0.4), (0, True, 0.8), (0, False, 0.8), (0, True, 0), (0, True, 0.2)],
        [48, 80, WHOLE, 16, 32],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_step_tables(story: str) -> None:
    changes, steps, expected = STORIES[story]
    assert levels(rules(**changes), steps) == expected


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rungs_sms": ()}, "at least one rung"),
        ({"rungs_sms": (16, 16)}, "ascending"),
        ({"rungs_sms": (0, 16)}, "positive"),
        ({"aggregate_sms": 80}, "above the last"),
        ({"saturation": 0}, "saturation 0"),
        ({"saturation": float("nan")}, "saturation nan"),
        ({"step": 0}, "step 0"),
        ({"min_dwell_s": -1}, "min_dwell_s -1"),
        ({"min_dwell_s": float("inf")}, "min_dwell_s inf"),
    ],
)
def test_wrong_rules_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Rules(**{"rungs_sms": RUNGS, "aggregate_sms": WHOLE, **wrong})  # type: ignore[arg-type]


any_dwell_s = st.floats(0, 3)


@st.composite
def any_rules(draw: st.DrawFn, dwell_s: st.SearchStrategy[float] = any_dwell_s) -> Rules:
    rungs = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=6)))
    return Rules(
        rungs_sms=tuple(rungs),
        aggregate_sms=rungs[-1] + draw(st.integers(1, 100)),
        saturation=draw(st.floats(0.05, 1)),
        step=draw(st.integers(1, 3)),
        min_dwell_s=draw(dwell_s),
    )


pressures = st.none() | st.floats(0, 1)
#: Waits between two forwards (s), then what the second finds.
walks = st.lists(st.tuples(st.floats(0, 2), st.booleans(), pressures), max_size=120)


def timed(walk: Sequence[tuple[float, bool, float | None]]) -> list[Step]:
    now_s, steps = 0.0, []
    for wait_s, active, pressure in walk:
        now_s += wait_s
        steps.append((now_s, active, pressure))
    return steps


@given(any_rules(), walks)
def test_never_above_the_cap_while_downstream_is_active(of: Rules, walk: list[Step]) -> None:
    steps = timed(walk)
    for (_, active, _), sms in zip(steps, levels(of, steps), strict=True):
        assert sms in of.rungs_sms or sms == of.aggregate_sms
        if active:
            assert sms <= of.rungs_sms[-1]


@given(any_rules(), st.lists(st.tuples(st.booleans(), st.floats(allow_nan=True)), max_size=50))
def test_no_pressure_whatever_leads_off_the_ladder(
    of: Rules, walk: list[tuple[bool, float]]
) -> None:
    steps = [(float(at_s), active, pressure) for at_s, (active, pressure) in enumerate(walk)]
    assert set(levels(of, steps)) <= {*of.rungs_sms, of.aggregate_sms}


@given(any_rules(), walks, pressures, st.booleans())
def test_a_constant_signal_settles_in_one_change(
    of: Rules, walk: list[Step], pressure: float | None, active: bool
) -> None:
    steps = timed(walk)
    began_s = steps[-1][0] if steps else 0.0
    constant = [(began_s + 0.1 * tick, active, pressure) for tick in range(80)]
    seen = levels(of, [*steps, *constant])[len(steps) :]
    assert sum(before != after for before, after in zip(seen, seen[1:], strict=False)) <= 1


@given(any_rules(dwell_s=st.floats(0.1, 3)), walks)
def test_changes_per_time_are_bounded(of: Rules, walk: list[Step]) -> None:
    """The third change is a dwell after the first, and rung to rung the second already is."""
    steps = timed(walk)
    changed_s: list[float] = []
    onto_ladder: list[float] = []
    before = of.aggregate_sms
    for (now_s, _, _), sms in zip(steps, levels(of, steps), strict=True):
        if sms != before:
            changed_s.append(now_s)
            if sms != of.aggregate_sms:
                onto_ladder.append(now_s)
        before = sms
    for times, apart in ((changed_s, 2), (onto_ladder, 1)):
        for early_s, late_s in zip(times, times[apart:], strict=False):
            assert late_s - early_s >= of.min_dwell_s
    if steps:
        assert len(changed_s) <= 2 * ((steps[-1][0] - steps[0][0]) / of.min_dwell_s + 1)


def literally(of: Rules, steps: Sequence[Step]) -> list[int]:
    """Equation 1 and step 3 of Algorithm 1 as they are printed."""
    low, cap = of.rungs_sms[0], of.rungs_sms[-1]
    kept, chosen = of.aggregate_sms, []
    for _, active, pressure in steps:
        if not active:
            kept = of.aggregate_sms
        elif pressure is None:
            kept = min(kept, cap)
        else:
            exact = low + min(max(pressure / of.saturation, 0), 1) * (cap - low)
            distances = sorted(abs(rung - exact) for rung in of.rungs_sms)
            assume(len(distances) == 1 or distances[1] - distances[0] > 1e-6)
            wanted = min(of.rungs_sms, key=lambda rung: abs(rung - exact))
            if (
                kept == of.aggregate_sms
                or abs(of.rungs_sms.index(wanted) - of.rungs_sms.index(kept)) >= of.step
            ):
                kept = wanted
        chosen.append(kept)
    return chosen


@given(any_rules(dwell_s=st.just(0.0)), walks)
def test_without_a_dwell_it_is_the_papers_rule(of: Rules, walk: list[Step]) -> None:
    steps = timed(walk)
    assert levels(of, steps) == literally(of, steps)
