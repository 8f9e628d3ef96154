"""The waiting groups by deadline."""

from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.slack import Ticket
from horizonserve.policy.waiting import Waiting
from horizonserve.slo import Path, RequestClass

tickets = st.lists(
    st.tuples(
        st.sampled_from(list(RequestClass)),
        st.floats(-50, 50),
        st.sampled_from([0.1, 1.0, 7.0]),
    ),
    max_size=60,
)


def make(drawn: list[tuple[RequestClass, float, float]]) -> list[Ticket]:
    return [
        Ticket(str(i), c, c.path, 0.0, deadline_s, estimate_s)
        for i, (c, deadline_s, estimate_s) in enumerate(drawn)
    ]


@given(
    tickets,
    st.floats(-60, 60),
    st.floats(0.1, 5),
    st.sampled_from([float("-inf"), 0.0, 0.5]),
    st.integers(0, 70),
)
def test_kinds_agree_with_the_slack_of_each_ticket(
    drawn: list[tuple[RequestClass, float, float]],
    now_s: float,
    u_guard: float,
    u_lost: float,
    limit: int,
) -> None:
    made = make(drawn)
    waiting = Waiting(made)
    for path in Path:
        mine = sorted((t for t in made if t.path is path), key=lambda t: t.deadline_s)
        lost = [t for t in mine if t.deadline_s < now_s + u_lost * t.estimate_s]
        rest = [t for t in mine if t not in lost]
        # The comparison of the index, so that rounding cannot tell the two apart.
        protected = [t for t in rest if t.deadline_s < now_s + u_guard * t.estimate_s]
        ordinary = [t for t in rest if t not in protected]
        kinds = waiting.kinds(path, now_s, u_guard, u_lost)
        for runs, expected in zip(kinds[:3], (protected, ordinary, lost), strict=True):
            assert runs.size == len(expected)
            first = runs.first(limit)
            assert len(first) == min(limit, len(expected))
            assert [t.deadline_s for t in first] == [t.deadline_s for t in expected[:limit]]
            assert set(runs.first(len(made))) == set(expected)


@given(tickets, st.data())
def test_what_is_removed_is_gone_and_nothing_else(
    drawn: list[tuple[RequestClass, float, float]], data: st.DataObject
) -> None:
    made = make(drawn)
    waiting = Waiting(made)
    gone = data.draw(st.lists(st.sampled_from(made), unique_by=id)) if made else []
    for ticket in gone:
        waiting.remove(ticket)
    left = [t for t in made if t not in gone]
    assert len(waiting) == len(left)
    assert set(waiting.everything().first(len(made))) == set(left)


def test_equal_deadlines_keep_their_order() -> None:
    made = make([(RequestClass.T2T, 1.0, 1.0)] * 5)
    assert Waiting(made).everything().first(5) == made
