"""Moore's algorithm against every subset."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.promises import Promise, most_kept


def feasible(promises: list[Promise], speed: float) -> bool:
    work_s = 0.0
    for promise in sorted(promises):
        work_s += promise.work_s
        if work_s > speed * promise.due_s + 1e-9:
            return False
    return True


works = st.lists(
    st.tuples(st.integers(1, 20).map(float), st.integers(1, 12).map(float)), max_size=7
)


@given(works, st.sampled_from([1.0, 0.5, 0.25]))
def test_no_other_choice_keeps_more(pairs: list[tuple[float, float]], speed: float) -> None:
    promises = sorted(Promise(due, work, i) for i, (due, work) in enumerate(pairs))
    kept = most_kept(promises, 0.0, speed)
    assert feasible(kept, speed)
    assert len({promise.owner for promise in kept}) == len(kept)
    more = combinations(promises, len(kept) + 1)
    assert not any(feasible(list(choice), speed) for choice in more)


def test_the_one_with_most_work_is_given_up() -> None:
    short, long, last = Promise(4.0, 2.0, 0), Promise(5.0, 4.0, 1), Promise(6.0, 2.0, 2)
    assert sorted(most_kept([short, long, last], 0.0, 1.0)) == [short, last]


def test_no_time_keeps_nothing() -> None:
    assert most_kept([Promise(5.0, 1.0, 0)], 0.0, -0.2) == []
