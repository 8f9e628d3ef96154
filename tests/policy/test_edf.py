"""Earliest deadline first, as the baseline has it and with the lost at the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.edf import LOST_TURN, LostLast, earliest_deadline_first
from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting
from horizonserve.slo import Path, RequestClass


def ticket(deadline_s: float, estimate_s: float = 1.0) -> Ticket:
    name = f"r{deadline_s:g}"
    return Ticket(name, RequestClass.T2T, Path.SHORT, 0.0, deadline_s, estimate_s)


def test_order_is_by_deadline_whatever_the_class() -> None:
    spec = [("a", "t2a", 9.0), ("b", "t2t", 3.0), ("c", "t2i", 1.0), ("d", "t2t", 4.0)]
    made = [
        Ticket(name, RequestClass(c), RequestClass(c).path, 0.0, deadline_s, 1.0)
        for name, c, deadline_s in spec
    ]
    order = earliest_deadline_first(Waiting(made), 10)
    assert [t.group for t in order] == ["c", "b", "d", "a"]
    assert [t.group for t in earliest_deadline_first(Waiting(made), 2)] == ["c", "b"]


def test_who_cannot_be_in_time_goes_behind_those_who_can() -> None:
    late, later, soon, far = ticket(1.0), ticket(2.0, 3.0), ticket(5.0), ticket(9.0, 2.0)
    waiting = Waiting([far, late, soon, later])
    assert LostLast().order(waiting, 4, time_s=3.0) == [soon, far, late, later]
    assert LostLast().order(waiting, 2, time_s=3.0) == [soon, far]
    assert LostLast().order(waiting, 4, time_s=0.0) == earliest_deadline_first(waiting, 4)


def test_one_in_a_few_that_enter_is_one_of_them() -> None:
    order = LostLast()
    lost, kept = ticket(1.0), [ticket(10.0 + index) for index in range(40)]
    waiting = Waiting([lost, *kept])
    entered = []
    for _ in range(LOST_TURN):
        (first,) = order.order(waiting, 1, time_s=3.0)
        waiting.remove(first)
        order.entered(first, 3.0)
        entered.append(first)
    assert entered == [*kept[: LOST_TURN - 1], lost]
    assert order.order(waiting, 1, time_s=3.0) == [kept[LOST_TURN - 1]]


def test_also_within_one_step_and_for_those_who_have_just_missed_it() -> None:
    order = LostLast()
    lost, kept = [ticket(index / 10) for index in range(5)], [ticket(10.0 + i) for i in range(40)]
    found = order.order(Waiting([*lost, *kept]), 33, time_s=3.0)
    places = [place for place, one in enumerate(found) if one in lost]
    assert places == [LOST_TURN - 1, 2 * LOST_TURN - 1, 3 * LOST_TURN - 1]
    # Too late for a first token at 3.0, though the deadline is ahead at 2.5.
    nearly = ticket(2.7)
    for _ in range(LOST_TURN):
        order.entered(kept[0], 3.0)
    assert order.order(Waiting([nearly, kept[1]]), 1, time_s=3.0) == [nearly]
    order.entered(nearly, 3.0)
    assert order.order(Waiting([nearly, kept[1]]), 1, time_s=3.0) == [kept[1]]


@given(st.lists(st.floats(0, 20), max_size=30), st.integers(0, 40), st.floats(0, 20))
def test_everybody_is_there_once(deadlines_s: list[float], limit: int, time_s: float) -> None:
    tickets = [ticket(deadline_s, 1.0 + index % 3) for index, deadline_s in enumerate(deadlines_s)]
    found = LostLast().order(Waiting(tickets), limit, time_s)
    assert len(set(found)) == len(found) == min(limit, len(tickets))
    ahead = [one for one in found if one.deadline_s >= time_s]
    places = [place for place, one in enumerate(found) if one.deadline_s < time_s]
    in_turn = [place for place in places if any(place < found.index(one) for one in ahead)]
    assert all(place % LOST_TURN == LOST_TURN - 1 for place in in_turn)
    assert [one.deadline_s for one in ahead] == sorted(one.deadline_s for one in ahead)
