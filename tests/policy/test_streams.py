"""Streams as arrays do what tickets do one by one."""

from __future__ import annotations

from math import isnan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horizonserve.policy.slack import Ticket
from horizonserve.policy.streams import Streams
from horizonserve.slo import Path, RequestClass


def ticket(name: int, tbt_s: float) -> Ticket:
    return Ticket(str(name), RequestClass.T2T, Path.SHORT, 0.0, 1.0, 0.1, tbt_s)


iterations = st.lists(
    st.tuples(st.floats(0.01, 0.3), st.lists(st.integers(0, 3), min_size=5, max_size=5)),
    max_size=30,
)


@given(iterations)
def test_release_times_are_those_of_the_tickets(steps: list[tuple[float, list[int]]]) -> None:
    streams, now_s = Streams(), 0.9
    tickets = [ticket(index, 0.03 * (1 + index)) for index in range(5)]
    for one in tickets:
        one.token(now_s)
    rows = np.array([streams.enter(t.released_s or 0.0, t.tbt_s, 100) for t in tickets] + [0, 0])
    for took_s, tokens in steps:
        now_s += took_s
        # Row 0 is of whoever has none.
        counts = np.array([*tokens, 1, 2])
        streams.generated(rows[counts > 0], counts[counts > 0], now_s)
        for one, count in zip(tickets, tokens, strict=True):
            if count:
                one.token(now_s, count)
        assert np.allclose(streams.released_s[rows[:5]], [t.released_s for t in tickets])
    contexts = [100 + sum(tokens[index] for _, tokens in steps) for index in range(5)]
    assert streams.context_tokens[rows[:5]].tolist() == contexts
    assert isnan(streams.released_s[0])
    for one, row in zip(tickets, rows.tolist(), strict=False):
        assert abs(streams.leave(row) - (one.released_s or 0.0)) < 1e-9
    assert np.isnan(streams.released_s).all()


def test_rows_are_used_again_and_none_is_used_twice() -> None:
    streams = Streams()
    rows = [streams.enter(1.0, 0.05, 10) for _ in range(500)]
    assert len({0, *rows}) == 501
    size = len(streams.released_s)
    streams.generated(np.array(rows), np.ones(500, int), 5.0)
    assert streams.leave(rows[7]) == 5.0
    again = [streams.leave(row) and streams.enter(2.0, 0.05, 10) for row in rows[8:]]
    assert len(streams.released_s) == size and set(again) <= set(rows)
